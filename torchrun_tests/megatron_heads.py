"""The head of a Megatron model at TP=2 by itself: captured, behind Megatron's operations, and its logits."""

import dataclasses
import functools
from collections.abc import Callable

import harness
import megatron_cases as cases
import torch
import torch.utils.checkpoint
from harness import compare_all, compare_step
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn

from megatron_lce import StoredHead, capture_lm_head, compat, enable_fused_linear_ce
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_runtime
from tests.jsd_oracle import jsd_of_products

COLD = 0.1  # so small that the divergence of two models is not


def check_mtp_capture(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Two MTP heads taught by the main head, whose rows may lie on another rank, against Megatron's own logits."""
    batch = cases.microbatches(case, device)[0]
    inputs, labels = (batch["tokens"], batch["positions"], None), batch["labels"].clamp(min=-1)
    options = dataclasses.replace(cases.gpt_options(case), mtp_layers=2)
    MTPLossLoggingHelper.tracker.clear()  # sized for one layer

    def of_heads(model: nn.Module) -> list[Tensor]:
        with capture_lm_head(model, mtp="capture") as head:
            model(*inputs)
        options = {"labels": labels, "ignore_index": -1, "temperature": COLD}
        hidden = head.hidden.detach()
        if head.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden)
        stored = StoredHead(hidden.transpose(0, 1), head.weight)
        alone = head.tp_group.rank() == head.tp_group.size() - 1
        for one, odd in zip(head.mtp_heads, (3, None), strict=True):  # before ranks exchange rows
            call = functools.partial(one.linear_divergence, odd if alone else head, **options)
            message = harness.message_of(call)
            right = "teacher_head must be a captured head" in message
            report.check(f"{case.name}: one rank's teacher of depth {one._call.depth}", right, message)
        for depth, one in enumerate(head.mtp_heads, 1):
            both = [one.linear_divergence(teacher, **options) for teacher in (head, stored)]
            same = all(torch.equal(getattr(both[0], kind), getattr(both[1], kind)) for kind in ("forward_kl", "tv"))
            report.check(f"{case.name}: a stored teacher of depth {depth}", same, "")
        return [one.linear_jsd(head, **options) for one in head.mtp_heads]

    def of_logits(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []

        def record(labels: Tensor, logits: Tensor) -> Tensor:
            whole = mappings.gather_from_tensor_model_parallel_region(logits).transpose(0, 1)
            seen.append(whole.double() / COLD)
            return torch.zeros(labels.shape, device=device)

        find_language_model(model).compute_language_model_loss = record
        model(*inputs, labels=labels.clamp(min=0))
        *own, main = seen
        divergences = []
        for depth, logits in enumerate(own, 1):
            later = (x.detach().roll(-depth, 1) for x in (main, labels))
            teacher, of_rows = next(later), next(later)
            of_rows[:, -depth:] = -1
            divergences.append(jsd_of_products(logits, teacher, labels=of_rows, ignore_index=-1))
        return divergences

    steps = []
    for divergences in (of_logits, of_heads):
        model = megatron_runtime.build_gpt(options, device=device, ddp=True)
        if case.main_grad and divergences is of_heads:
            cases.set_main_grad_fusion([model])
        model.config.finalize_model_grads_func = finalize_model_grads
        losses = torch.stack(divergences(model))
        (losses * torch.arange(losses.numel(), device=device).view_as(losses).cos()).sum().backward()
        finalize_model_grads([model])
        steps.append(({"divergences": losses.detach()}, cases.gradients([model])))
    report.check(f"{case.name}: MTP's tracker", not MTPLossLoggingHelper.tracker.get("values", losses * 0).any(), "")
    compare_step(report, f"{case.name}: MTP heads captured", steps[1], steps[0])


def copied_in_parts(x: Tensor) -> Tensor:
    """As AReaL takes padding out of packed sequences."""
    copy = torch.empty_like(x)
    for rows in torch.arange(len(x)).split(5):
        copy[rows[0] : rows[-1] + 1] = x[rows[0] : rows[-1] + 1]
    return copy


def check_compat(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The call of verl and AReaL behind Megatron's own operations: hidden's gradient is summed once, wherever."""
    group = parallel_state.get_tensor_model_parallel_group()
    rank, ranks = group.rank(), group.size()
    generator = torch.Generator().manual_seed(5)
    whole, weight = (torch.randn(*size, generator=generator).to(device) for size in ((12, 2, 8), (10 * ranks, 8)))
    labels = torch.randint(0, len(weight), (12, 2), generator=generator).to(device)
    hidden, head = (x.double().requires_grad_() for x in (whole, weight))
    distribution = torch.distributions.Categorical(logits=hidden @ head.T)
    (distribution.log_prob(labels) - 0.5 * distribution.entropy()).sum().backward()
    gather, turned = mappings.gather_from_sequence_parallel_region, lambda x: x.transpose(0, 1).contiguous()
    copy, reduce = mappings.copy_to_tensor_model_parallel_region, mappings.reduce_from_tensor_model_parallel_region
    hooked = nn.Identity()
    hooked.register_full_backward_hook(lambda *_: None)
    part_of_eye = torch.eye(8, device=device).chunk(ranks)[rank]  # frozen layers whose ranks' parts sum to the identity
    ways: dict[str, tuple[Callable, int]] = {  # what stands in front, and how many parts hidden is in
        "replicated": (lambda x: x, 1),
        "copied": (copy, 1),
        "copied, scaled": (lambda x: 2 * (copy(x) / 2), 1),
        "behind frozen layers": (lambda x: reduce(copy(x) @ part_of_eye.T @ part_of_eye), 1),
        "gathered": (gather, ranks),
        "gathered, cast and turned twice": (lambda x: turned(turned(gather(x.double())).float()), ranks),
        "gathered, copied in parts": (lambda x: copied_in_parts(gather(x)), ranks),
        "gathered under a hook": (lambda x: hooked(gather(x)), ranks),
        "gathered, put together": (lambda x: torch.cat([part + 0 for part in gather(x).split(5)]), ranks),
        "gathered, of whose gradient a part is taken": (lambda x: gather(x, tensor_parallel_output_grad=False), ranks),
    }
    compiled = torch.compile(lambda x: 2 * (x / 2), backend="aot_eager")
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    opaque: dict[str, tuple[Callable, int, bool]] = {  # and whether the call has to sum, which no graph shows
        "compiled": (compiled, 1, True),
        "gathered, compiled": (lambda x: compiled(gather(x)), ranks, False),
        "gathered in a checkpoint": (lambda x: checkpointed(gather, x), ranks, False),
    }
    call = functools.partial(compat.linear_cross_entropy, dist_process_group=group)
    for name, (front, parts, *sums) in (ways | opaque).items():
        part = whole.chunk(parts)[rank % parts].clone().requires_grad_()
        shard = weight.chunk(ranks)[rank].clone().requires_grad_()
        hidden_in = front(part)
        if sums:
            message = "reduce_grad_hidden must be False or True where hidden comes out of a compiled, checkpointed"
            report.refused(
                f"compat, hidden {name}: refused", functools.partial(call, hidden_in, shard, labels), message
            )
        told = {"reduce_grad_hidden": sums[0]} if sums else {}
        logprobs, entropy = call(hidden_in, shard, labels, **told)
        (logprobs - 0.5 * entropy).sum().backward()
        found = {"hidden": part.grad, "weight": shard.grad}
        expected = {"hidden": hidden.grad.chunk(parts)[rank % parts], "weight": head.grad.chunk(ranks)[rank]}
        compare_all(report, f"compat, hidden {name}: gradients", found, expected)
    part, shard = (x.chunk(ranks)[rank].clone().requires_grad_() for x in (whole, weight))
    both = torch.cat([gather(part), part])
    of_both = shard, labels.repeat(2, 1)[: len(both)]
    report.refused(
        "compat, half of hidden gathered: refused", functools.partial(call, both, *of_both), "hidden must come"
    )


def check_logits(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Without labels an enabled model gives Megatron's logits, bit for bit, gathered where that is asked for."""
    batch = cases.microbatches(case, device)[0]
    inputs = (batch["tokens"], batch["positions"], None)
    (model,) = cases.build(case, device)
    with torch.no_grad():
        expected = [model(*inputs, runtime_gather_output=gather) for gather in (None, True)]
        enable_fused_linear_ce(model)
        actual = [model(*inputs, runtime_gather_output=gather) for gather in (None, True)]
    for name, ours, theirs in zip(("sharded", "gathered"), actual, expected, strict=True):
        report.check(f"{case.name}: {name} logits", torch.equal(ours, theirs), str(tuple(ours.shape)))

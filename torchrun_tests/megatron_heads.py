"""The head of a Megatron model over ranks: captured, behind Megatron's operations; what one rank does otherwise."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from unittest import mock

import harness
import megatron_cases as cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from harness import compare_all, compare_step
from megatron.core import parallel_state, process_groups_config
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn

from megatron_lce import StoredHead, capture_lm_head, compat, enable_fused_linear_ce
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_layers, megatron_runtime
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


def check_reasons_of_one_rank(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """A reason that holds on one rank only, such as a hook that logs, is everybody's, for the flag and the capture; one
    of the ranks that hold the head warns."""
    chunks = cases.build(case, device)
    hook = None
    if cases.has_head(chunks) and parallel_state.get_tensor_model_parallel_rank() == 0:
        hook = find_language_model(chunks).output_layer.register_forward_hook(lambda module, args, output: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = enable_fused_linear_ce(chunks)
    everywhere: list[tuple[tuple[str, ...], int]] = [((), 0)] * dist.get_world_size()
    dist.all_gather_object(everywhere, (handle.reasons, sum("is not used" in str(one.message) for one in told)))
    reason = "output_layer has forward or backward hooks, which expect logits"
    reasons = {reasons for reasons, _ in everywhere}
    expected = {(reason,)} | ({("this pipeline stage has no LM head",)} if case.pipeline else set())
    report.check(f"{case.name}: fallback, same reasons", not handle.enabled and reasons == expected, str(reasons))
    warned = sum(count for _, count in everywhere)
    report.check(f"{case.name}: fallback, one warning", warned == 1, f"{warned} on {len(everywhere)} ranks")
    refused = f"the LM head cannot be captured: {reason}" if cases.has_head(chunks) else "no error"
    for expected in (refused, "no error"):
        capture = capture_lm_head(chunks)
        message = harness.message_of(capture.__enter__)
        if message == "no error":
            capture.__exit__(None, None, None)
        report.check(f"{case.name}: capture with a reason of one rank", message == expected, message)
        if hook is not None:
            hook.remove()


def check_later_steps(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """After its first step the flag exchanges no arguments, whatever masks follow."""
    chunks = cases.build(case, device)
    cases.enable(chunks, case, fused=True)
    batches = cases.microbatches(case, device)
    forward_step = functools.partial(cases.forward_step, masked=case.masked)
    counts = []
    for _ in range(3):
        with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
            cases.train_step(chunks, forward_step, batches)
        counts.append(exchange.call_count)
        for batch in batches:  # one more token of each row is masked
            batch["loss_mask"][:, int(batch["loss_mask"][0].argmax())] = 0
            if not case.masked:  # the model gets no mask
                batch["labels"] = batch["labels"].where(batch["loss_mask"] != 0, -100)
    report.check(f"{case.name}: later steps exchange no arguments", counts[1:] == [0, 0], f"{counts} exchanges")


def check_arguments_of_one_rank(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """What the last rank alone calls otherwise is an error on all, at the first call of its kind."""
    batch = cases.microbatches(case, device)[0]
    inputs, labels = (batch["tokens"], batch["positions"], None), batch["labels"].clamp(min=0)
    short = torch.ones(cases.BATCH, cases.SEQUENCE - 1, device=device)
    ids = torch.zeros(*labels.shape, 2, dtype=torch.int64, device=device)
    group = parallel_state.get_tensor_model_parallel_group()
    last = group.rank() == group.size() - 1
    chunks = cases.build(case, device)

    def check(call: Callable, given: dict, odd: dict, message: str, *, differs: bool = False) -> None:
        """`differs`: no rank's arguments are wrong by themselves."""
        if differs and group.size() == 1:
            return
        said = message if last or differs else f"rank {group.size() - 1} of tp_group refuses its arguments: {message}"
        report.refused(f"{case.name}: one rank's {message}", lambda: call(**given | (odd if last else {})), said)

    def token_loss(part: Tensor) -> object:
        return head.linear_token_loss(labels, lambda out, factor: -out.logprobs * factor, part)

    with capture_lm_head(chunks) as head:
        chunks[0](*inputs)
    given = {"labels": labels}
    cross_entropy = head.linear_cross_entropy
    check(cross_entropy, given, {"labels": short.long()}, "labels must be [b, s]")
    check(
        cross_entropy, given | {"temperature": short.new_ones(labels.shape)}, {"temperature": short}, "temperature must"
    )
    check(cross_entropy, given, {"logits_scale": "2"}, "logits_scale must be a float")
    check(cross_entropy, given, {"vocab_start": 3}, "vocab_start must not be given")
    check(cross_entropy, given | {"candidates": ids}, {"candidates": ids[:, 1:]}, "candidates must be [b, s, K]")
    check(token_loss, {"part": torch.ones_like(labels)}, {"part": short}, "per_token[0] must be [b, s]")
    check(head.linear_logits_at, {"ids": ids}, {"ids": ids[..., 0]}, "ids must be [b, s, K]")
    temperatures = {"teacher_head": head, "teacher_temperature": short.new_ones(labels.shape)}
    check(head.linear_divergence, temperatures, {"teacher_temperature": short}, "teacher_temperature must be [b, s]")
    # A kind that is new where that of the caller's other calls is known.
    columns, hidden_size = head.weight.shape
    wide = StoredHead(*(torch.ones(*n, 2 * hidden_size, device=device) for n in (labels.shape, (columns,))))
    head.linear_divergence(head, labels=labels)
    no_head = "teacher_head must be a captured head or a StoredHead, got int"
    check(head.linear_divergence, {"teacher_head": wide, "labels": labels}, {"teacher_head": 3}, no_head)
    head.linear_jsd(head, labels=labels)
    jsd = {"teacher_head": head, "labels": labels, "beta": 0}
    for _ in range(2):
        check(head.linear_jsd, jsd, {"labels": short.long()}, "labels must be [b, s]")
        harness.message_of(functools.partial(head.linear_jsd, **jsd | {"labels": short.long()}))
    if group.size() > 1:
        first = group.size() - 1
        calls = [head.linear_topk] * first + [lambda _: capture_lm_head(cases.build(case, device)).__enter__()]
        names = ", ".join(["'linear_topk'"] * first + ["'capture_lm_head'"])
        message = f"operation must be the same on every rank of tp_group, got {names}: has a rank gone on"
        report.refused(f"{case.name}: ranks that are out of step", lambda: calls[group.rank()](3), message)
    out = cross_entropy(labels)
    report.check(f"{case.name}: afterwards", bool(out.logprobs.isfinite().all()), str(out.logprobs.shape))

    enable = functools.partial(enable_fused_linear_ce, chunks)
    check(enable, {}, {"workspace_bytes": -1}, "workspace_bytes must be at least 0")
    check(enable, {}, {"known_loss": 1}, "known_loss must be a bool")
    check(enable, {}, {"softcap": 3.0}, "softcap must be the same on every rank of tp_group", differs=True)
    off = {"use_fused_linear_ce": False}
    check(enable, {}, off, "use_fused_linear_ce must be the same on every rank of tp_group", differs=True)
    check(enable, off, {"skip_masked": True}, "skip_masked must be the same on every rank of tp_group", differs=True)
    handle = enable(skip_masked=True, workspace_bytes=2**28)  # of a kind that no other check here has called
    call = functools.partial(chunks[0], *inputs, labels=labels)
    mask = {"loss_mask": batch["loss_mask"]}
    check(call, mask, {"loss_mask": short}, "loss_mask must have labels' shape")
    report.check(f"{case.name}: loss afterwards", bool(call(**mask).isfinite().all()), str(handle))


def check_own_groups(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """A model whose collection has another tensor-parallel group than the global one: neighbours in place of pairs."""
    ranks = dist.get_world_size()
    pairs = [[rank, rank + ranks // 2] for rank in range(ranks // 2)]
    group, _ = dist.new_subgroups_by_enumeration(pairs)
    alone, _ = dist.new_subgroups(1)
    groups = process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    groups.tp, groups.tp_cp, groups.cp, groups.pp = group, group, alone, alone
    options = cases.gpt_options(dataclasses.replace(case, config=(*case.config, ("tensor_model_parallel_size", 2))))
    batch = cases.microbatches(case, device)[0]
    labels, loss_mask = batch["labels"].clamp(min=0), batch["loss_mask"]
    for part in (batch["tokens"], labels, loss_mask):  # the global groups have different ones on these ranks
        dist.broadcast(part, 0)
    results = []
    for fused in (False, True):
        config = megatron_runtime.transformer_config(options)
        torch.manual_seed(options.seed)
        model = GPTModel(
            config=config,
            transformer_layer_spec=megatron_layers.gpt_block_spec(config),
            vocab_size=options.vocab_size,
            max_sequence_length=options.max_sequence_length,
            share_embeddings_and_output_weights=options.tied,
            position_embedding_type="rope",
            pg_collection=groups,
        ).to(device)
        handle = enable_fused_linear_ce(model, use_fused_linear_ce=fused, skip_masked=True)
        assert handle.enabled == fused, handle.reasons
        if fused:
            losses = model(batch["tokens"], batch["positions"], None, labels=labels, loss_mask=loss_mask)
        else:  # before 0.17 Megatron's loss takes the global group
            logits = model(batch["tokens"], batch["positions"], None)
            logits = mappings.gather_from_tensor_model_parallel_region(logits, group)
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        kept = losses * loss_mask
        kept.sum().backward()
        results.append(({"losses": kept.detach()}, {name: p.grad for name, p in model.named_parameters()}))
    compare_step(report, f"own groups, {case.name}", results[1], results[0])

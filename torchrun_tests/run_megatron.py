"""Megatron models at TP=2 with the fused head on and off: losses, logits and every parameter's gradient.

    torchrun --nproc-per-node 4 torchrun_tests/run_megatron.py --device cpu [--combinations all]

On 4 ranks, cases without pipeline parallelism have two data-parallel replicas; on 2, those with it are left out.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from unittest import mock

import harness
import megatron_cases as cases
import megatron_models as models
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_lce import capture_lm_head, compat, enable_fused_linear_ce, install_megatron_linear_cross_entropy
from megatron_lce.core import blocks
from megatron_lce.megatron_integration.support import find_language_model
from scripts import megatron_runtime
from tests.jsd_oracle import jsd_of_products

ALLOWED = 1e-5  # relative, per parameter, fp32
ALLOWED_BF16 = 1.5  # times Megatron's own error, per parameter
TEMPERATURE = 0.7

FURTHER_CASES = [
    cases.Case(tied=True, pipeline=True, virtual_pipeline=True),
    cases.Case(sequence_parallel=True, main_grad=True, overlap=True),
    cases.Case(tied=True, mtp=True, main_grad=True, overlap=True),
    cases.Case(sequence_parallel=True, mtp=True, masked=True),
    cases.Case(tied=True, main_grad=True, masked=True),
]
OTHER_MODEL_CASES = [cases.Case(), cases.Case(tied=True, sequence_parallel=True)]
TOUCHED_CASES = [cases.Case(), cases.Case(tied=True, sequence_parallel=True), cases.Case(main_grad=True)]
TOUCHED_CASES.append(cases.Case(sequence_parallel=True, masked=True))
MUP = (("use_mup", True), ("mup_base_hidden_size", 16))
SETTINGS = TransformerConfig.__dataclass_fields__
LOSS_OF_HEAD = importlib.util.find_spec("megatron.core.transformer.linear_cross_entropy") is not None
OWN_FLAG = (("cross_entropy_loss_fusion", True), ("cross_entropy_fusion_impl", "linear"))
OWN_FLAG_CASES = [cases.Case(mtp=True), cases.Case(tied=True, sequence_parallel=True)] if LOSS_OF_HEAD else []
if "use_mup" in SETTINGS and not LOSS_OF_HEAD:  # from 0.17; the dev branch multiplies its factor by None, given labels
    FURTHER_CASES.append(cases.Case(mtp=True, config=MUP))
    TOUCHED_CASES.append(cases.Case(mtp=True, config=MUP))
if "mtp_detach_heads" in SETTINGS:  # from 0.19
    FURTHER_CASES.append(cases.Case(mtp=True, main_grad=True, config=(("mtp_detach_heads", True),)))
if importlib.util.find_spec("megatron.core.models.hybrid") is not None:  # from 0.18, the first with MTP
    OTHER_MODEL_CASES.append(cases.Case(tied=True, mtp=True))
CAPTURED_CASES = [
    cases.Case(mtp=True),
    cases.Case(tied=True, sequence_parallel=True, pipeline=True, virtual_pipeline=True),
]


def train(case: cases.Case, device: torch.device, *, fused: bool, like: list[nn.Module] | None = None):
    """A step over several microbatches, two with an optimizer between them: (losses, gradients, the model's chunks)."""
    chunks = cases.build(case, device)
    if like is not None:
        cases.copy_weights(like, chunks)
    masked = {"skip_ignored": case.masked, "ignore_masked": case.masked}
    handle = enable_fused_linear_ce(chunks, use_fused_linear_ce=fused, **masked)
    forward_step = functools.partial(cases.forward_step, masked=case.masked)
    if fused and case.main_grad:
        cases.set_main_grad_fusion(chunks)
    with cases.counted_additions() as additions:
        losses = cases.train_step(chunks, forward_step, cases.microbatches(device))
        if case.overlap:
            optimizer = megatron_runtime.build_optimizer(chunks, use_distributed_optimizer=True)
            optimizer.step()
            losses = cases.train_step(chunks, forward_step, cases.microbatches(device))
    assert handle.enabled == (fused and cases.has_head(chunks)), handle.reasons
    assert additions.called == (handle.enabled and case.main_grad), case
    return losses, cases.gradients(chunks), chunks


def check_training(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The flag on against off: the loss of every token and the accumulated gradient of every parameter."""
    losses, expected, _ = train(case, device, fused=False)
    fused_losses, actual, _ = train(case, device, fused=True)
    compare_all(report, f"{case.name}: losses", fused_losses, losses)
    compare_all(report, f"{case.name}: gradients", actual, expected)


def check_own_flag(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Megatron's flag with our operation in the place of its kernel; our flag, and capture, on a model that has it."""
    losses, expected, _ = train(case, device, fused=False)
    asking = dataclasses.replace(case, config=(*case.config, *OWN_FLAG))
    install_megatron_linear_cross_entropy()
    own_losses, own, _ = train(asking, device, fused=False)
    install_megatron_linear_cross_entropy(False)
    fused_losses, fused, _ = train(asking, device, fused=True)
    chunks = cases.build(asking, device)
    captured_losses = cases.train_step(chunks, cases.captured_forward_step, cases.microbatches(device))
    for name, found_losses, found in (
        ("own flag", own_losses, own),
        ("own flag and ours", fused_losses, fused),
        ("own flag, captured", captured_losses, cases.gradients(chunks)),
    ):
        kept = {key: value for key, value in losses.items() if key in found_losses}  # MTP's acceptance is not counted
        compare_all(report, f"{case.name}: {name}, losses", found_losses, kept)
        compare_all(report, f"{case.name}: {name}, gradients", found, expected)


def check_captured_training(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The same loss through `capture_lm_head`, in Megatron's schedule."""
    losses, expected, _ = train(case, device, fused=False)
    chunks = cases.build(case, device)
    captured = cases.train_step(chunks, cases.captured_forward_step, cases.microbatches(device))
    compare_all(report, f"{case.name}: captured, losses", captured, losses)
    compare_all(report, f"{case.name}: captured, gradients", cases.gradients(chunks), expected)


def check_bf16(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """In bf16: our error against an fp32 run of the same weights, beside Megatron's own."""
    _, native, chunks = train(case, device, fused=False)
    _, fused, _ = train(case, device, fused=True)
    _, exact, _ = train(cases.in_fp32(case), device, fused=False, like=chunks)
    ratios = {
        name: error_ratio(relative_error(fused[name], expected), relative_error(native[name], expected))
        for name, expected in exact.items()
    }
    count, worst, ratio = worst_of_all_ranks(ratios)
    detail = f"{count} tensors, worst {worst}: {ratio:.2f} times Megatron's error, allowed {ALLOWED_BF16}"
    report.check(f"{case.name}: gradients", ratio <= ALLOWED_BF16, detail)


def compare_all(report: harness.Report, name: str, actual: dict, expected: dict) -> None:
    """One line for a whole set of tensors."""
    assert actual.keys() == expected.keys()
    count, worst, error = worst_of_all_ranks({str(key): relative_error(actual[key], expected[key]) for key in expected})
    report.check(name, error <= ALLOWED, f"{count} tensors, worst {worst}: error {error:.1e}, allowed {ALLOWED:.0e}")


def worst_of_all_ranks(values: dict[str, float]) -> tuple[int, str, float]:
    """How many there are on all ranks, and the largest with its name. Stages hold different ones."""
    everywhere: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    name, largest = max((pair for rank in everywhere for pair in rank.items()), key=lambda pair: pair[1])
    return sum(map(len, everywhere)), name, largest


def error_ratio(error: float, native: float) -> float:
    """Our error over Megatron's own. Where Megatron's is 0, at a weight without a gradient, ours must be."""
    if native == 0:
        return 0.0 if error == 0 else float("inf")
    return error / native


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm over norm; infinite for NaN, and for anything but zeros where zeros are expected."""
    difference, scale = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
    if difference == 0:
        return 0.0
    return difference / scale if difference < float("inf") and scale > 0 else float("inf")


def check_other_models(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Flag on against off for a hybrid model and, where it has what the case asks for, for LLaVA around a GPTModel."""
    kinds = [("hybrid", models.hybrid_model, models.text_loss)]
    kinds += [] if case.sequence_parallel or case.mtp else [("LLaVA", models.llava_model, models.image_loss)]
    batch = cases.microbatches(device)[0]
    for kind, build, loss_of in kinds:
        found = []
        for fused in (False, True):
            # HybridModel does not know Megatron's own flag, and ours does not mind it
            own_flag = OWN_FLAG if fused and kind == "hybrid" and LOSS_OF_HEAD else ()
            options = cases.gpt_options(dataclasses.replace(case, config=(*case.config, *own_flag)))
            model = build(options).to(device)
            handle = enable_fused_linear_ce(model, use_fused_linear_ce=fused)
            assert handle.enabled == fused, handle.reasons
            losses = loss_of(model, batch)
            losses.sum().backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found.append({"losses": losses.detach(), **gradients})
        compare_all(report, f"{kind} {case.name}: losses and gradients", found[1], found[0])


def check_capture(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """The captured head against log_softmax of Megatron's gathered logits, through logprobs and entropy."""
    batch = cases.microbatches(device)[0]
    labels = batch["labels"].clamp(min=0)
    inputs = (batch["tokens"], batch["positions"], None)

    def backward(chunks: list[nn.Module], logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        ((logprobs * torch.cos(labels.float())).sum() + (entropy * torch.sin(labels.float())).sum()).backward()
        return cases.finished_gradients(chunks)

    chunks = cases.build(case, device)
    logits = chunks[0](*inputs, runtime_gather_output=True).float() / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    logprobs = logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expected = backward(chunks, logprobs, entropy)

    chunks = cases.build(case, device)
    with capture_lm_head(chunks) as head:
        returned = chunks[0](*inputs)
    report.check(f"{case.name}: capture returns no logits", returned.numel() == 0, str(tuple(returned.shape)))
    out = head.linear_cross_entropy(labels, temperature=TEMPERATURE)
    report.compare(f"{case.name}: captured logprobs", out.logprobs, logprobs, ALLOWED)
    report.compare(f"{case.name}: captured entropy", out.entropy, entropy, ALLOWED)
    compare_all(report, f"{case.name}: gradients", backward(chunks, out.logprobs, out.entropy), expected)


def check_captured_jsd(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Divergence and cross-entropy of the captured head, a microbatch each, against those of Megatron's own logits."""
    batches = cases.microbatches(device)[:2]
    teacher = cases.build(dataclasses.replace(case, hidden_size=48), device)[0]

    def losses_and_gradients(captured: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        chunks = cases.build(case, device)
        if captured and case.main_grad:
            cases.set_main_grad_fusion(chunks)
        losses = {}
        for name, batch in zip(("divergence", "cross-entropy"), batches, strict=True):
            labels = batch["labels"].clamp(min=-1)
            inputs = (batch["tokens"], batch["positions"], None)
            if captured:
                with capture_lm_head(chunks) as head:
                    chunks[0](*inputs)
                with torch.no_grad(), capture_lm_head(teacher) as teacher_head:
                    teacher(*inputs)
                if name == "divergence":
                    loss = head.linear_jsd(teacher_head, labels=labels, ignore_index=-1, temperature=0.1)
                else:
                    loss = -head.linear_cross_entropy(labels, ignore_index=-1).logprobs
            else:
                logits = chunks[0](*inputs, runtime_gather_output=True)
                with torch.no_grad():
                    teacher_logits = teacher(*inputs, runtime_gather_output=True)
                if name == "divergence":
                    z = logits.double() / 0.1, teacher_logits.double() / 0.1  # so small that the two models differ
                    loss = jsd_of_products(*z, labels=labels, ignore_index=-1)
                else:
                    loss = nn.functional.cross_entropy(logits.mT, labels, reduction="none", ignore_index=-1)
            (loss * torch.cos(torch.arange(loss.numel(), device=device)).view_as(loss)).sum().backward()
            losses[name] = loss.detach()
        return losses, cases.finished_gradients(chunks)

    (losses, expected), (captured_losses, actual) = (losses_and_gradients(captured) for captured in (False, True))
    compare_all(report, f"{case.name}: captured divergence, losses", captured_losses, losses)
    compare_all(report, f"{case.name}: captured divergence, gradients", actual, expected)


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
    ways: dict[str, tuple[Callable, int]] = {  # what stands in front, and how many parts hidden is in
        "replicated": (lambda x: x, 1),
        "copied": (mappings.copy_to_tensor_model_parallel_region, 1),
        "gathered": (gather, ranks),
        "gathered, cast and turned twice": (lambda x: turned(turned(gather(x.double())).float()), ranks),
        "gathered, copied in parts": (lambda x: copied_in_parts(gather(x)), ranks),
        "gathered, put together": (lambda x: torch.cat([part + 0 for part in gather(x).split(5)]), ranks),
        "gathered, of whose gradient a part is taken": (lambda x: gather(x, tensor_parallel_output_grad=False), ranks),
    }
    for name, (front, parts) in ways.items():
        part = whole.chunk(parts)[rank % parts].clone().requires_grad_()
        shard = weight.chunk(ranks)[rank].clone().requires_grad_()
        logprobs, entropy = compat.linear_cross_entropy(front(part), shard, labels, dist_process_group=group)
        (logprobs - 0.5 * entropy).sum().backward()
        found = {"hidden": part.grad, "weight": shard.grad}
        expected = {"hidden": hidden.grad.chunk(parts)[rank % parts], "weight": head.grad.chunk(ranks)[rank]}
        compare_all(report, f"compat, hidden {name}: gradients", found, expected)
    part, shard = (x.chunk(ranks)[rank].clone().requires_grad_() for x in (whole, weight))
    try:
        both = torch.cat([gather(part), part])
        compat.linear_cross_entropy(both, shard, labels.repeat(2, 1)[: len(both)], dist_process_group=group)
        message = "no error"
    except ValueError as error:
        message = str(error)
    report.check("compat, half of hidden gathered: refused", message.startswith("hidden must come out of"), message)


def check_logits(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Without labels an enabled model gives Megatron's logits, bit for bit, gathered where that is asked for."""
    batch = cases.microbatches(device)[0]
    inputs = (batch["tokens"], batch["positions"], None)
    (model,) = cases.build(case, device)
    model.eval()
    with torch.no_grad():
        expected = [model(*inputs, runtime_gather_output=gather) for gather in (None, True)]
        native = model(*inputs, labels=batch["labels"])
        enable_fused_linear_ce(model)
        actual = [model(*inputs, runtime_gather_output=gather) for gather in (None, True)]
        fused = model(*inputs, labels=batch["labels"])
    for name, ours, theirs in zip(("sharded", "gathered"), actual, expected, strict=True):
        report.check(f"{case.name}: {name} logits", torch.equal(ours, theirs), str(tuple(ours.shape)))
    mask = batch["loss_mask"].bool()
    report.compare(f"{case.name}: loss in eval", fused[mask], native[mask], ALLOWED)
    report.check(f"{case.name}: negative labels are ignored rows", bool((fused[~mask] == 0).all()))


def check_fallback(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """A head that cannot be fused: all ranks decide alike, and one of those that hold it warns."""
    chunks = cases.build(case, device)
    if cases.has_head(chunks):
        find_language_model(chunks).output_layer.gather_output = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = enable_fused_linear_ce(chunks)
    everywhere: list[tuple[tuple[str, ...], int]] = [((), 0)] * dist.get_world_size()
    dist.all_gather_object(everywhere, (handle.reasons, sum("is not used" in str(one.message) for one in told)))
    reasons = {reasons for reasons, _ in everywhere}
    expected = {("output_layer gathers its output (parallel_output=False)",)}
    expected |= {("this pipeline stage has no LM head",)} if case.pipeline else set()
    report.check(f"{case.name}: fallback, same reasons", not handle.enabled and reasons == expected, str(reasons))
    warned = sum(count for _, count in everywhere)
    report.check(f"{case.name}: fallback, one warning", warned == 1, f"{warned} on {len(everywhere)} ranks")


def check_reasons_of_one_rank(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """A reason that holds on one rank only, such as a hook that logs, is everybody's, for the flag and the capture."""
    chunks = cases.build(case, device)
    hook = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        hook = find_language_model(chunks).output_layer.register_forward_hook(lambda module, args, output: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        handle = enable_fused_linear_ce(chunks)
    reason = "output_layer has forward or backward hooks, which expect logits"
    report.check(f"{case.name}: fallback of one rank", handle.reasons == (reason,), str(handle.reasons))
    for expected in (f"the LM head cannot be captured: {reason}", "no error"):
        try:
            with capture_lm_head(chunks):
                message = "no error"
        except ValueError as error:
            message = str(error)
        report.check(f"{case.name}: capture with a reason of one rank", message == expected, message)
        if hook is not None:
            hook.remove()


def masked_in_place(logits: Tensor) -> None:
    with torch.no_grad():
        logits[..., 3:5] = -5.0


# What a hook of one rank may do to the logits of its shard; with sequence parallel their values are a collective.
TOUCHES: dict[str, Callable[[Tensor], object]] = {
    "retain_grad": lambda logits: logits.retain_grad(),
    "register_hook": lambda logits: logits.register_hook(lambda grad: 3 * grad),
    "read": lambda logits: logits.sum(),
    "changed in place": masked_in_place,
    "changed through data": lambda logits: logits.data.mul_(0.5),
}


def check_touch_of_one_rank(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Logits touched on one rank of the group: the others wait for nothing, and all is as in Megatron.

    In several blocks of tokens in both passes, so that rows are found in whatever order they come.
    """
    batch = cases.microbatches(device)[0]
    labels, mask = batch["labels"].clamp(min=0), batch["loss_mask"] if case.masked else None
    for name, touch in list(TOUCHES.items())[: None if case == cases.Case() else 2]:
        found = []
        for fused in (False, True):
            chunks = cases.build(case, device)
            masked = {"skip_ignored": case.masked, "ignore_masked": case.masked}
            enable_fused_linear_ce(chunks, use_fused_linear_ce=fused, workspace_bytes=40_000, **masked)
            if fused and case.main_grad:
                cases.set_main_grad_fusion(chunks)
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                head = find_language_model(chunks).output_layer
                head.register_forward_hook(lambda module, args, output, touch=touch: (touch(output[0]), None)[1])
            with warnings.catch_warnings(), mock.patch.multiple(blocks, WIDE_BLOCK=1, MIN_TOKENS=4):
                warnings.simplefilter("ignore", UserWarning)
                losses = chunks[0](batch["tokens"], batch["positions"], None, labels=labels, loss_mask=mask)
                losses = losses if mask is None else losses * mask
                losses.sum().backward()
            found.append({"losses": losses.detach(), **cases.finished_gradients(chunks)})
        compare_all(report, f"{case.name}: {name} on one rank, losses and gradients", found[1], found[0])


def checks(combinations: str) -> list[tuple[Callable, cases.Case]]:
    training = cases.all_combinations() if combinations == "all" else cases.pairwise_combinations()
    plain = [cases.Case(), cases.Case(tied=True, sequence_parallel=True)]
    groups = (
        (check_training, training + FURTHER_CASES),
        (check_own_flag, OWN_FLAG_CASES),
        (check_captured_training, CAPTURED_CASES),
        (check_other_models, OTHER_MODEL_CASES),
        (check_bf16, [cases.in_bf16(case) for case in training]),
        (check_capture, plain),
        (check_captured_jsd, [cases.Case(main_grad=True), cases.Case(tied=True, sequence_parallel=True)]),
        (check_logits, plain),
        (check_compat, [cases.Case()]),
        (check_reasons_of_one_rank, [cases.Case()]),
        (check_touch_of_one_rank, TOUCHED_CASES),
        (check_fallback, [cases.Case(), cases.Case(pipeline=True)]),
    )
    return [(check, case) for check, chosen in groups for case in chosen]


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument(
        "--combinations",
        choices=("pairwise", "all"),
        default="pairwise",
        help="Of the settings: every pair once, or all.",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = harness.Report()
    runnable = [pair for pair in checks(arguments.combinations) if pair[1].ranks <= int(os.environ["WORLD_SIZE"])]
    device = megatron_runtime.initialize(2, device=arguments.device)
    # Layout by layout, few changes: Megatron never destroys its process groups, and each one's gloo threads stay.
    for layout in sorted({case.layout for _, case in runnable}, key=str):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(*layout)
        for check, case in runnable:
            if case.layout == layout:
                check(case, device, report)
    failed = report.conclude()
    megatron_runtime.teardown()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

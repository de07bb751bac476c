"""What holds on one rank of a group is everybody's: reasons against fusing, and what a hook does to logits."""

import warnings
from collections.abc import Callable
from unittest import mock

import harness
import megatron_cases as cases
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_comparisons import compare_all
from torch import Tensor

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from megatron_lce.megatron_integration.support import find_language_model


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
            with warnings.catch_warnings(), mock.patch.multiple("megatron_lce.core.plan", WIDE_BLOCK=1, MIN_TOKENS=4):
                warnings.simplefilter("ignore", UserWarning)
                losses = chunks[0](batch["tokens"], batch["positions"], None, labels=labels, loss_mask=mask)
                losses = losses if mask is None else losses * mask
                losses.sum().backward()
            found.append({"losses": losses.detach(), **cases.finished_gradients(chunks)})
        compare_all(report, f"{case.name}: {name} on one rank, losses and gradients", found[1], found[0])

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
from megatron_lce.core import plan
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


# What a hook of one rank may not do to the logits of its shard.
TOUCHES: dict[str, Callable[[Tensor], object]] = {
    "retain_grad": lambda logits: logits.retain_grad(),
    "register_hook": lambda logits: logits.register_hook(lambda grad: 3 * grad),
    "changed in place": masked_in_place,
    "changed through data": lambda logits: logits.data.mul_(0.5),
}


def check_touch_of_one_rank(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Logits that one rank's hook changes or wants the gradient of: that rank raises before the loss's collectives.

    The other ranks would wait for it there, so that here they stop in front of the loss as well.
    """
    batch = cases.microbatches(case, device)[0]
    touches = list(TOUCHES.items())[: 2 if case.sequence_parallel else None]  # with it, their values are a collective
    chunks = cases.build(case, device)
    enable_fused_linear_ce(chunks)
    model = find_language_model(chunks)
    fused = model.compute_language_model_loss
    for name, touch in touches:

        def loss(labels: Tensor, logits: Tensor, touch: Callable[[Tensor], object] = touch) -> Tensor:
            if parallel_state.get_tensor_model_parallel_rank() != 0:
                raise RuntimeError("the other rank")
            touch(logits)
            return fused(labels, logits)

        model.compute_language_model_loss = loss
        try:
            chunks[0](batch["tokens"], batch["positions"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        expected = ("the other rank", "the logits of an enabled model")
        report.check(f"{case.name}: {name} on one rank", message.startswith(expected), message)
    del model.compute_language_model_loss


def check_read_logits(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """A second loss of the logits beside the fused one: losses and every gradient, each use counted once."""
    batch = cases.microbatches(case, device)[0]
    labels, mask = batch["labels"].clamp(min=0), batch["loss_mask"] if case.masked else None
    found = []
    for fused in (False, True):
        chunks = cases.build(case, device)
        enable_fused_linear_ce(chunks, use_fused_linear_ce=fused, workspace_bytes=120_000, skip_masked=case.masked)
        if fused and case.main_grad:
            cases.set_main_grad_fusion(chunks)
        model = find_language_model(chunks)
        own, penalties = model.compute_language_model_loss, []

        def loss(labels: Tensor, logits: Tensor, own: Callable = own, penalties: list = penalties) -> Tensor:
            penalties.append(logits.square().sum() / 100)  # of this rank's columns
            return own(labels, logits.clone() if type(logits) is Tensor else logits)  # Megatron's changes them in place

        model.compute_language_model_loss = loss
        with warnings.catch_warnings(), mock.patch.multiple(plan, WIDE_BLOCK=1, MIN_TOKENS=4):
            warnings.simplefilter("ignore", UserWarning)
            losses = chunks[0](batch["tokens"], batch["positions"], None, labels=labels, loss_mask=mask)
            losses = losses if mask is None else losses * mask
            (losses.sum() + sum(penalties)).backward()
        found.append({"losses": losses.detach(), **cases.finished_gradients(chunks)})
    compare_all(report, f"{case.name}: logits read beside the loss, losses and gradients", found[1], found[0])

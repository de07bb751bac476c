"""What holds on one rank of a group is everybody's: reasons against fusing, and what is read of logits."""

import warnings

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


def check_read_logits(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Logits read by a hook, and by a loss beside the fused one: losses and gradients are as in Megatron.

    Reading is local, so that one rank alone may do it, but under sequence parallel, where Megatron's head gathers. The
    gradient of another loss is summed over the group by the head, so that it is every rank's.
    """
    batch = cases.microbatches(device)[0]
    labels, mask = batch["labels"].clamp(min=0), batch["loss_mask"] if case.masked else None
    for penalised in (False, True):
        found = []
        for fused in (False, True):
            chunks = cases.build(case, device)
            masked = {"skip_ignored": case.masked, "ignore_masked": case.masked}
            enable_fused_linear_ce(chunks, use_fused_linear_ce=fused, workspace_bytes=40_000, **masked)
            if fused and case.main_grad and not penalised:  # Megatron's own backward of the head has no Apex here
                cases.set_main_grad_fusion(chunks)
            penalties: list[Tensor] = []  # of a product: Megatron's own loss changes the logits in place
            if penalised or case.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0:
                head = find_language_model(chunks).output_layer
                head.register_forward_hook(
                    lambda module, args, output, penalties=penalties: penalties.append((output[0] * 0.1).square().sum())
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                losses = chunks[0](batch["tokens"], batch["positions"], None, labels=labels, loss_mask=mask)
            losses = losses if mask is None else losses * mask
            (losses.sum() + sum(penalties) if penalised else losses.sum()).backward()
            found.append({"losses": losses.detach(), **cases.finished_gradients(chunks)})
        name = "another loss of the logits" if penalised else "logits read"
        compare_all(report, f"{case.name}: {name}, losses and gradients", found[1], found[0])


def check_changed_logits(case: cases.Case, device: torch.device, report: harness.Report) -> None:
    """Logits that a hook changes in front of the fused loss: every rank that did so is told."""
    batch = cases.microbatches(device)[0]
    chunks = cases.build(case, device)
    enable_fused_linear_ce(chunks)
    hook = find_language_model(chunks).output_layer.register_forward_hook(
        lambda module, args, output: (output[0].data.mul_(0.5), None)[1]
    )
    try:
        chunks[0](batch["tokens"], batch["positions"], None, labels=batch["labels"])
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    hook.remove()
    report.check(f"{case.name}: logits changed in front of the loss", "were changed in place" in message, message)

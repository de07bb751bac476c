"""One case on this rank: the operation, what it is held against, and the properties that hold for every call."""

import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_lce
from megatron_lce.core.options import LinearCrossEntropyOutput
from tests.cases import Case, Ranks, Share
from tests.findings import Findings, Floors, check_error, check_same_bits_on_every_rank, same_bits, surroundings, title
from tests.ids_checks import check_ids
from tests.jsd_oracle import (
    JsdInputs,
    evaluate_jsd,
    jsd_comparisons,
    jsd_of_products,
    log_probabilities,
    logits_of_products,
    materialised_jsd,
    weighted_jsd,
)
from tests.oracle import Result, comparisons, error_of_sum, evaluate, oracle, part_comparisons, relative_error
from tests.reference import reference_linear_cross_entropy

WIDE_WORKSPACE = 2**29  # bytes: every token at once
BITS_ALIGNMENT = 128  # shards cut at multiples of it give the bits of the whole
WORKSPACE = re.compile(r"workspace_bytes must be at least (\d+) ")
STUDENT = ("logprobs", "entropy", "lse")


def check_case(case: Case, ranks: Ranks, findings: Findings, floors: Floors | None = None) -> bool:
    """Check the case, if its workspace is too small in the smallest that errors name; whether it was.

    Raises:
        TypeError, ValueError: the operation refuses the call.
    """
    checks = {"linear_jsd": check_jsd, "linear_logits_at": check_ids}
    check = checks.get(case.operation, check_cross_entropy)
    changes: dict[str, int] = {}
    while True:
        try:
            check(Share(case, ranks, **changes), findings, floors)
            return bool(changes)
        except ValueError as error:
            smallest = WORKSPACE.search(str(error))
            if smallest is None or int(smallest[1]) <= changes.get("workspace_bytes", 0):
                raise
            changes["workspace_bytes"] = int(smallest[1])


def taken_by(function: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if name in inspect.signature(function).parameters}


def check_cross_entropy(share: Share, findings: Findings, floors: Floors | None) -> None:
    whole, keywords, case = share.whole, share.keywords, share.case
    hidden, weight, labels, _ = whole.inputs
    with surroundings(case):
        run = evaluate_token_loss if case.operation == "linear_token_loss" else evaluate_cross_entropy
        actual = run(share)
    skip = keywords.get("skip_ignored", False)
    if not isinstance(skip, bool) and skip != int((labels != keywords.get("ignore_index", -100)).sum()):
        findings.check(title(share, "a miscount is NaN"), bool(actual.outputs.logprobs.isnan().all()))
        return
    if not keywords.get("reduce_grad_hidden", True):
        summed = actual.grad_hidden.float()
        dist.all_reduce(summed, group=share.ranks.group)
        actual = actual._replace(grad_hidden=summed.to(hidden.dtype))
    options = taken_by(reference_linear_cross_entropy, keywords)
    expected = oracle(*whole.inputs, **options)
    more = floors(share, expected) if floors else {}
    for name, error, allowed in comparisons(actual, expected, *whole.inputs, **share.parts, **options):
        if name == "argmax" and error and floors:
            error = largest_gap(actual.outputs.argmax, expected.outputs, hidden, weight, **options)
            # A sum of H fp32 terms, about sqrt(H) roundings, and the few that follow it.
            allowed = (8 + hidden.shape[-1] ** 0.5) * torch.finfo(torch.float32).eps
        check_error(share, name, error, allowed + more.get(name, 0.0), findings)
    if (
        "shards" in share.parts
        and keywords.get("reduce_grad_hidden", True)
        and not floors
        and run is not evaluate_token_loss
    ):
        check_sum(share, actual.grad_hidden, findings, **options)
    same_dtypes = actual.grad_hidden.dtype == hidden.dtype and actual.grad_weight.dtype == weight.dtype
    findings.check(title(share, "gradients have their inputs' dtypes"), same_dtypes)
    asked = {"entropy": keywords.get("entropy", True), "argmax": keywords.get("telemetry", False) is True}
    asked["mean_logit"] = bool(keywords.get("telemetry", False))
    given = all((getattr(actual.outputs, name) is not None) == asked[name] for name in asked)
    right = given and {o.dtype for o in actual.outputs if o is not None} <= {torch.float32, torch.int64}
    findings.check(title(share, "the outputs that were asked for, in fp32"), right)
    logprobs = (o for o in (actual.outputs.logprobs, actual.outputs.candidate_logprobs) if o is not None)
    findings.check(title(share, "no logprob is positive"), not any(bool((o > 0).any()) for o in logprobs))
    of_ranks = [output for output in actual.outputs if output is not None]
    of_ranks += [] if keywords.get("sequence_parallel") else [actual.grad_hidden]
    check_same_bits_on_every_rank(share, of_ranks, findings)
    # torch's own products have other bits where the workspace or a loss cuts the tokens differently.
    if case.bits and (
        share.ranks.backend == "triton" or keywords.get("workspace_bytes", WIDE_WORKSPACE) == WIDE_WORKSPACE
    ):
        check_bits(share, actual.outputs, findings)


def check_sum(share: Share, grad_hidden: Tensor, findings: Findings, **options: Any) -> None:
    """Each rank's part of hidden's gradient, before it is summed in 16 bits, and the sum of these very parts.

    Neither budget holds the other's roundings: an error in the size of what both may be is found in one of them.
    """
    whole, keywords = share.whole, share.keywords | {"sequence_parallel": False, "reduce_grad_hidden": False}
    (hidden, weight), labels = whole.heads[0], whole.labels
    heads = hidden, weight[share.columns]
    part = evaluate(lambda *of: cross_entropy(share, *of, **keywords), *heads, labels, whole.poisoned).grad_hidden
    for name, error, allowed in part_comparisons(part, share.columns, *whole.inputs, **options):
        check_error(share, name, error, allowed, findings)
    parts = [torch.empty_like(part) for _ in range(share.ranks.number)]
    dist.all_gather(parts, part, group=share.ranks.group)
    if grad_hidden.shape != part.shape:  # the rows of this rank
        of_ranks = [torch.empty_like(grad_hidden) for _ in parts]
        dist.all_gather(of_ranks, grad_hidden, group=share.ranks.group)
        grad_hidden = torch.cat(of_ranks)
    parts = [of_rank.double() for of_rank in parts]
    error, allowed = relative_error(grad_hidden, sum(parts)), error_of_sum(parts, part.dtype, of_parts=False)
    check_error(share, "sum of grad_hidden over the ranks", error, allowed, findings)


def cross_entropy(share: Share, *inputs: Tensor, **keywords: Any) -> LinearCrossEntropyOutput:
    return megatron_lce.linear_cross_entropy(*map(share.drawn, inputs), **share.drawn(keywords))


def evaluate_cross_entropy(share: Share) -> Result:
    inputs = *share.heads, share.whole.labels, share.whole.poisoned
    return evaluate(lambda *given: cross_entropy(share, *given, **share.keywords), *inputs)


def evaluate_token_loss(share: Share) -> Result:
    """`linear_token_loss` of the loss whose upstream gradients are the case's."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in share.heads)
    asked = share.keywords.get("telemetry", False)
    given = {n: u for n, u in share.whole.poisoned._asdict().items() if u is not None and (n != "mean_logit" or asked)}

    def loss(outputs: LinearCrossEntropyOutput, *gradients: Tensor) -> Tensor:
        terms = [getattr(outputs, name) * gradient for name, gradient in zip(given, gradients, strict=True)]
        return sum(term.sum(-1) if name == "candidate_logprobs" else term for name, term in zip(given, terms))  # noqa: B905

    inputs, per_token = map(share.drawn, (hidden, weight, share.whole.labels)), map(share.drawn, given.values())
    result = megatron_lce.linear_token_loss(*inputs, loss, *per_token, **share.drawn(share.keywords))
    result.loss.backward()
    return Result(result.outputs, hidden.grad, weight.grad)


def largest_gap(
    argmax: Tensor, exact: LinearCrossEntropyOutput, hidden: Tensor, weight: Tensor, **options: Any
) -> float:
    """How far the logits at `argmax` are below the largest, relative to that: fp32 makes ties of what is close."""
    if not torch.equal(argmax == -1, exact.argmax == -1):
        return float("inf")
    logits = logits_of_products(hidden.double() @ weight.double().T, options["logits_scale"], options.get("softcap"))
    temperature = options["temperature"]
    logits = logits / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    gaps = (exact.max_logit - logits.gather(-1, argmax.clamp(min=0)[..., None])[..., 0]) / (1 + logits.abs().amax(-1))
    return float(gaps[(argmax != exact.argmax) & (argmax != -1)].max())


def check_bits(share: Share, outputs: LinearCrossEntropyOutput, findings: Findings) -> None:
    """Outputs are the same bits without gradients and whatever else is asked, of all rows, and on one rank."""
    (hidden, weight), labels = share.whole.heads[0], share.whole.labels
    with torch.no_grad():
        forward = {"entropy": False, "telemetry": False, "logits_cache_bytes": 0, "reduce_grad_hidden": True}
        if share.ranks.backend == "triton":  # torch's own products have other bits of fewer rows
            forward["skip_ignored"] = False
        # Copies, as of those with gradients: a CPU's product of one column has other bits where it starts elsewhere.
        own = (tensor.clone() for tensor in share.heads)
        plain = cross_entropy(share, *own, labels, **share.keywords | forward | {"candidates": None})
        for name in ("logprobs", "lse"):
            same = same_bits(getattr(plain, name), getattr(outputs, name))
            findings.check(title(share, f"{name}: bits without gradients"), same)
        ids = share.keywords.get("candidates")
        if ids is not None:
            at_label = (ids[..., 0] == labels) & (ids[..., 0] >= 0)
            same = same_bits(outputs.candidate_logprobs[..., 0][at_label], outputs.logprobs[at_label])
            findings.check(title(share, "a candidate that is the label has its bits"), same)
        if all(start % BITS_ALIGNMENT == 0 for start in share.case.starts):
            alone = {"tp_group": None, "vocab_start": None, "sequence_parallel": False}
            alone |= {"workspace_bytes": WIDE_WORKSPACE} | {n: v for n, v in forward.items() if n == "skip_ignored"}
            on_one = cross_entropy(share, hidden, weight, labels, **share.keywords | alone)
            for name, mine, theirs in zip(outputs._fields, outputs, on_one, strict=True):
                same = mine is None or same_bits(mine, theirs)
                findings.check(title(share, f"{name}: bits on one rank"), same)


def oracle_options(share: Share) -> dict[str, Any]:
    """A case's keywords as `jsd_of_products` takes them."""
    given = share.keywords | {"labels": share.whole.labels}
    return taken_by(log_probabilities, given) | taken_by(jsd_of_products, given)


def check_jsd(share: Share, findings: Findings, floors: Floors | None) -> None:
    labels, (student, teacher) = share.whole.labels, share.whole.heads
    upstream, poisoned = (next(u for u in of if u is not None) for of in (share.whole.upstream, share.whole.poisoned))
    inputs, mine = JsdInputs(*student, *teacher, upstream), JsdInputs(*share.heads, poisoned)
    returned: list[LinearCrossEntropyOutput] = []

    def divergence(*heads: Tensor, **keywords: Any) -> Tensor:
        result = weighted_jsd(*map(share.drawn, heads), **share.drawn(keywords))
        if keywords.get("return_student"):
            returned.append(result[1])
        return result[0] if returned else result

    with surroundings(share.case):
        actual = evaluate_jsd(divergence, mine, weighted=share.case.weighted, labels=labels, **share.keywords)
    options = oracle_options(share)
    more = floors(share, evaluate_jsd(materialised_jsd, inputs.to(torch.float64), **options)) if floors else {}
    for name, error, allowed in jsd_comparisons(actual, inputs, **share.parts, **options):
        check_error(share, name, error, allowed + more.get(name, 0.0), findings)
    dtypes = actual.loss.dtype, actual.grad_hidden.dtype, actual.grad_weight.dtype
    right = dtypes == (torch.float32, student[0].dtype, student[1].dtype)
    findings.check(title(share, "an fp32 loss, and gradients in their inputs' dtypes"), right)
    of_ranks = [actual.loss] if share.keywords.get("sequence_parallel") else [actual.loss, actual.grad_hidden]
    of_ranks += [getattr(out, name) for out in returned for name in STUDENT]
    check_same_bits_on_every_rank(share, of_ranks, findings)
    for out in returned:
        own = {name.removeprefix("student_"): value for name, value in share.keywords.items()}
        own = taken_by(megatron_lce.linear_cross_entropy, own)
        alone = megatron_lce.linear_cross_entropy(*share.heads[:2], labels, **own)
        for name in STUDENT:
            one, other = getattr(out, name), getattr(alone, name)
            close = torch.allclose(one, other, rtol=1e-5, atol=1e-5 + more.get("student", 0.0), equal_nan=True)
            findings.check(title(share, f"the student's {name}"), close and not one.requires_grad)

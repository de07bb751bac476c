"""One drawn call on this rank: the operation, what it is held against, and the properties that hold for every call."""

import inspect
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fuzz_cases import DEFAULT_DTYPES, DTYPES, Case, JsdCase, Tensors, as_drawn, build, starts_of, vocab_size_of
from fuzz_ids import check_ids
from fuzz_setting import (
    Drawn,
    Findings,
    Setting,
    Share,
    check_same_bits_on_every_rank,
    default_dtype,
    same_bits,
    tensors_drawn,
)
from torch import Tensor

import megatron_lce
from megatron_lce.backends.reference import reference_linear_cross_entropy
from megatron_lce.core.options import LinearCrossEntropyOutput
from tests.jsd_oracle import (
    JsdInputs,
    evaluate_jsd,
    evaluate_weighted_jsd,
    jsd_comparisons,
    jsd_of_products,
    logits_of_products,
    materialised_jsd,
)
from tests.oracle import Result, Upstream, comparisons, evaluate, oracle

FEW = 64  # numbers of a gradient
WIDE_WORKSPACE = 2**29  # bytes: every token at once
BITS_ALIGNMENT = 128  # shards cut at multiples of it give the bits of the whole


def share_of(case: Case, tensors: Tensors, setting: Setting) -> Share:
    group = setting.group
    rank = dist.get_rank(group)
    starts = starts_of(case)
    columns = slice(starts[rank], starts[rank] + case.shards[rank])
    rows = slice(None)
    if tensors.keywords["sequence_parallel"]:
        length = case.shape[0] // setting.ranks
        rows = slice(rank * length, (rank + 1) * length)
    must_pass = case.pass_vocab_start or case.reversed or len(set(case.shards)) > 1
    keywords = tensors.keywords | {
        "tp_group": group,
        "vocab_start": columns.start if must_pass else None,
        "vocab_size": vocab_size_of(case),
        "backend": setting.backend,
    }
    return Share(rows, columns, keywords)


def taken_by(function: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if name in inspect.signature(function).parameters}


def check_case(case: Case, setting: Setting, **changes: Any) -> Findings:
    """What is wrong when the case is run with `changes` of its keywords.

    Raises:
        TypeError, ValueError: the operation refuses the call.
    """
    tensors = build(case, setting.device)
    tensors.keywords.update(changes)
    share = share_of(case, tensors, setting)
    check = {"linear_jsd": check_jsd, "linear_logits_at": check_ids}.get(setting.operation, check_cross_entropy)
    findings = Findings()
    check(case, tensors, share, setting, findings)
    return findings


def check_cross_entropy(case: Case, tensors: Tensors, share: Share, setting: Setting, findings: Findings) -> None:
    ((hidden, weight),), labels, upstream = tensors.heads, tensors.labels, Upstream(**tensors.upstream)
    run = evaluate_token_loss if setting.operation == "linear_token_loss" else partial(evaluate, cross_entropy)

    with default_dtype(DEFAULT_DTYPES[case.default_dtype]):
        own = hidden[share.rows], weight[share.columns]
        actual = run(*own, labels, Upstream(**tensors.poisoned), drawn=partial(as_drawn, case), **share.keywords)
    counted = int((labels != share.keywords["ignore_index"]).sum())
    skip = share.keywords["skip_ignored"]
    if not isinstance(skip, bool) and skip != counted:
        findings.require(
            bool(actual.outputs.logprobs.isnan().all()), "skip_ignored is not the count, logprobs are not NaN"
        )
        return
    if not share.keywords["reduce_grad_hidden"]:
        whole = actual.grad_hidden.float()
        dist.all_reduce(whole, group=setting.group)
        actual = actual._replace(grad_hidden=whole.to(hidden.dtype))
    options = taken_by(reference_linear_cross_entropy, share.keywords)
    inputs = (hidden, weight, labels, upstream)
    expected = oracle(*inputs, **options)
    parts = {"hidden_rows": share.rows, "weight_rows": share.columns}
    floors = rounding(case, expected, tensors, setting, {"grad_hidden": share.rows, "grad_weight": share.columns})
    for name, error, allowed in comparisons(actual, expected, *inputs, **parts, **options):
        if name == "argmax" and error:
            error = largest_gap(actual.outputs.argmax, expected.outputs, *inputs[:2], **options)
            # A sum of H fp32 terms, about sqrt(H) roundings, and the few that follow it.
            allowed = (8 + hidden.shape[-1] ** 0.5) * torch.finfo(torch.float32).eps
        allowed += floors.get(name, 0.0)
        findings.require(error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.1e}")
    same_dtypes = actual.grad_hidden.dtype == hidden.dtype and actual.grad_weight.dtype == weight.dtype
    findings.require(same_dtypes, "gradients have another dtype")
    check_same_bits_on_every_rank([t for t in actual.outputs if t is not None], setting, findings)
    # torch's own products have other bits where the workspace or a loss cuts the tokens differently.
    if setting.backend == "triton" or share.keywords["workspace_bytes"] == WIDE_WORKSPACE:
        check_bits(case, tensors, share, actual.outputs, findings)


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


def check_bits(
    case: Case, tensors: Tensors, share: Share, outputs: LinearCrossEntropyOutput, findings: Findings
) -> None:
    """Outputs are the same bits without gradients and whatever else is asked, and on one rank."""
    ((hidden, weight),), labels = tensors.heads, tensors.labels
    with torch.no_grad():
        forward = {"entropy": False, "telemetry": False, "logits_cache_bytes": 0, "reduce_grad_hidden": True}
        forward["candidates"] = None
        keywords = share.keywords | {"drawn": partial(as_drawn, case)}
        # Copies, as of those with gradients: a CPU's product of one column has other bits where it starts elsewhere.
        own = hidden[share.rows].clone(), weight[share.columns].clone()
        plain = cross_entropy(*own, labels, **keywords | forward)
        for name in ("logprobs", "lse"):
            findings.require(
                same_bits(getattr(plain, name), getattr(outputs, name)), f"{name}: other bits without gradients"
            )
        if all(start % BITS_ALIGNMENT == 0 for start in starts_of(case)):
            alone = {
                "tp_group": None,
                "vocab_start": None,
                "sequence_parallel": False,
                "workspace_bytes": WIDE_WORKSPACE,
            }
            whole = cross_entropy(hidden, weight, labels, **keywords | alone)
            for name, mine, theirs in zip(outputs._fields, outputs, whole, strict=True):
                findings.require(mine is None or same_bits(mine, theirs), f"{name}: other bits on one rank")


def check_jsd(case: Case, tensors: Tensors, share: Share, setting: Setting, findings: Findings) -> None:
    (student, teacher), upstream = tensors.heads, tensors.upstream[case.upstream[0]]
    whole = JsdInputs(*student, *teacher, upstream)
    own = (tensor for head in tensors.heads for tensor in (head[0][share.rows], head[1][share.columns]))
    mine = JsdInputs(*own, tensors.poisoned[case.upstream[0]])

    drawn = partial(as_drawn, case)

    def divergence(*heads: Tensor, **keywords: Any) -> Tensor:
        return megatron_lce.linear_jsd(*map(drawn, heads), **tensors_drawn(keywords, drawn))

    evaluate_it = evaluate_weighted_jsd if case.weighted else evaluate_jsd
    with default_dtype(DEFAULT_DTYPES[case.default_dtype]):
        actual = evaluate_it(divergence, mine, labels=tensors.labels, **share.keywords)
    options = taken_by(jsd_of_products, share.keywords | {"labels": tensors.labels})
    parts = {"hidden_rows": share.rows, "weight_rows": share.columns}
    expected = evaluate_jsd(materialised_jsd, whole.to(torch.float64), **options)
    floors = rounding(case, expected, tensors, setting, {"grad_hidden": share.rows, "grad_weight": share.columns})
    of_tokens = loss_rounding(whole, **options)
    floors["loss"] = float((of_tokens * upstream.abs()).sum() if case.weighted else max([0.0, *of_tokens.flatten()]))
    for name, error, allowed in jsd_comparisons(actual, whole, **parts, **options):
        allowed += floors.get(name, 0.0)
        findings.require(error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.1e}")
    check_same_bits_on_every_rank([actual.loss], setting, findings)


def rounding(
    case: Case, expected: Any, tensors: Tensors, setting: Setting, parts: dict[str, slice]
) -> dict[str, float]:
    """What the budgets leave out because other inputs show it seldom: errors of gradients that nearly cancel.

    A probability is wrong by an eps of its logit, and more by some of that logit's distance from the largest; a
    gradient by that, times what upstream and the other factor of its product amount to, however small the gradient is.
    A sum over ranks rounds each rank's part, and the roundings of a few numbers do not average. A logit that is kept is
    wrong by an eps of the dtype, which is much beside a small softcap: the cap's derivative is taken of it. And
    probabilities of kept logits do not sum to one. Gradients of logits, and results, that are subnormal in fp16 are
    rounded to multiples of one number, as eager's are.
    """
    keywords, (hidden, weight) = tensors.keywords, (tensor.double() for tensor in tensors.heads[0])
    temperature = torch.as_tensor(keywords["temperature"], dtype=torch.float64, device=hidden.device)
    factor = (abs(keywords.get("logits_scale", keywords.get("student_logits_scale", 1.0))) / temperature).nan_to_num(
        0, 0, 0
    )
    largest, spread = logits_range(tensors, temperature)
    given = {name: gradient.double().abs() for name, gradient in tensors.upstream.items() if gradient is not None}
    upstream = sum(gradient.sum(-1) if name == "candidate_logprobs" else gradient for name, gradient in given.items())
    size = float((upstream * factor).norm()) * (1 + math.log(len(weight)) + spread * isinstance(case, JsdCase))
    eps, own_eps = torch.finfo(torch.float32).eps, torch.finfo(DTYPES[case.dtype]).eps
    keeps = setting.backend == "triton" and case.dtype != "fp32" and not case.fp32_weight
    keeps = keeps and (keywords.get("logits_cache_bytes") or setting.operation == "linear_token_loss")
    step = torch.finfo(DTYPES[case.dtype]).smallest_normal * own_eps  # of subnormal numbers
    num_logits = tensors.labels.numel() * len(weight)
    of_cap = 0.0
    if keeps and keywords.get("softcap") and temperature.numel():
        of_cap = min(1.0, own_eps * 2 * float(temperature.nan_to_num(0, 0, 0).max()) / keywords["softcap"])
    floors = {}
    for name, other in (("grad_hidden", weight), ("grad_weight", hidden)):
        exact = getattr(expected, name)[parts[name]]
        error = eps * (4 * (1 + spread) + largest / 2) + of_cap + own_eps * bool(keeps)
        error += own_eps * (exact.numel() < FEW or (name == "grad_hidden" and setting.ranks > 1))
        largest_row = float(other.norm(dim=-1).max()) if other.numel() else 0.0
        error = error * size * largest_row + step / 2 * (num_logits**0.5 * largest_row + exact.numel() ** 0.5)
        floors[name] = error / max(float(exact[~exact.isnan()].norm()), 1e-300)
    return floors


def loss_rounding(inputs: JsdInputs, **options: Any) -> Tensor:
    """What an fp32 rounding of every product makes of each token's loss: much where heads are far apart."""
    heads = (inputs[:2], inputs[2:4])
    products = [(hidden.double() @ weight.double().T).requires_grad_() for hidden, weight in heads]
    gradients = torch.autograd.grad(jsd_of_products(*products, **options).sum(), products)
    of_each = zip(products, gradients, strict=True)
    terms = torch.cat([product.detach() * gradient for product, gradient in of_each], dim=-1)
    return torch.finfo(torch.float32).eps * terms.abs().nan_to_num(0, 0, 0).sum(-1)


def logits_range(tensors: Tensors, temperature: Tensor) -> tuple[float, float]:
    """The largest logit of any head, and the largest difference of two of a row."""
    largest = spread = 0.0
    for (hidden, weight), head in zip(tensors.heads, ("student_", "teacher_"), strict=False):
        prefix = head if len(tensors.heads) > 1 else ""
        form = tensors.keywords.get(f"{prefix}logits_scale", 1.0), tensors.keywords.get(f"{prefix}softcap")
        logits = logits_of_products(hidden.double() @ weight.double().T, *form)
        logits = (logits / (temperature[..., None] if temperature.dim() else temperature)).nan_to_num(0, 0, 0)
        if logits.numel():
            largest = max(largest, float(logits.abs().max()))
            spread = max(spread, float((logits.amax(-1) - logits.amin(-1)).max()))
    return largest, spread


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, drawn: Drawn, **keywords: Any
) -> LinearCrossEntropyOutput:
    return megatron_lce.linear_cross_entropy(*map(drawn, (hidden, weight, labels)), **tensors_drawn(keywords, drawn))


def evaluate_token_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Upstream, *, drawn: Drawn, **keywords: Any
) -> Result:
    """`linear_token_loss` of the loss whose upstream gradients are these."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    given = {name: gradient for name, gradient in upstream._asdict().items() if gradient is not None}

    def loss(outputs: LinearCrossEntropyOutput, *gradients: Tensor) -> Tensor:
        terms = [getattr(outputs, name) * gradient for name, gradient in zip(given, gradients, strict=True)]
        return sum(
            term if name != "candidate_logprobs" else term.sum(-1) for name, term in zip(given, terms, strict=True)
        )

    tensors, per_token = map(drawn, (hidden, weight, labels)), map(drawn, given.values())
    result = megatron_lce.linear_token_loss(*tensors, loss, *per_token, **tensors_drawn(keywords, drawn))
    result.loss.backward()
    return Result(result.outputs, hidden.grad, weight.grad)

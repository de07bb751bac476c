"""What `run_fuzz.py` draws, and what it adds to the tests' budgets."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import harness  # noqa: F401  (finds the package, when started by hand from anywhere)
import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_lce.core.divergence_types import KINDS
from tests.cases import BF16, FP32, SOMEWHERE, Case, Share
from tests.checks import oracle_options
from tests.jsd_oracle import divergences_of_products, log_probabilities, logits_of_products
from tests.oracle import LEAST_NORM

FP16 = torch.float16
LAYOUTS = ("strided", "shifted", "sliced", "transposed")
FEW = 64  # numbers of a gradient
MOST_TOKENS_ALONE = 12
MOST_LOGITS = 20_000  # tokens x columns: what Triton's interpreter does in well under a second

SCALES = st.sampled_from([1.0, 1.0, 0.25, -1.5, 0.0])
SOFTCAPS = st.sampled_from([None, None, 0.5, 5.0, 30.0, 1e4])
# One line a keyword. What an oracle takes as well is handed to it under the same name.
COMMON: dict[str, st.SearchStrategy] = {
    "temperature": st.sampled_from([1.0, 1.0, 0.3, 2.5, 100.0, *SOMEWHERE]),
    "ignore_index": st.sampled_from([-100, -100, -1, 0, 3, 2**40]),
    "sequence_parallel": st.booleans(),
    "workspace_bytes": st.sampled_from([2**29, 2**29, 2**29, 2**18, 2**16, 1]),
    "skip_ignored": st.sampled_from([False, False, True, "count"]),
}
CROSS_ENTROPY = COMMON | {
    "logits_scale": SCALES,
    "softcap": SOFTCAPS,
    "entropy": st.booleans(),
    "telemetry": st.sampled_from([False, False, True, "mean_logit"]),
    "logits_dtype": st.sampled_from([None, None, BF16]),
    "candidates": st.sampled_from([None, None, 1, 4, 30]),  # how many a token
    "skip_ignored": st.sampled_from([False, False, True, True, "count", "miscount"]),
    "reduce_grad_hidden": st.sampled_from([True, True, True, False]),
    "logits_cache_bytes": st.sampled_from([None, None, 0, 1, 3000, 40_000, 2**30]),
}
JSD = COMMON | {
    "beta": st.sampled_from([0, 1, 0.5, 0.1, 0.9, 1e-3]),
    "student_logits_scale": SCALES,
    "teacher_logits_scale": SCALES,
    "student_softcap": SOFTCAPS,
    "teacher_softcap": SOFTCAPS,
    "return_student": st.booleans(),
}


@st.composite
def cases(draw: st.DrawFn, operation: str, ranks: int, world: int) -> Case:
    """Valid calls, but for a workspace that may be too small, and options that exclude each other."""
    keywords = {name: draw(values) for name, values in (JSD if operation == "linear_jsd" else CROSS_ENTROPY).items()}
    if operation == "linear_token_loss":
        del keywords["logits_cache_bytes"]
    if operation == "linear_logits_at":
        names = ("entropy", "telemetry", "logits_dtype", "skip_ignored", "reduce_grad_hidden", "logits_cache_bytes")
        keywords = {name: value for name, value in keywords.items() if name not in names}
        keywords["candidates"] = draw(st.sampled_from([1, 2, 5, 30, 150]))
    tokens = draw(st.sampled_from([0, 1, 2, 5, 12, 33, 64, 130, 150]))
    if tokens > MOST_TOKENS_ALONE:  # the smallest workspace holds a token at a time
        keywords["workspace_bytes"] = max(keywords["workspace_bytes"], 2**18)
    shards = draw(_shards(ranks, max(1, MOST_LOGITS // max(tokens, 1) // ranks)))
    asked = {"entropy": "entropy", "telemetry": "mean_logit", "candidates": "candidate_logprobs"}
    outputs = ["logprobs", "lse", *(output for name, output in asked.items() if keywords.get(name))]
    shape = draw(st.sampled_from([(tokens,), (tokens, 1), (2, tokens // 2), (tokens // 3, 3)]))
    if keywords["sequence_parallel"]:
        shape = (-(-shape[0] // ranks) * ranks, *shape[1:])
    padding = draw(st.sampled_from([0, 0, 1, shards[-1], sum(shards) - 1]))
    fields = {
        "operation": operation,
        "seed": draw(st.integers(0, 2**16)),
        "members": draw(st.sampled_from(list(combinations(range(world), ranks)))),
        "shape": shape,
        "hidden_size": draw(st.sampled_from([1, 2, 8, 13, 24, 64, 100, 300])),
        "shards": shards,
        "reversed": draw(st.booleans()),
        "pass_vocab_start": draw(st.booleans()),
        "vocab_size": sum(shards) - min(padding, sum(shards) - 1) if padding else None,
        "dtype": draw(st.sampled_from([FP32, BF16, FP16])),
        "fp32_weight": operation != "linear_jsd" and draw(st.sampled_from([False, False, True])),
        "layout": draw(st.sampled_from(["contiguous", "contiguous", *LAYOUTS])),
        "default_dtype": draw(st.sampled_from([FP32, FP32, BF16, FP16, torch.float64])),
        "pending": draw(st.booleans()),
        "logit_std": draw(st.sampled_from([2.0, 2.0, 0.0, 0.01, 20.0, 300.0])),
        "offset": draw(st.sampled_from([0.0, 0.0, 30.0, -1e3, 1e4])),
        "ignored": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "idle": draw(st.sampled_from([0.0, 0.0, 0.5, 0.9])),
        "unowned": draw(st.booleans()),
        "upstream": tuple(sorted(draw(st.sets(st.sampled_from(outputs), min_size=1)))),
        "poison": draw(st.sampled_from(["", "", "nan", "inf", "-inf"])),
        "bits": True,
        "keywords": keywords,
    }
    if operation == "linear_logits_at":
        fields["upstream"] = ("candidate_logprobs", "logprobs")  # of the logits, and of `support_logprobs`
        fields["tail"] = draw(st.sampled_from([0, 0, 1, 7]))
    if operation == "linear_jsd":
        fields["teacher_size"] = draw(st.sampled_from([1, 8, 40]))
        fields["teacher_dtype"] = draw(st.sampled_from([FP32, BF16, FP16]))
        fields["weighted"] = draw(st.booleans())
        fields["idle"] *= not fields["weighted"]  # a token without a weight is ignored
        kinds = draw(st.sets(st.sampled_from(KINDS)))
        keywords |= {"kinds": tuple(sorted(kinds))} if kinds else {}
    return Case(**fields)


@st.composite
def _shards(draw: st.DrawFn, ranks: int, most: int) -> tuple[int, ...]:
    """Columns of each rank: all equal, or each its own; multiples of 128 are cut without a change of bits."""
    columns = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 256, 257, 384, 640]), st.integers(1, 700))
    size = columns.map(lambda number: min(number, most))
    if draw(st.booleans()):
        return (draw(size),) * ranks
    return tuple(draw(size) for _ in range(ranks))


def rounding(share: Share, expected: Any) -> dict[str, float]:
    """What the budgets leave out because other inputs show it seldom: errors of gradients that nearly cancel.

    A probability is wrong by an eps of its logit, of either head's, and more by some of that logit's distance from the
    largest; a gradient by that, times what upstream and the other factor of its product amount to, however small the
    gradient is. A sum over ranks rounds each rank's part, and the roundings of a few numbers, of the gradient or of the
    logits' gradients that it sums, do not average. A logit
    that is kept is wrong by an eps of the dtype, and a candidate's by one of the log-sum-exp, to which its logprob is
    added: much beside a small softcap, whose derivative is taken of it. And probabilities of kept logits do not sum to
    one. Gradients of logits, and results, that are subnormal in fp16 are rounded to multiples of one number, as eager's
    are. A softcap makes small logits of large products, whose rounding stays.
    """
    case, whole, keywords = share.case, share.whole, share.whole.keywords
    hidden, weight = (tensor.double() for tensor in whole.heads[0])
    temperature = torch.as_tensor(keywords["temperature"], dtype=torch.float64, device=hidden.device)
    factor = (abs(keywords.get("logits_scale", keywords.get("student_logits_scale", 1.0))) / temperature).nan_to_num(
        0, 0, 0
    )
    largest, spreads, of_products = zip(*logits_of_heads(share, temperature), strict=True)
    spread = max(spreads)
    given = {
        name: gradient.double().abs() for name, gradient in whole.upstream._asdict().items() if gradient is not None
    }
    upstream = sum(gradient.sum(-1) if name == "candidate_logprobs" else gradient for name, gradient in given.items())
    size = float((upstream * factor).norm()) * (1 + math.log(len(weight)) + spread * (case.operation == "linear_jsd"))
    eps, own_eps = torch.finfo(torch.float32).eps, torch.finfo(case.dtype).eps
    keeps = share.ranks.backend == "triton" and case.dtype != FP32 and not case.fp32_weight
    of_calls = {"linear_token_loss": True, "linear_cross_entropy": keywords.get("logits_cache_bytes") != 0}
    keeps = keeps and of_calls.get(case.operation, False)
    step = torch.finfo(case.dtype).smallest_normal * own_eps  # of subnormal numbers
    num_logits = whole.labels.numel() * len(weight)
    of_cap = own_eps * bool(keeps) + eps * (largest[0] + math.log(len(weight))) * bool(case.keywords.get("candidates"))
    if keywords.get("softcap") and temperature.numel():
        of_cap = min(1.0, of_cap * 2 * float(temperature.nan_to_num(0, 0, 0).max()) / keywords["softcap"])
    else:
        of_cap = 0.0
    floors = {}
    for name, other, part in (("grad_hidden", weight, share.rows), ("grad_weight", hidden, share.columns)):
        exact = getattr(expected, name)[part]
        error = eps * (4 * (1 + spread) + sum(largest) / 2) + of_cap + own_eps * bool(keeps)
        if case.operation == "linear_jsd":  # torch's products, rounded once in forward and otherwise in backward
            error += 2 * sum(of_products)
            error += unsure_signs(share, error)
        few = min(num_logits, exact.numel()) < FEW
        error += own_eps * (few or (name == "grad_hidden" and share.ranks.number > 1))
        largest_row = float(other.norm(dim=-1).max()) if other.numel() else 0.0
        error = error * size * largest_row + step / 2 * (num_logits**0.5 * largest_row + exact.numel() ** 0.5)
        floors[name] = error / max(float(exact[~exact.isnan()].norm()), LEAST_NORM)
    if keywords.get("softcap"):
        names = ("logprobs", "lse", "max_logit", "min_logit", "candidate_logprobs")
        floors |= dict.fromkeys(names, of_products[0]) | {"entropy": of_products[0] * (1 + spread)}
    if case.operation == "linear_jsd":
        of_tokens, weights = loss_rounding(share), next(iter(given.values()))
        floors["student"] = 16 * eps * (1 + largest[0])  # its outputs beside those of another call
        floors["loss"] = float((of_tokens * weights).sum() if case.weighted else max([0.0, *of_tokens.flatten()]))
    return floors


def logits_of_heads(share: Share, temperature: Tensor) -> Iterator[tuple[float, float, float]]:
    """Of each head the largest logit, the largest difference of two of a row, and what a product's rounding makes of a
    logit in fp32, at most.

    The rounding is of the product's terms, which may be far larger than the product where they cancel: a sum of H terms
    of one size, each partial sum rounded, is wrong by eps sqrt(H) / 2 of their norm. Scale and softcap follow.
    """
    names = ("student_", "teacher_") if len(share.whole.heads) > 1 else ("",)
    for head, name in zip(share.whole.heads, names, strict=True):
        hidden, weight = (tensor.double() for tensor in head)
        scale, softcap = share.keywords.get(f"{name}logits_scale", 1.0), share.keywords.get(f"{name}softcap")
        products, terms = hidden @ weight.T, (hidden.square() @ weight.square().T).sqrt() * abs(scale)
        if softcap is not None:
            terms *= 1 - (products * scale / softcap).tanh().square()
        divisor = temperature[..., None] if temperature.dim() else temperature
        logits, terms = (z / divisor for z in (logits_of_products(products, scale, softcap), terms))
        if not logits.numel():
            yield 0.0, 0.0, 0.0
            continue
        logits, terms = logits.nan_to_num(0, 0, 0), terms.nan_to_num(0, 0, 0)
        rounding = torch.finfo(torch.float32).eps * hidden.shape[-1] ** 0.5 / 2 * float(terms.abs().max())
        yield float(logits.abs().max()), float((logits.amax(-1) - logits.amin(-1)).max()), rounding


def loss_rounding(share: Share) -> Tensor:
    """What an fp32 rounding of every product makes of each token's loss: much where heads are far apart."""
    options = oracle_options(share)
    products = [(hidden.double() @ weight.double().T).requires_grad_() for hidden, weight in share.whole.heads]
    terms = torch.zeros((), dtype=torch.float64)
    for kind in options.pop("kinds", ()) or ("jsd",):
        gradients = torch.autograd.grad(divergences_of_products(*products, **options)[kind].sum(), products)
        of_each = zip(products, gradients, strict=True)
        parts = [(product.detach() * gradient).abs().nan_to_num(0, 0, 0) for product, gradient in of_each]
        terms = terms + torch.cat(parts, dim=-1).sum(-1)
    return torch.finfo(torch.float32).eps * terms


def unsure_signs(share: Share, rounding: float) -> float:
    """The largest probability of a row's columns whose sign in total variation's gradient is a matter of rounding."""
    options = oracle_options(share)
    if "tv" not in options.pop("kinds", ()):
        return 0.0
    products = [hidden.double() @ weight.double().T for hidden, weight in share.whole.heads]
    log_s, log_t, _ = log_probabilities(*products, **{n: v for n, v in options.items() if n != "beta"})
    close = (log_s - log_t).abs() <= rounding
    sums = (log_s.exp() * close).sum(-1).nan_to_num(0, 0, 0)
    return float(sums.max()) if sums.numel() else 0.0

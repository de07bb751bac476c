"""What results are held against: the fp64 oracle, and the error that eager PyTorch makes on the same inputs."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce.core.options import LinearCrossEntropyOutput
from tests.reference import reference_linear_cross_entropy

# An error within this many times that of eager PyTorch is rounding; a wrong formula is orders of magnitude larger.
TIMES_EAGER_FP32 = 4.0
TIMES_EAGER_16_BIT = 2.0

_EPS_FP32 = torch.finfo(torch.float32).eps
LEAST_NORM = 1e-100  # of what an error is relative to: less than any number of fp32, and dividing by it is finite


class Upstream(NamedTuple):
    """Upstream gradients of the differentiable outputs; None: the output takes no part in the loss."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None  # of no account without telemetry
    candidate_logprobs: Tensor | None = None  # of no account without candidates


class Result(NamedTuple):
    outputs: LinearCrossEntropyOutput
    grad_hidden: Tensor | None
    grad_weight: Tensor | None


class Comparison(NamedTuple):
    name: str
    error: float
    allowed: float


def random_upstream(shape: tuple[int, ...], generator: torch.Generator, entropy: bool = True) -> Upstream:
    """A gradient of its own for each token and output."""
    logprobs, entropies, lse = torch.randn(3, *shape, generator=generator).unbind()
    return Upstream(logprobs, entropies if entropy else None, lse, torch.randn(shape, generator=generator))


def evaluate(
    function: Callable[..., LinearCrossEntropyOutput],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    upstream: Upstream,
    **keywords: Any,
) -> Result:
    """Outputs of `function` and the gradients that `upstream` gives through them."""
    hidden = hidden.detach().clone().requires_grad_()
    weight = weight.detach().clone().requires_grad_()
    outputs = function(hidden, weight, labels, **keywords)
    torch.autograd.backward(*differentiable(outputs, upstream))
    detached = LinearCrossEntropyOutput(*(None if o is None else o.detach() for o in outputs))
    return Result(detached, hidden.grad, weight.grad)


def differentiable(outputs: LinearCrossEntropyOutput, upstream: Upstream) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that were asked for and take part in the loss, and their upstream gradients."""
    pairs = [(getattr(outputs, name), getattr(upstream, name)) for name in Upstream._fields]
    pairs = [(output, grad.to(output)) for output, grad in pairs if output is not None and grad is not None]
    return [output for output, _ in pairs], [grad for _, grad in pairs]


def oracle(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Upstream, **keywords: Any) -> Result:
    """`reference_linear_cross_entropy` in fp64 for inputs of any leading shape, with telemetry."""
    return evaluate(
        _any_shape(reference_linear_cross_entropy), hidden.double(), weight.double(), labels, upstream, **keywords
    )


def comparisons(
    actual: Result,
    expected: Result,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    upstream: Upstream,
    *,
    weight_rows: slice = slice(None),
    hidden_rows: slice = slice(None),
    shards: Sequence[slice] = (),
    **keywords: Any,
) -> Iterator[Comparison]:
    """Each result's error beside what is allowed.

    Outputs: largest difference, allowed a multiple of what eager PyTorch makes in fp32 on these inputs, whatever their
    dtype. Gradients: norm of the difference over the norm, allowed a multiple of what eager makes in the inputs' dtype.
    `weight_rows`, `hidden_rows`: the part of the oracle's gradients that `actual` holds. `shards`: each rank's rows of
    the weight, if hidden's gradient was summed over the ranks in hidden's dtype.
    """
    in_fp32 = evaluate(
        _any_shape(eager_linear_cross_entropy), hidden.float(), weight.float(), labels, upstream, **keywords
    )
    same_dtype = evaluate(_any_shape(eager_linear_cross_entropy), hidden, weight, labels, upstream, **keywords)
    extremes = [t.nan_to_num().abs().max() for t in expected.outputs[2:5] if t is not None and t.numel()]
    largest_logit = max([1.0, *map(float, extremes)])
    logits_norm = expected.outputs.logits_norm
    largest_norm = float(logits_norm.nan_to_num().max()) if logits_norm is not None and logits_norm.numel() else 0.0
    for name, value, exact, eager in zip(
        LinearCrossEntropyOutput._fields, actual.outputs, expected.outputs, in_fp32.outputs, strict=True
    ):
        if value is None:
            continue
        if name == "argmax":
            yield Comparison(name, float((value != exact).sum()), 0.0)
            continue
        # Where eager happens to be exact: a rounding of the products and one of their base-2 form.
        floor = 2 * _EPS_FP32 * (max(largest_logit, largest_norm) if name == "logits_norm" else largest_logit)
        eager_error = 0.0 if eager is None else largest_error(eager, exact)
        yield Comparison(name, largest_error(value, exact), TIMES_EAGER_FP32 * max(eager_error, floor))
    # What the exact gradients of weights one rounding away differ by: of a single number eager may be right by luck.
    sign = 1 - 2 * (torch.arange(len(weight), device=weight.device) % 2)[:, None]
    nudged = None
    if keywords.get("logits_dtype") is None:  # else ties would round the other way
        nudged = oracle(hidden, weight.double() * (1 + _EPS_FP32 / 2 * sign), labels, upstream, **keywords)
    for name, part, dtype in (("grad_hidden", hidden_rows, hidden.dtype), ("grad_weight", weight_rows, weight.dtype)):
        times = TIMES_EAGER_FP32 if dtype == torch.float32 else TIMES_EAGER_16_BIT
        value, exact, eager = (getattr(result, name) for result in (actual, expected, same_dtype))
        if value is None:
            continue
        # Where eager happens to be exact: rounding of the result, and of the logits that p = exp(z - lse) is made of.
        # Over many numbers a rounding is a quarter of eps on average, of a single one it is up to a half.
        floor = max(torch.finfo(dtype).eps, _EPS_FP32 * largest_logit) / (4 if value.numel() > 1 else 2)
        likes = [eager] if nudged is None else [eager, getattr(nudged, name)]
        # A part whose gradient is small beside the others' is judged by what eager makes of it.
        errors = (relative_error(like[of], exact[of]) for like in likes for of in (slice(None), part))
        allowed = times * max(floor, *errors)
        if name == "grad_hidden" and shards:
            exact_of = functools.partial(oracle, labels=labels, upstream=upstream, **keywords)
            of_ranks = parts_of_grad_hidden(exact_of, hidden.double(), weight.double(), shards)
            allowed = math.hypot(allowed, error_of_sum([of_rank[part] for of_rank in of_ranks], dtype))
        yield Comparison(name, relative_error(value, exact[part]), allowed)


def part_comparisons(
    value: Tensor,
    rows: slice,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    upstream: Upstream,
    **keywords: Any,
) -> Iterator[Comparison]:
    """The part of hidden's gradient that some rows of the weight give, beside what eager makes of it in 16 bits."""
    functions = oracle, functools.partial(evaluate, _any_shape(eager_linear_cross_entropy))
    inputs = (hidden.double(), weight.double()), (hidden, weight)
    exact, eager = (
        parts_of_grad_hidden(functools.partial(f, labels=labels, upstream=upstream, **keywords), *of, [rows])[0]
        for f, of in zip(functions, inputs, strict=True)
    )
    valid = exact.isfinite() & value.isfinite()  # a rank whose columns are padding knows of no row that is NaN
    exact, eager, value = (of[valid] for of in (exact, eager, value))
    error = max(relative_error(eager, exact), torch.finfo(hidden.dtype).eps / 4)
    yield Comparison("grad_hidden of this rank's columns", relative_error(value, exact), TIMES_EAGER_16_BIT * error)


def parts_of_grad_hidden(
    function: Callable[[Tensor, Tensor], Any], hidden: Tensor, weight: Tensor, shards: Sequence[slice]
) -> list[Tensor]:
    """What each shard's rows of the weight give of `function(hidden, weight).grad_hidden`."""
    num_rows, hidden_size = weight.shape
    nothing, identity = hidden.new_zeros(*hidden.shape[:-1], num_rows), torch.eye(num_rows).to(weight)
    wider = torch.cat([hidden, nothing], dim=-1), torch.cat([weight, identity], dim=-1)  # with the same products
    grad_products = function(*wider).grad_hidden[..., hidden_size:]
    return [grad_products[..., rows].to(weight) @ weight[rows] for rows in shards]


def error_of_sum(parts: Sequence[Tensor], dtype: torch.dtype, *, of_parts: bool = True) -> float:
    """What rounding to `dtype` adds to the error of a sum over ranks, relative to the sum.

    A rank rounds its part (`of_parts`), and each addition of a ring or a tree its result; the last addition is among
    what one rank is allowed, unless the parts are exact (not `of_parts`). NCCL chooses the order: of so many parts the
    sum with the largest roundings. A rounding is uniform within half a unit in the last place, roundings are
    independent, and the norm of so many is rarely, at five standard deviations of its square, above this.
    """
    parts = [part.double().nan_to_num() for part in parts]
    total, parts = sum(parts), [part for part in parts if part.any()]
    norm = float(torch.as_tensor(total).norm())
    if len(parts) < 2 or not norm:
        return 0.0

    def variance(rounded: Tensor) -> Tensor:
        last_place = torch.finfo(dtype).eps * torch.ldexp(torch.ones_like(rounded), rounded.frexp().exponent - 1)
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        return torch.where(rounded == 0, 0.0, last_place.clamp(min=least) ** 2 / 12)

    of_sums = [
        max((variance(sum(some)) for some in itertools.combinations(parts, number)), key=torch.sum)
        for number in range(2, len(parts) + (not of_parts))
    ]
    squares = sum([*of_sums, *(map(variance, parts) if of_parts else ())])
    return float((squares.sum() + 5 * (2 * squares.square().sum()).sqrt()).sqrt()) / norm


def assert_within(comparisons: Iterator[Comparison]) -> None:
    for name, error, allowed in comparisons:
        assert error <= allowed < math.inf, f"{name}: error {error:.2e}, allowed {allowed:.1e}"


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference; infinite where one is NaN and the other is not, or where shapes differ."""
    if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    difference = (actual.double() - expected.double())[~expected.isnan()]
    return float(difference.abs().max()) if difference.numel() else 0.0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; infinite where NaN or shape disagree, huge where 0 is expected."""
    if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    valid = ~expected.isnan()
    difference = float((actual.double() - expected.double())[valid].norm())
    return difference / max(float(expected[valid].double().norm()), LEAST_NORM) if difference else 0.0


def eager_linear_cross_entropy(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [N]
    temperature: float | Tensor = 1.0,
    *,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    entropy: bool = True,
    telemetry: bool = False,
    logits_dtype: torch.dtype | None = None,
    candidates: Tensor | None = None,
) -> LinearCrossEntropyOutput:
    """What a user writes in eager PyTorch: logits in the inputs' dtype, an fp32 softmax over them."""
    if hidden.dtype != weight.dtype:  # an fp32 head
        hidden = hidden.float()
    products = (hidden @ weight[:vocab_size].T).float()
    if logits_dtype is not None:
        products = products + (products.detach().to(logits_dtype).float() - products.detach())
    logits = products * logits_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        usable = torch.where((temperature > 0) & temperature.isfinite(), temperature, torch.nan)
        temperature = torch.where(labels == ignore_index, 1.0, usable)[:, None]
    logits = logits / temperature
    known = (labels >= 0) & (labels < logits.shape[1])
    kept = torch.where(labels == ignore_index, 0.0, torch.where(known, 1.0, torch.nan))
    all_logprobs = logits.log_softmax(dim=-1)
    logprobs = all_logprobs.gather(1, torch.where(known, labels, 0)[:, None])[:, 0]
    row_entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1) if entropy else None
    outputs = [logprobs, row_entropy, logits.logsumexp(dim=-1)]
    if telemetry:
        outputs += [logits.detach().amax(dim=-1), logits.detach().amin(dim=-1)]
        outputs += [all_logprobs.detach().exp().square().sum(dim=-1), logits.detach().norm(dim=-1), logits.mean(dim=-1)]
    outputs = [None if o is None else o * kept for o in outputs]
    if telemetry:
        outputs.insert(5, logits.argmax(dim=-1))
    result = LinearCrossEntropyOutput(*outputs)
    if candidates is not None:
        factor = (candidates >= 0).float().masked_fill(candidates >= logits.shape[1], torch.nan)
        at = all_logprobs.gather(1, candidates.clamp(0, logits.shape[1] - 1)) * factor
        result = result._replace(candidate_logprobs=(at * kept[:, None]).masked_fill(kept[:, None] == 0, 0.0))
    return result


def _any_shape(function: Callable[..., LinearCrossEntropyOutput]) -> Callable[..., LinearCrossEntropyOutput]:
    """`function` of hidden [N, H] and labels [N], for hidden [..., H] and labels [...]."""

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, **keywords: Any):
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1)
        if (candidates := keywords.get("candidates")) is not None:
            keywords = {**keywords, "candidates": candidates.reshape(-1, candidates.shape[-1])}
        flat = function(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature, **keywords)
        return LinearCrossEntropyOutput(*(None if o is None else o.reshape(labels.shape + o.shape[1:]) for o in flat))

    return call

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
from tests.roundings import (
    EPS,
    FORM,
    Logits,
    Terms,
    make_logits,
    norm_of_roundings,
    roundings_of_gradients,
    roundings_of_outputs,
    terms_of_cross_entropy,
    usual_norm,
    variance_of_rounding,
)

# An error within this many times that of eager PyTorch is rounding; a wrong formula is orders of magnitude larger.
TIMES_EAGER_FP32 = 4.0
TIMES_EAGER_16_BIT = 2.0

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


def times_eager(dtype: torch.dtype) -> float:
    return TIMES_EAGER_FP32 if dtype == torch.float32 else TIMES_EAGER_16_BIT


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
    return evaluate(_reference, hidden.double(), weight.double(), labels, upstream, **keywords)


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
    """Each result's error beside what is allowed: a multiple of what eager PyTorch makes on these inputs or, if it is
    right by luck, of what roundings amount to (`tests/roundings.py`).

    Outputs: largest difference, whatever the inputs' dtype beside eager's in fp32. Gradients: norm of the difference
    over the norm, beside eager's in the inputs' dtype.
    `weight_rows`, `hidden_rows`: the part of the oracle's gradients that `actual` holds. `shards`: each rank's rows of
    the weight, if hidden's gradient was summed over the ranks in hidden's dtype.
    """
    in_fp32 = evaluate(_reference, hidden.float(), weight.float(), labels, upstream, **keywords)
    same_dtype = evaluate(_reference, hidden, weight, labels, upstream, **keywords)
    logits, terms = _logits_and_terms(hidden, weight, labels, upstream, **keywords)
    counted = labels.flatten() != keywords.get("ignore_index", -100)
    of_outputs = roundings_of_outputs(logits, counted)
    for name, value, exact, eager in zip(
        LinearCrossEntropyOutput._fields, actual.outputs, expected.outputs, in_fp32.outputs, strict=True
    ):
        if value is None:
            continue
        if name == "argmax":
            yield Comparison(name, float((value != exact).sum()), 0.0)
            continue
        eager_error = 0.0 if eager is None else largest_error(eager, exact)
        allowed = TIMES_EAGER_FP32 * max(eager_error, of_outputs.get(name, of_outputs["lse"]))
        yield Comparison(name, largest_error(value, exact), allowed)
    exact_of = functools.partial(oracle, labels=labels, upstream=upstream, **keywords)
    of_products = grad_of_products(exact_of, hidden.double(), weight.double())
    variances = roundings_of_gradients(of_products, terms, logits, hidden, weight)
    # Where backward's products are rounded otherwise than forward's, every p of a row is.
    of_rows = EPS / 4 * float(logits.value[counted].abs().max()) if counted.any() else 0.0
    parts, dtypes = (hidden_rows, weight_rows), (hidden.dtype, weight.dtype)
    for name, part, dtype, variance in zip(("grad_hidden", "grad_weight"), parts, dtypes, variances, strict=True):
        value, exact, eager = (getattr(result, name) for result in (actual, expected, same_dtype))
        if value is None:
            continue
        # A part whose gradient is small beside the others' is judged by what eager makes of it.
        errors = [relative_error(eager[of], exact[of]) for of in (slice(None), part)]
        allowed = times_eager(dtype) * max(*errors, of_rows, usual_norm(variance[part]) / norm(exact[part]))
        if name == "grad_hidden" and shards:
            of_ranks = [(of_products[..., rows] @ weight[rows].double())[part] for rows in shards]
            allowed = math.hypot(allowed, error_of_sum(of_ranks, dtype))
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
    functions = oracle, functools.partial(evaluate, _reference)
    inputs = (hidden.double(), weight.double()), (hidden, weight)
    of_products = [
        grad_of_products(functools.partial(f, labels=labels, upstream=upstream, **keywords), *of)
        for f, of in zip(functions, inputs, strict=True)
    ]
    exact, eager = (of[..., rows] @ of_weight[rows] for of, (_, of_weight) in zip(of_products, inputs, strict=True))
    logits, terms = _logits_and_terms(hidden, weight, labels, upstream, **keywords)
    variance, _ = roundings_of_gradients(of_products[0], terms, logits, hidden, weight, columns=rows)
    valid = exact.isfinite() & value.isfinite()  # a rank whose columns are padding knows of no row that is NaN
    exact, eager, value = (of[valid] for of in (exact, eager, value))
    error = max(relative_error(eager, exact), usual_norm(variance) / norm(exact))
    yield Comparison("grad_hidden of this rank's columns", relative_error(value, exact), TIMES_EAGER_16_BIT * error)


def _logits_and_terms(
    hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Upstream, **keywords: Any
) -> tuple[Logits, Terms]:
    """What roundings follow from."""
    form = {name: keywords[name] for name in FORM if name in keywords}
    logits = make_logits(hidden, weight[: keywords.get("vocab_size")], **form)
    taken = upstream._replace(
        entropy=upstream.entropy if keywords.get("entropy", True) else None,
        mean_logit=upstream.mean_logit if keywords.get("telemetry") else None,
    )
    labels = labels.flatten()
    terms = terms_of_cross_entropy(logits, labels, taken, keywords.get("candidates"))
    counted = labels[:, None] != keywords.get("ignore_index", -100)
    return logits, Terms(*(of.where(counted, 0.0) for of in terms if of is not None))


def grad_of_products(function: Callable[[Tensor, Tensor], Any], hidden: Tensor, weight: Tensor) -> Tensor:
    """The gradient of hidden @ weight.T, [..., V], behind `function(hidden, weight).grad_hidden`."""
    num_rows, hidden_size = weight.shape
    nothing, identity = hidden.new_zeros(*hidden.shape[:-1], num_rows), torch.eye(num_rows).to(weight)
    wider = torch.cat([hidden, nothing], dim=-1), torch.cat([weight, identity], dim=-1)  # with the same products
    return function(*wider).grad_hidden[..., hidden_size:].to(weight)


def error_of_sum(parts: Sequence[Tensor], dtype: torch.dtype, *, of_parts: bool = True) -> float:
    """What rounding to `dtype` adds to the error of a sum over ranks, relative to the sum.

    A rank rounds its part (`of_parts`), and each addition of a ring or a tree its result; the last addition is among
    what one rank is allowed, unless the parts are exact (not `of_parts`). NCCL chooses the order: of so many parts the
    sum with the largest roundings.
    """
    parts = [part.double().nan_to_num() for part in parts]
    total, parts = sum(parts), [part for part in parts if part.any()]
    of_total = float(torch.as_tensor(total).norm())
    if len(parts) < 2 or not of_total:
        return 0.0
    of_sums = [
        max((variance_of_rounding(sum(some), dtype) for some in itertools.combinations(parts, number)), key=torch.sum)
        for number in range(2, len(parts) + (not of_parts))
    ]
    of_each = [variance_of_rounding(part, dtype) for part in parts] if of_parts else []
    return norm_of_roundings(sum([*of_sums, *of_each])) / of_total


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
    return difference / norm(expected[valid]) if difference else 0.0


def norm(exact: Tensor) -> float:
    """What errors are relative to."""
    return max(float(exact[~exact.isnan()].double().norm()), LEAST_NORM)


def _reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, **keywords: Any
) -> LinearCrossEntropyOutput:
    """`reference_linear_cross_entropy` of hidden [..., H] and labels [...]."""
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
    if (candidates := keywords.get("candidates")) is not None:
        keywords["candidates"] = candidates.reshape(-1, candidates.shape[-1])
    rows = hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1)
    flat = reference_linear_cross_entropy(*rows, temperature, **keywords)
    return LinearCrossEntropyOutput(*(None if o is None else o.reshape(labels.shape + o.shape[1:]) for o in flat))

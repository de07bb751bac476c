"""`linear_jsd`'s inputs, and what it is held against: materialised logits in fp64, and eager PyTorch's own error."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lce import linear_divergence, linear_divergence_loss, linear_jsd
from megatron_lce.core.divergence_types import KINDS
from tests.oracle import (
    TIMES_EAGER_FP32,
    Comparison,
    assert_within,
    error_of_sum,
    grad_of_products,
    largest_error,
    norm,
    relative_error,
    times_eager,
)
from tests.roundings import Logits, make_logits, roundings_of_gradients, terms_of_divergences, usual_norm


def make_inputs(
    tokens: int | tuple[int, ...],
    student_size: int,
    teacher_size: int,
    columns: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    teacher_dtype: torch.dtype | None = None,
    logit_std: float = 2.0,
) -> "JsdInputs":
    """Normal hidden and weight of either head, whose products have a standard deviation of `logit_std`."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    generator = torch.Generator().manual_seed(0)
    heads = []
    for size, its_dtype in ((student_size, dtype), (teacher_size, teacher_dtype or dtype)):
        hidden = torch.randn(*shape, size, generator=generator)
        weight = torch.randn(columns, size, generator=generator) * (logit_std / size**0.5)
        heads += [hidden.to(device, its_dtype), weight.to(device, its_dtype)]
    return JsdInputs(*heads, torch.randn(shape, generator=generator).to(device))


_USUAL = nullcontext()


class JsdInputs(NamedTuple):
    """Both heads, and the upstream gradient of each token's loss."""

    student_hidden: Tensor  # [..., H_s]
    student_weight: Tensor  # [V, H_s]
    teacher_hidden: Tensor  # [..., H_t]
    teacher_weight: Tensor  # [V, H_t]
    upstream: Tensor  # [...]

    def to(self, dtype: torch.dtype) -> "JsdInputs":
        return JsdInputs(*(t.to(dtype) for t in self[:4]), self.upstream)

    def run(self, backend: str, within: AbstractContextManager = _USUAL, **keywords: Any) -> "JsdResult":
        with within:
            return evaluate_jsd(weighted_jsd, self, backend=backend, **keywords)

    def check(self, backend: str, *, only_here: dict[str, Any] | None = None, **keywords: Any) -> "JsdResult":
        """Run, assert that loss and gradients are within their budget of the oracle's, and return them.

        `only_here`: keywords that the oracle does not have.
        """
        actual = self.run(backend, **(only_here or {}), **keywords)
        assert_within(jsd_comparisons(actual, self, **keywords))
        return actual


class JsdResult(NamedTuple):
    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def evaluate_jsd(
    function: Callable[..., Tensor],
    inputs: JsdInputs,
    *,
    weighted: bool = False,  # upstream holds the tokens' weights, the loss is their sum, `factor` its gradient
    factor: float = 1.0,
    **keywords: Any,
) -> JsdResult:
    """Loss of `function` and the student's gradients that `upstream` gives through it."""
    hidden = inputs.student_hidden.detach().clone().requires_grad_()
    weight = inputs.student_weight.detach().clone().requires_grad_()
    keywords |= {"weights": inputs.upstream} if weighted else {}
    loss = function(hidden, weight, *inputs[2:4], **keywords)
    loss.backward(loss.new_tensor(factor) if weighted else inputs.upstream.to(loss))
    return JsdResult(loss.detach(), hidden.grad, weight.grad)


def weighted_jsd(*heads: Tensor, weights: Tensor | None = None, kinds: tuple[str, ...] = (), **keywords: Any) -> Any:
    """`linear_jsd`; with kinds the `combined` divergences of `linear_divergence`; with the student, if it is asked for.

    With weights [...] their sum, by `linear_divergence_loss`: rows of weight 0 are ignored.
    """
    if weights is None and not kinds:
        return linear_jsd(*heads, **keywords)
    if weights is None:
        out = linear_divergence(*heads, kinds=kinds, **keywords)
        loss = combined(out._asdict(), kinds)
        return (loss, out.student) if keywords.get("return_student") else loss
    labels, ignore_index = keywords.pop("labels", None), keywords.get("ignore_index", -100)
    if labels is None:
        labels = torch.full(weights.shape, int(ignore_index == 0), dtype=torch.int64, device=weights.device)
    labels = labels.masked_fill(weights == 0, ignore_index)
    given = weights, *(factors(labels.shape, i, weights.device) for i, _ in enumerate(kinds))
    result = linear_divergence_loss(*heads, labels, _weighted, *given, kinds=kinds or ("jsd",), **keywords)
    return (result.loss, result.outputs.student) if keywords.get("return_student") else result.loss


def _weighted(out: Any, weights: Tensor, *of_kinds: Tensor) -> Tensor:
    by_kind = [out[i] for i in range(len(KINDS)) if out[i] is not None]
    sums = sum(f * d for f, d in zip(of_kinds, by_kind, strict=True)) if of_kinds else out.jsd
    return (weights * sums).float()


def combined(found: dict[str, Any], kinds: tuple[str, ...]) -> Tensor:
    """The sum of some divergences, each with a factor of its own for each token."""
    in_order = [found[kind] for kind in KINDS if kind in kinds]
    return sum(factors(d.shape, i, d.device).to(d.dtype) * d for i, d in enumerate(in_order))


def factors(shape: tuple[int, ...], kind: int, device: torch.device) -> Tensor:
    numbers = torch.arange(math.prod(shape), dtype=torch.float32, device=device)
    return torch.cos(numbers + kind).view(shape)


def materialised_jsd(*heads: Tensor, **keywords: Any) -> Tensor:
    """What a user writes in eager PyTorch: products in the inputs' dtype, the rest in fp32 (fp64 if they are)."""
    return jsd_of_products(heads[0] @ heads[1].T, heads[2] @ heads[3].T, **keywords)


def jsd_of_products(
    student: Tensor, teacher: Tensor, *, beta: float = 0.5, kinds: tuple[str, ...] = (), **keywords: Any
) -> Tensor:
    """The jsd, or the `combined` divergences of these kinds."""
    found = divergences_of_products(student, teacher, beta=beta, **keywords)
    return combined(found, kinds) if kinds else found["jsd"]


def divergences_of_products(
    student: Tensor, teacher: Tensor, *, beta: float = 0.5, **keywords: Any
) -> dict[str, Tensor]:
    """Each divergence by its definition, [...]."""
    log_s, log_t, ignored = log_probabilities(student, teacher, **keywords)

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)

    found = {"forward_kl": kl(log_t, log_s), "reverse_kl": kl(log_s, log_t)}
    apart = log_s.exp() - log_t.exp()
    sign = (apart > 0).to(apart) - (apart < 0).to(apart) + 0 * apart.detach()  # NaN of NaN, unlike abs's gradient
    found["tv"] = 0.5 * (apart * sign).sum(dim=-1)
    if beta in (0, 1):
        found["jsd"] = found["reverse_kl" if beta else "forward_kl"]
    else:
        log_weights = torch.tensor([beta, 1 - beta], dtype=torch.float64, device=log_s.device).log().to(log_s)
        log_m = torch.logaddexp(log_t + log_weights[0], log_s + log_weights[1])
        found["jsd"] = beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
    return {kind: torch.where(ignored, 0.0, loss) for kind, loss in found.items()}


def log_probabilities(
    student: Tensor,  # [..., V] hidden @ weight.T
    teacher: Tensor,  # [..., V]
    *,
    labels: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    student_logits_scale: float = 1.0,
    teacher_logits_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of both heads, [..., V], and which rows are ignored."""
    ignored = torch.zeros((), dtype=torch.bool, device=student.device) if labels is None else labels == ignore_index

    def usable(temperature: float | Tensor) -> float | Tensor:
        if not isinstance(temperature, Tensor):
            return temperature
        positive = (temperature > 0) & temperature.isfinite()
        return torch.where(ignored, 1.0, torch.where(positive, temperature, torch.nan))[..., None]

    temperatures = usable(temperature), usable(temperature if teacher_temperature is None else teacher_temperature)
    logits = (
        logits_of_products(student[..., :vocab_size], student_logits_scale, student_softcap),
        logits_of_products(teacher[..., :vocab_size], teacher_logits_scale, teacher_softcap),
    )
    log_s, log_t = ((z / t).log_softmax(dim=-1) for z, t in zip(logits, temperatures, strict=True))
    return log_s, log_t, ignored


def logits_of_products(products: Tensor, logits_scale: float, softcap: float | None) -> Tensor:
    """fp32, or fp64 if the products are."""
    scaled = (products if products.dtype == torch.float64 else products.float()) * logits_scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def jsd_comparisons(
    actual: JsdResult,
    inputs: JsdInputs,
    *,
    hidden_rows: slice = slice(None),
    weight_rows: slice = slice(None),
    shards: Sequence[slice] = (),
    **keywords: Any,
) -> Iterator[Comparison]:
    """Each result's error beside what is allowed, as in `tests.oracle.comparisons`; gradients in the student's dtype.

    Of a loss that is a weighted sum, what a token's is allowed times the sum of the weights.
    """
    expected = evaluate_jsd(materialised_jsd, inputs.to(torch.float64), **keywords)
    in_fp32 = evaluate_jsd(materialised_jsd, inputs.to(torch.float32), **keywords)
    dtype = inputs.student_hidden.dtype
    same_dtype = in_fp32 if dtype == torch.float32 else evaluate_jsd(materialised_jsd, inputs, **keywords)
    # Where eager happens to be exact: a rounding of the products and one of their base-2 form, of all p of a row alike.
    student, teacher = _logits(inputs, **keywords)
    largest = max(1.0, *(float(of.value.abs().max()) if of.value.numel() else 1.0 for of in (student, teacher)))
    floor = 2 * torch.finfo(torch.float32).eps * largest
    eager_errors = (
        largest_error(in_fp32.loss, expected.loss),
        *_errors_of_16_bit_products(inputs, expected.loss, keywords),
    )
    allowed, exact_loss = TIMES_EAGER_FP32 * max(*eager_errors, floor), expected.loss
    if actual.loss.dim() < exact_loss.dim():
        exact_loss = (inputs.upstream * exact_loss).sum()
        allowed *= 1.0 + float(inputs.upstream.abs().sum())
    yield Comparison("loss", largest_error(actual.loss, exact_loss), allowed)
    in_fp64 = inputs.to(torch.float64)
    of_products = grad_of_products(functools.partial(_evaluate_of_student, in_fp64, **keywords), *in_fp64[:2])
    given, kinds, beta = inputs.upstream.flatten(), keywords.get("kinds", ()), keywords.get("beta", 0.5)
    if (labels := keywords.get("labels")) is not None:
        given = given.where(labels.flatten() != keywords.get("ignore_index", -100), 0.0)
    in_order = [kind for kind in KINDS if kind in kinds]
    upstream = {kind: given * factors(given.shape, i, given.device) for i, kind in enumerate(in_order)} or {
        "jsd": given
    }
    terms = terms_of_divergences(student, teacher, upstream, beta)
    variances = roundings_of_gradients(of_products, terms, student, *inputs[:2])
    parts = hidden_rows, weight_rows
    for name, part, variance in zip(("grad_hidden", "grad_weight"), parts, variances, strict=True):
        value, exact, eager = (getattr(result, name) for result in (actual, expected, same_dtype))
        errors = relative_error(eager, exact), floor, usual_norm(variance[part]) / norm(exact[part])
        allowed = times_eager(value.dtype) * max(errors)
        if name == "grad_hidden" and shards:
            of_ranks = [(of_products[..., rows] @ in_fp64.student_weight[rows])[part] for rows in shards]
            allowed = math.hypot(allowed, error_of_sum(of_ranks, dtype))
        yield Comparison(name, relative_error(value, exact[part]), allowed)


def _evaluate_of_student(inputs: JsdInputs, hidden: Tensor, weight: Tensor, **keywords: Any) -> JsdResult:
    return evaluate_jsd(materialised_jsd, inputs._replace(student_hidden=hidden, student_weight=weight), **keywords)


def _errors_of_16_bit_products(inputs: JsdInputs, exact: Tensor, keywords: dict[str, Any]) -> Iterator[float]:
    """What follows from tensor cores alone, which add products of 16-bit inputs with less than fp32's care."""
    heads = (inputs[:2], inputs[2:4])
    if exact.device.type == "cuda" and all(hidden.dtype != torch.float32 for hidden, _ in heads):
        flat = (torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32) for hidden, weight in heads)
        products = (product.double().view(*exact.shape, product.shape[1]) for product in flat)
        yield largest_error(jsd_of_products(*products, **keywords), exact)


def _logits(inputs: JsdInputs, **keywords: Any) -> Iterator[Logits]:
    """Of both heads."""
    temperature, size = keywords.get("temperature", 1.0), keywords.get("vocab_size")
    of_teacher = keywords.get("teacher_temperature")
    temperatures = temperature, temperature if of_teacher is None else of_teacher
    heads = zip(("student", "teacher"), (inputs[:2], inputs[2:4]), temperatures, strict=True)
    for head, (hidden, weight), temperature in heads:
        form = keywords.get(f"{head}_logits_scale", 1.0), keywords.get(f"{head}_softcap")
        yield make_logits(hidden, weight[:size], temperature, *form)

"""What roundings amount to in outputs and gradients, from the exact sizes of all that lies between them and the inputs.

Eager PyTorch may be right by luck: of one number its error says nothing. With z the logits, p = exp(z - lse) and G the
gradient of the products, what is rounded is

    products  each of H terms and each partial sum
    z         by scale, temperature or softcap, and base 2
    log p     z less the largest logit and the logarithm of the sum
    G         p times upstream terms, the terms that p takes no part in, and a softcap's slope
    results   G in the inputs' dtype, the sum of its products, and the result

Roundings are uniform within half a unit in the last place and independent: their variances follow to first order.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

EPS = torch.finfo(torch.float32).eps
ROUNDING = EPS**2 / 12  # variance of one in fp32, relative to the square of the number
FORM = ("temperature", "logits_scale", "softcap", "logits_dtype")  # keywords of `make_logits`
OF_FUNCTION = 16  # roundings that an exponential or a logarithm, wrong by two units, is worth


class Logits(NamedTuple):
    """Of one head, in fp64: [N, V] each. Rows without a usable temperature are 0."""

    value: Tensor
    variance: Tensor
    slope: Tensor  # derivative by the product
    variance_of_slope: Tensor
    softcap: float | None

    @property
    def log_p(self) -> Tensor:
        return self.value.log_softmax(-1)

    @property
    def entropy(self) -> Tensor:
        """[N, 1], as its variances."""
        return -(self.log_p.exp() * self.log_p).sum(-1, keepdim=True)

    def of_log_p(self) -> tuple[Tensor, Tensor]:
        """Variances by the logits, whose errors leave the sum of p in a row as it is, and by roundings behind them."""
        p = self.log_p.exp()
        by_logits = self.variance * (1 - 2 * p) + (p.square() * self.variance).sum(-1, keepdim=True)
        return by_logits, ROUNDING * (3 * self.log_p.square() + 2 * OF_FUNCTION)

    def of_entropy(self) -> tuple[Tensor, Tensor]:
        p, log_p = self.log_p.exp(), self.log_p
        by_logits = (p * (log_p + self.entropy)).square() * self.variance
        behind = (p * (1 + log_p.abs())).square() * (self.of_log_p()[1] + ROUNDING)
        return by_logits.sum(-1, keepdim=True), behind.sum(-1, keepdim=True)


class Terms(NamedTuple):
    """Whose sum is the gradient of the logits, [N, V] each."""

    size: Tensor  # sum of their absolute values
    by_logits: Tensor  # variances, as of log p
    behind: Tensor
    kept: Tensor | None = None  # size of those in proportion to exponentials that may be kept in 16 bits


def make_logits(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    temperature: float | Tensor = 1.0,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Logits:
    hidden, weight = hidden.double().reshape(-1, hidden.shape[-1]), weight.double()
    products = hidden @ weight.T
    if logits_dtype is not None:
        products = products.to(logits_dtype).double()
    divisor = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device).reshape(-1, 1)
    divisor = torch.where((divisor > 0) & divisor.isfinite(), divisor, torch.inf)
    value = products * logits_scale
    variance = logits_scale**2 * variance_of_sums(hidden, weight.T)
    slope, of_slope = torch.ones_like(value), torch.zeros_like(value)
    if softcap is not None:
        variance = variance + 2 * ROUNDING * value.square()
        tanh = torch.tanh(value / softcap)
        value, slope = softcap * tanh, 1 - tanh.square()
        of_slope = ROUNDING * OF_FUNCTION + (2 * slope / softcap).square() * variance
        variance = slope.square() * variance + ROUNDING * OF_FUNCTION * value.square()
    factor = abs(logits_scale) / divisor
    variance = (variance + 3 * ROUNDING * value.square()) / divisor**2
    return Logits(value / divisor, variance, slope * factor, of_slope * factor**2, softcap)


def terms_of_cross_entropy(logits: Logits, labels: Tensor, upstream: Any, candidates: Tensor | None) -> Terms:
    """Of [N] labels; `upstream`: of outputs as in `tests.oracle`, None for what takes no part."""
    log_p, last = logits.log_p, logits.value.shape[1] - 1
    p = log_p.exp()
    of_logprobs, of_entropy, of_lse, of_mean = (
        torch.zeros_like(p[:, :1]) if given is None else given.double().abs().reshape(-1, 1) for given in upstream[:4]
    )
    at_label = (labels[:, None] == torch.arange(last + 1, device=p.device)).double()
    others = of_logprobs * at_label + of_mean / (last + 1)
    of_p, at_ids = of_logprobs + of_lse, torch.zeros_like(p)
    if candidates is not None and upstream.candidate_logprobs is not None:
        candidates = candidates.reshape(-1, candidates.shape[-1])
        of_ids = upstream.candidate_logprobs.double().abs().view_as(candidates).where(candidates >= 0, 0.0)
        others = others.scatter_add(1, candidates.clamp(0, last), of_ids)
        at_ids.scatter_add_(1, candidates.clamp(0, last), (candidates >= 0).double()).clamp_(max=1)
        of_p = of_p + of_ids.sum(-1, keepdim=True)
    of_p = of_p + of_entropy * (log_p.abs() + logits.entropy)
    by_logits, behind = (
        p.square() * ((of_p.square() + of_entropy.square()) * of_log_p + of_entropy.square() * of_both)
        for of_log_p, of_both in zip(logits.of_log_p(), logits.of_entropy(), strict=True)
    )
    # A candidate's logit is another product than the statistics'.
    behind = behind + at_ids * (p * of_p).square() * (2 * logits.variance + ROUNDING * logits.value.square())
    behind = behind + 4 * ROUNDING * ((p * of_p).square() + others.square())
    kept = p * (of_p + of_entropy) * (1 - at_label)  # the label's p comes from its exact logprob
    return Terms(p * of_p + others, by_logits, behind, kept)


def terms_of_divergences(student: Logits, teacher: Logits, upstream: dict[str, Tensor], beta: float) -> Terms:
    """`upstream`: [N] of each kind."""
    log_s, log_t = student.log_p, teacher.log_p
    p_s, p_t = log_s.exp(), log_t.exp()
    size, variances = torch.zeros_like(p_s), [torch.zeros_like(p_s), torch.zeros_like(p_s)]
    for kind, given in upstream.items():
        factor = given.double().abs().reshape(-1, 1)
        forward = kind == "forward_kl" or (kind == "jsd" and beta == 0)
        ratio, of_teacher = log_s - log_t, 1.0  # what of the teacher's log p takes part in the ratio
        if kind == "jsd" and 0 < beta < 1:
            log_m = torch.logaddexp(log_s + math.log(1 - beta), log_t + math.log(beta))
            ratio, of_teacher, factor = log_s - log_m, beta * (log_t - log_m).exp(), factor * (1 - beta)
        sizes = ratio.abs() + (p_s * ratio).sum(-1, keepdim=True).abs()
        size += factor * (p_s + p_t if forward else p_s if kind == "tv" else p_s * sizes)
        for variance, of_s, of_t in zip(variances, student.of_log_p(), teacher.of_log_p(), strict=True):
            of_ratio = of_teacher**2 * (of_s + of_t)
            if forward:
                of_each = p_s.square() * of_s + p_t.square() * of_t
            elif kind == "tv":  # a sign may be a matter of rounding, in the row's sum of signs too
                unsure = (ratio.square() <= 25 * of_ratio).double()
                of_sum = (p_s.square() * unsure).sum(-1, keepdim=True)
                of_each = p_s.square() * (of_s + unsure * (1 - 2 * p_s) + of_sum)
            else:
                of_sum = (p_s.square() * (of_ratio + ratio.square() * of_s)).sum(-1, keepdim=True)
                of_each = p_s.square() * (sizes.square() * of_s + of_ratio + of_sum)
            variance += factor.square() * of_each
    return Terms(size, variances[0], variances[1] + 4 * ROUNDING * size.square())


def variances_of_logprobs(logits: Logits) -> Tensor:
    """[N, V], and of the log-sum-exp or of a logit at most."""
    return logits.variance + sum(logits.of_log_p())


def roundings_of_outputs(logits: Logits, counted: Tensor) -> dict[str, float]:
    """The largest of the counted [N] tokens, by name; of outputs that are not named that of "lse"."""
    of_norm = logits.variance.sum(-1) + 4 * ROUNDING * logits.value.square().sum(-1)
    found = {
        "lse": variances_of_logprobs(logits),
        "entropy": sum(logits.of_entropy()),
        "logits_norm": of_norm,
    }
    return {name: usual_norm(of[counted].max()) if counted.any() else 0.0 for name, of in found.items()}


def roundings_of_gradients(
    gradient: Tensor,  # [..., V] exact, of the products
    terms: Terms,
    logits: Logits,
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    dtype: torch.dtype | None = None,  # of `gradient` where it is multiplied; None: that of the inputs
    columns: slice | None = None,  # what of the sum over the vocabulary is hidden's gradient; None: all
    cancels: bool = True,  # whether p is exactly 1 in a vocabulary of one
) -> tuple[Tensor, Tensor]:
    """Variances that add up to those of hidden's [..., V + H] and the weight's gradient [V, N + H]."""
    leading, dtypes = hidden.shape[:-1], (hidden.dtype, weight.dtype)
    dtype = dtype or torch.promote_types(*dtypes)
    gradient, hidden = (of.double().reshape(-1, of.shape[-1]) for of in (gradient, hidden))
    weight = weight.double()
    usual = ~gradient.isnan().any(-1, keepdim=True)
    gradient = gradient.where(usual, 0.0)
    behind = terms.behind * logits.slope.square() + terms.size.square() * logits.variance_of_slope
    if terms.kept is not None and dtype != torch.float32:
        behind = behind + (torch.finfo(dtype).eps * terms.kept * logits.slope).square() / 12
    variances = terms.by_logits * logits.slope.square(), behind
    padding = 0, gradient.shape[1] - behind.shape[1]
    if cancels and terms.size.shape[1] == 1:
        usual = usual & (gradient != 0)
    by_logits, behind = (pad(of, padding).where(usual, 0.0) for of in variances)
    behind = behind + variance_of_rounding(gradient, dtype)
    centred = weight
    if columns is not None:
        part = torch.zeros_like(weight)
        part[columns] = weight[columns]
        weight = centred = part
    elif logits.softcap is None:  # errors that sum to 0 in a row do not meet what is common to all columns
        centred = weight - weight[: terms.size.shape[1]].mean(0)
    of_hidden = by_logits * centred.square().sum(-1) + behind * weight.square().sum(-1)
    of_weight = (by_logits + behind).T * hidden.square().sum(-1)
    of_hidden = torch.cat([of_hidden, _variance_of_products(gradient, weight, dtypes[0])], dim=-1)
    of_weight = torch.cat([of_weight, _variance_of_products(gradient.T, hidden, dtypes[1])], dim=-1)
    return of_hidden.view(*leading, of_hidden.shape[1]), of_weight


def _variance_of_products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return variance_of_sums(left, right) + variance_of_rounding(left @ right, dtype)


def variance_of_sums(left: Tensor, right: Tensor) -> Tensor:
    """Of `left @ right` in fp32: each of K terms of either sign, and each partial sum, is rounded."""
    return ROUNDING * left.shape[-1] * (left.square() @ right.square())


def variance_of_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    last_place = torch.finfo(dtype).eps * torch.ldexp(torch.ones_like(values), values.frexp().exponent - 1)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.where(values == 0, 0.0, last_place.clamp(min=least) ** 2 / 12)


def norm_of_roundings(variances: Tensor) -> float:
    """The norm of independent roundings is rarely, at eight standard deviations of its square, above this."""
    return float((variances.sum() + 8 * (2 * variances.square().sum()).sqrt()).sqrt())


def usual_norm(variances: Tensor) -> float:
    """Of roundings, half of what it is rarely above: of many the norm to be expected or less, of few no luck."""
    return norm_of_roundings(variances) / 2

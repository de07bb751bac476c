"""One case of the operations on some ids of the vocabulary, against materialised logits."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import megatron_lce
from tests.cases import Share
from tests.findings import Findings, Floors, check_error, check_same_bits_on_every_rank, surroundings, title
from tests.jsd_oracle import logits_of_products
from tests.oracle import (
    TIMES_EAGER_FP32,
    Upstream,
    error_of_sum,
    largest_error,
    norm,
    relative_error,
    times_eager,
)
from tests.roundings import (
    EPS,
    FORM,
    ROUNDING,
    Logits,
    Terms,
    make_logits,
    roundings_of_gradients,
    terms_of_cross_entropy,
    usual_norm,
    variances_of_logprobs,
)

FAR_BELOW = -1e9  # a logit whose exponential is 0


class Exact(NamedTuple):
    """Logits of the whole vocabulary in fp64, and what they are made of."""

    leaves: tuple[Tensor, Tensor]  # hidden and weight
    products: Tensor  # [..., V]
    logits: Tensor  # [..., V], NaN in rows without a usable temperature
    factor: Tensor  # from products to logits, but for the softcap
    usable: Tensor  # [...] bool
    rounded: Logits  # the same, [N, V]
    allowed: float  # error of an fp32 logit in random calls, which have other budgets


def exact_logits(share: Share) -> Exact:
    (hidden, weight), keywords = share.whole.heads[0], share.keywords
    leaves = tuple(tensor.double().requires_grad_() for tensor in (hidden, weight))
    temperature = torch.as_tensor(keywords.get("temperature", 1.0), dtype=torch.float64, device=hidden.device)
    temperature = torch.where((temperature > 0) & temperature.isfinite(), temperature, torch.nan)[..., None]
    products = (leaves[0] @ leaves[1].T)[..., : keywords["vocab_size"]]
    usable = ~temperature.isnan()[..., 0].expand(share.whole.labels.shape)
    scale, rounded = keywords.get("logits_scale", 1.0), products
    if keywords.get("logits_dtype") is not None:  # the gradient passes
        rounded = products + (products.to(keywords["logits_dtype"]).double() - products).detach()
    logits = logits_of_products(rounded, scale, keywords.get("softcap"))
    logits = (logits / temperature.nan_to_num(1.0)).masked_fill(~usable[..., None], torch.nan)
    factor = (scale / temperature).nan_to_num(0, 0, 0)
    uncapped = float((products.detach() * factor).abs().max()) if products.numel() else 0.0
    form = {name: keywords[name] for name in FORM if name in keywords}
    as_rounded = make_logits(hidden, weight[: keywords["vocab_size"]], **form)
    return Exact(leaves, products, logits, factor, usable, as_rounded, 8 * EPS * (1 + uncapped))


class Found(NamedTuple):
    """What the operations return, and leaves with gradients."""

    logits: Tensor  # [..., K]
    tail: Tensor  # of the ids behind the last offset
    support: Tensor
    dense: Tensor  # logprobs of `linear_cross_entropy`
    top: megatron_lce.TopK
    leaves: list[list[Tensor]]  # of the first and of the third


def check_ids(share: Share, findings: Findings, floors: Floors | None) -> None:
    """`linear_logits_at`, `support_logprobs` over the first of the same ids, and `linear_topk`; with `floors`, in the
    budgets of random calls."""
    labels, upstream, ids = share.labels, share.upstream, share.whole.keywords["candidates"]
    sets = {"ignore_index": share.whole.keywords.get("ignore_index", -100), "empty_rows": share.case.vocab_size is None}
    first = torch.arange(labels.numel(), device=ids.device).view(labels.shape) % (ids.shape[-1] + 1)
    of_sets = torch.arange(ids.shape[-1], device=ids.device) < first[..., None]  # of so many, none at times
    with surroundings(share.case):
        found = run(share, of_sets, sets)
    exact, random = exact_logits(share), floors is not None
    check = partial(check_gradients, share=share, exact=exact, random=random, findings=findings)

    def compare(name: str, value: Tensor, expected: Tensor, times: int, variances: Tensor) -> None:
        allowed = exact.allowed * times
        if not random and variances.numel():
            allowed = TIMES_EAGER_FP32 * usual_norm(variances.max())
        check_error(share, name, largest_error(value, expected.detach()), allowed, findings)

    behind = bool(found.tail.isnan().all())
    findings.check(title(share, "logits_at: ids behind the last offset are NaN"), behind)
    expected = exact.logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    compare("logits_at", found.logits, expected, 1, exact.rounded.variance)
    # Of rows without a temperature fp64 makes every gradient NaN, and the operation those of their ids.
    expected, finite = torch.where(exact.usable[..., None], expected, 0.0), bool(exact.usable.all())
    at_ids = upstream.candidate_logprobs.double().abs().where(ids >= 0, 0.0).flatten(0, -2)
    size = torch.zeros_like(exact.rounded.value).scatter_add_(1, ids.clamp(min=0).flatten(0, -2), at_ids)
    terms = Terms(size, torch.zeros_like(size), 4 * ROUNDING * size.square())
    check("logits_at", found.leaves[0], expected, upstream.candidate_logprobs, finite, terms, torch.float32)

    of_sets = ids.masked_fill(~of_sets, -1)
    expected, kept = set_logprobs(exact.logits, labels, of_sets, **sets), kept_ids(exact.logits, of_sets)
    kept = kept.flatten(0, -2)
    of_kept = exact.rounded._replace(value=exact.rounded.value.where(kept, FAR_BELOW))
    # Rows without ids have the bits of `linear_cross_entropy`, whose errors are held elsewhere. The bits of torch's
    # products depend on the number of rows.
    dense = (of_sets < 0).all(-1) & (labels != sets["ignore_index"]) & sets["empty_rows"]
    dense &= share.ranks.backend == "triton"
    same = torch.equal(found.support[dense].nan_to_num(7.0), found.dense[dense].nan_to_num(7.0))
    findings.check(title(share, "support_logprobs: rows without ids as linear_cross_entropy"), same)
    compare("support_logprobs", found.support[~dense], expected[~dense], 8, variances_of_logprobs(of_kept)[kept])
    right = ~expected.isnan()
    of_usable = set_logprobs(exact.logits.masked_fill(~exact.usable[..., None], 0.0), labels, of_sets, **sets)
    counted = (labels != sets["ignore_index"]).flatten()[:, None]
    terms = terms_of_cross_entropy(of_kept, labels.flatten(), Upstream(upstream.logprobs), None)
    terms = Terms(*(of.where(counted, 0.0) for of in terms if of is not None))
    dtype = torch.float32 if (of_sets >= 0).any(-1).all() else None  # rows without ids as in `linear_cross_entropy`
    check("support", found.leaves[1], of_usable.where(right, 0.0), upstream.logprobs, bool(right.all()), terms, dtype)

    of_logprobs = variances_of_logprobs(exact.rounded)
    top, usable, width = found.top, exact.usable, found.top.ids.shape[-1]
    lse = exact.logits.detach().logsumexp(-1)
    best, best_ids = (part[..., :width] for part in exact.logits.detach().sort(dim=-1, descending=True, stable=True))
    logprobs, chosen = best - lse[..., None], exact.logits.detach().gather(-1, top.ids.clamp(min=0))
    if random:
        compare("topk: logprobs", top.logprobs[usable].exp(), logprobs[usable].exp(), 8, of_logprobs)
        compare("topk: ids", chosen[usable], best[usable], 4, of_logprobs)
    findings.check(title(share, "topk: no ids of unusable rows"), bool((top.ids[~usable] == -1).all()))
    if not random:
        findings.check(title(share, "topk: the ids of a stable sort"), torch.equal(top.ids, best_ids))
        compare("topk: logprobs themselves", top.logprobs, logprobs, 2, of_logprobs)
        compare("topk: lse", top.lse, lse, 2, of_logprobs)
        compare("topk: mass", top.mass, logprobs.exp().sum(-1), 2, of_logprobs)
    check_same_bits_on_every_rank(share, [found.logits, found.support, *top], findings)


def run(share: Share, of_sets: Tensor, sets: dict[str, Any]) -> Found:
    """The operations with the case's layout and poison; each has leaves of its own, as `topk` has no gradient."""
    drawn, labels, ids, case = share.drawn, share.labels, share.whole.keywords["candidates"], share.case
    keywords = drawn({n: v for n, v in share.keywords.items() if n not in ("candidates", "ignore_index")})
    leaves = [[tensor.clone().requires_grad_() for tensor in share.heads] for _ in range(2)]
    behind = torch.arange(case.tail, dtype=torch.int64, device=ids.device) % case.shards[0]
    offsets = torch.arange(labels.numel() + 1, dtype=torch.int64, device=ids.device) * ids.shape[-1]
    at = (torch.cat([ids.reshape(-1), behind]), offsets) if case.tail else (ids,)
    logits = megatron_lce.linear_logits_at(*map(drawn, leaves[0]), *map(drawn, at), **keywords)
    upstream = share.whole.poisoned.candidate_logprobs
    if case.tail:
        of_tail = upstream.new_full((case.tail,), float(case.poison or 1))
        upstream = torch.cat([upstream.reshape(-1), of_tail])
    logits.backward(upstream)
    counts = of_sets.sum(-1).flatten()
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    given = map(drawn, (*leaves[1], labels, ids[of_sets], offsets))
    support = megatron_lce.support_logprobs(*given, **sets, **keywords)
    support.backward(share.whole.poisoned.logprobs)
    of_all = megatron_lce.linear_cross_entropy(
        *map(drawn, (*share.heads, labels)), ignore_index=sets["ignore_index"], **keywords
    )
    width = min(ids.shape[-1], keywords["vocab_size"] or len(share.whole.heads[0][1]))
    top = megatron_lce.linear_topk(*map(drawn, leaves[0]), width, **keywords)
    logits, tail = logits.detach().reshape(-1).split([ids.numel(), case.tail])
    return Found(logits.view(ids.shape), tail, support.detach(), of_all.logprobs, top, leaves)


def set_logprobs(logits: Tensor, labels: Tensor, ids: Tensor, ignore_index: int, empty_rows: bool) -> Tensor:
    """The labels' logprobs over each row's ids; over the whole vocabulary in rows without ids."""
    valid, kept = (labels >= 0) & (labels < logits.shape[-1]), kept_ids(logits, ids)
    empty, of_label = (ids < 0).all(-1, keepdim=True), torch.where(valid, labels, 0)[..., None]
    inside = valid[..., None] & kept.gather(-1, of_label) & (~empty | empty_rows)
    logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, of_label)
    return logprobs.masked_fill(~inside, torch.nan)[..., 0].masked_fill(labels == ignore_index, 0.0)


def kept_ids(logits: Tensor, ids: Tensor) -> Tensor:
    """[..., V]: each row's ids, or all where it has none."""
    padding = ids < 0
    kept = torch.zeros_like(logits.detach()).scatter_add_(-1, ids.clamp(min=0), (~padding).double()) > 0
    return kept | padding.all(-1, keepdim=True)


def check_gradients(
    name: str,
    found: list[Tensor],  # leaves
    value: Tensor,  # fp64, by which they have gradients
    upstream: Tensor,
    finite: bool,  # else rows without a result make some gradients NaN
    terms: Terms,
    dtype: torch.dtype | None,  # as in `roundings_of_gradients`
    *,
    share: Share,
    exact: Exact,
    random: bool,
    findings: Findings,
) -> None:
    of_products, *grads = torch.autograd.grad(
        value, (exact.products, *exact.leaves), upstream.double(), retain_graph=True
    )
    parts = list(zip(("grad_hidden", "grad_weight"), found, grads, (share.rows, share.columns), strict=True))
    hidden, weight = (leaf.detach() for leaf in exact.leaves)
    of_all = pad(of_products, (0, len(weight) - of_products.shape[-1]))
    whole = slice(0, len(weight))
    # A GPU fuses a product with the difference behind it, and p of one id is 1 but for a rounding.
    ways: dict[str, Any] = {"columns": whole, "cancels": False}
    variances = roundings_of_gradients(of_all, terms, exact.rounded, *share.whole.heads[0], dtype, **ways)
    most = []
    for (what, leaf, grad, part), variance in zip(parts, variances, strict=True):
        most.append(times_eager(leaf.dtype) * usual_norm(variance[part]) / norm(grad[part]))
        if what == "grad_hidden" and "shards" in share.parts:
            of_ranks = [(of_all[..., rows] @ weight[rows])[part] for rows in share.shards]
            most[0] = math.hypot(most[0], error_of_sum(of_ranks, leaf.dtype))
        if not random:
            check_error(share, f"{name}: {what}", relative_error(leaf.grad, grad[part]), most[-1], findings)
    if not random:
        return
    # Each rank rounds its part of hidden's gradient, which may cancel another's.
    of_rank = of_products[..., share.columns] @ weight[: of_products.shape[-1]][share.columns]
    rounded = of_rank.nan_to_num().norm()[None]
    dist.all_reduce(rounded, group=share.ranks.group)
    own_eps = torch.finfo(found[0].dtype).eps
    # A logit's derivative is 1; of a label's logprob those of all logits of its set add up to 2 at most.
    slopes = upstream if name == "logits_at" else 2 * upstream[..., None]
    slopes = float((slopes.double() * exact.factor).abs().sum())
    norms = float(rounded), float(grads[1].nan_to_num().norm())
    for (what, leaf, grad, part), other, of_whole, least in zip(parts, (weight, hidden), norms, most, strict=True):
        row = float(other.norm(dim=-1).max()) if other.numel() else 0.0
        step = torch.finfo(leaf.dtype).smallest_normal * own_eps  # of subnormal numbers
        allowed = 2 * own_eps * of_whole + (exact.allowed + 8 * EPS) * slopes * row + step * grad.numel() ** 0.5
        allowed = max(allowed, least * norm(grad[part]))
        difference = leaf.grad.double() - grad[part].nan_to_num()
        error = difference.masked_fill(leaf.grad.isnan() & (not finite), 0.0).norm()
        check_error(share, f"{name}: {what}", float(error), allowed, findings)

"""One drawn call of the operations on some ids of the vocabulary, against materialised logits."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fuzz_cases import DEFAULT_DTYPES, Case, Tensors, as_drawn
from fuzz_setting import Findings, Setting, Share, check_same_bits_on_every_rank, default_dtype, tensors_drawn
from torch import Tensor

import megatron_lce
from tests.jsd_oracle import logits_of_products
from tests.oracle import largest_error


class Exact(NamedTuple):
    """Logits of the whole vocabulary in fp64, and what they are made of."""

    leaves: tuple[Tensor, Tensor]  # hidden and weight
    products: Tensor  # [..., V]
    logits: Tensor  # [..., V], NaN in rows without a usable temperature
    factor: Tensor  # from products to logits, but for the softcap
    usable: Tensor  # [...] bool
    allowed: float  # error of an fp32 logit


def exact_logits(hidden: Tensor, weight: Tensor, shape: torch.Size, keywords: dict[str, Any]) -> Exact:
    leaves = tuple(tensor.double().requires_grad_() for tensor in (hidden, weight))
    temperature = torch.as_tensor(keywords["temperature"], dtype=torch.float64, device=hidden.device)
    temperature = torch.where((temperature > 0) & temperature.isfinite(), temperature, torch.nan)[..., None]
    products = (leaves[0] @ leaves[1].T)[..., : keywords["vocab_size"]]
    usable = ~temperature.isnan()[..., 0].expand(shape)
    logits = logits_of_products(products, keywords["logits_scale"], keywords.get("softcap"))
    logits = (logits / temperature.nan_to_num(1.0)).masked_fill(~usable[..., None], torch.nan)
    factor = (keywords["logits_scale"] / temperature).nan_to_num(0, 0, 0)
    largest = float((products.detach() * factor).abs().max()) if products.numel() else 0.0
    return Exact(leaves, products, logits, factor, usable, 8 * torch.finfo(torch.float32).eps * (1 + largest))


def check_ids(case: Case, tensors: Tensors, share: Share, setting: Setting, findings: Findings) -> None:
    """`linear_logits_at`, `support_logprobs` over the same ids, and `linear_topk`, against materialised logits."""
    ((hidden, weight),), labels, ids = tensors.heads, tensors.labels, tensors.keywords["candidates"]
    keywords = {name: value for name, value in share.keywords.items() if name not in ("candidates", "ignore_index")}
    sets = {"ignore_index": tensors.keywords["ignore_index"], "empty_rows": case.padding == 0}
    heads = [[x.clone().requires_grad_() for x in (hidden[share.rows], weight[share.columns])] for _ in range(2)]
    with default_dtype(DEFAULT_DTYPES[case.default_dtype]):
        found = run(case, tensors, heads, tensors_drawn(keywords, partial(as_drawn, case)), sets)
    exact = exact_logits(hidden, weight, labels.shape, keywords)
    check = partial(check_gradients, share=share, setting=setting, exact=exact, findings=findings)

    def compare(name: str, value: Tensor, expected: Tensor, allowed: float) -> None:
        error = largest_error(value, expected.detach())
        findings.require(error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.1e}")

    findings.require(bool(found.tail.isnan().all()), "logits_at: ids behind the last offset are not NaN")
    expected = exact.logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    compare("logits_at", found.logits, expected, exact.allowed)
    # Of rows without a temperature fp64 makes every gradient NaN, and the operation those of their ids.
    expected, finite = torch.where(exact.usable[..., None], expected, 0.0), bool(exact.usable.all())
    check("logits_at", heads[0], expected, tensors.upstream["candidate_logprobs"], finite)

    expected = set_logprobs(exact.logits, labels, ids, **sets)
    compare("support_logprobs", found.support, expected, 8 * exact.allowed)
    right = ~expected.isnan()
    of_usable = set_logprobs(exact.logits.masked_fill(~exact.usable[..., None], 0.0), labels, ids, **sets)
    check("support", heads[1], of_usable.where(right, 0.0), tensors.upstream["logprobs"], bool(right.all()))

    width, top = ids.shape[-1], found.top
    best = exact.logits.detach().sort(-1, descending=True).values[..., :width]
    logprobs = best - exact.logits.detach().logsumexp(-1, keepdim=True)
    logprobs = torch.nn.functional.pad(logprobs, (0, width - best.shape[-1]), value=-torch.inf)
    compare("topk: logprobs", top.logprobs[exact.usable].exp(), logprobs[exact.usable].exp(), 8 * exact.allowed)
    chosen = exact.logits.gather(-1, top.ids[..., : best.shape[-1]].clamp(min=0))
    compare("topk: ids", chosen[exact.usable].detach(), best[exact.usable], 4 * exact.allowed)
    findings.require(bool((top.ids[~exact.usable] == -1).all()), "topk: ids of unusable rows")
    check_same_bits_on_every_rank([found.logits, found.support, *top], setting, findings)


class Found(NamedTuple):
    """What the operations return; gradients are in their leaves."""

    logits: Tensor  # [..., K]
    tail: Tensor  # of the ids behind the last offset
    support: Tensor
    top: megatron_lce.TopK


def run(
    case: Case, tensors: Tensors, heads: list[list[Tensor]], keywords: dict[str, Any], sets: dict[str, Any]
) -> Found:
    """The operations with the case's layout and poison; each has leaves of its own, as `topk` has no gradient."""
    drawn, ids, labels = partial(as_drawn, case), tensors.keywords["candidates"], tensors.labels
    behind = torch.arange(case.tail, dtype=torch.int64, device=ids.device) % case.shards[0]
    flat, size = torch.cat([ids.reshape(-1), behind]), ids.numel()
    offsets = torch.arange(labels.numel() + 1, dtype=torch.int64, device=ids.device) * ids.shape[-1]
    at = (flat, offsets) if case.tail else (ids,)
    logits = megatron_lce.linear_logits_at(*map(drawn, heads[0]), *map(drawn, at), **keywords)
    upstream = tensors.poisoned["candidate_logprobs"]
    if case.tail:
        of_tail = upstream.new_full((case.tail,), float(case.poison or 1))
        upstream = torch.cat([upstream.reshape(-1), of_tail])
    logits.backward(upstream)
    given = map(drawn, (*heads[1], labels, flat, offsets))
    support = megatron_lce.support_logprobs(*given, **sets, **keywords)
    support.backward(tensors.poisoned["logprobs"])
    top = megatron_lce.linear_topk(*map(drawn, heads[0]), ids.shape[-1], **keywords)
    logits, tail = logits.detach().reshape(-1).split([size, case.tail])
    return Found(logits.view(ids.shape), tail, support.detach(), top)


def set_logprobs(logits: Tensor, labels: Tensor, ids: Tensor, ignore_index: int, empty_rows: bool) -> Tensor:
    """The labels' logprobs over each row's ids; over the whole vocabulary in rows without ids."""
    padding, valid = ids < 0, (labels >= 0) & (labels < logits.shape[-1])
    kept = torch.zeros_like(logits.detach()).scatter_add_(-1, ids.clamp(min=0), (~padding).double()) > 0
    empty, of_label = padding.all(-1, keepdim=True), torch.where(valid, labels, 0)[..., None]
    inside = valid[..., None] & (kept | empty).gather(-1, of_label) & (~empty | empty_rows)
    logprobs = logits.masked_fill(~(kept | empty), -torch.inf).log_softmax(-1).gather(-1, of_label)
    return logprobs.masked_fill(~inside, torch.nan)[..., 0].masked_fill(labels == ignore_index, 0.0)


def check_gradients(
    name: str,
    found: list[Tensor],  # leaves
    value: Tensor,  # fp64, by which they have gradients
    upstream: Tensor,
    finite: bool,  # else rows without a result make some gradients NaN
    *,
    share: Share,
    setting: Setting,
    exact: Exact,
    findings: Findings,
) -> None:
    grads = torch.autograd.grad(value, (exact.products, *exact.leaves), upstream.double(), retain_graph=True)
    hidden, weight = (leaf.detach() for leaf in exact.leaves)
    # Each rank rounds its part of hidden's gradient, which may cancel another's.
    part_of_rank = grads[0][..., share.columns] @ weight[: grads[0].shape[-1]][share.columns]
    rounded = part_of_rank.nan_to_num().norm()[None]
    dist.all_reduce(rounded, group=setting.group)
    eps, own_eps = torch.finfo(torch.float32).eps, torch.finfo(found[0].dtype).eps
    # A logit's derivative is 1; of a label's logprob those of all logits of its set add up to 2 at most.
    slopes = upstream if name == "logits_at" else 2 * upstream[..., None]
    slopes = float((slopes.double() * exact.factor).abs().sum())
    norms = float(rounded), float(grads[2].nan_to_num().norm())
    of_leaves = zip(("grad_hidden", "grad_weight"), found, grads[1:], (share.rows, share.columns), strict=True)
    for (what, leaf, grad, part), other, norm in zip(of_leaves, (weight, hidden), norms, strict=True):
        row = float(other.norm(dim=-1).max()) if other.numel() else 0.0
        step = torch.finfo(leaf.dtype).smallest_normal * own_eps  # of subnormal numbers
        most = 2 * own_eps * norm + (exact.allowed + 8 * eps) * slopes * row + step * grad.numel() ** 0.5
        difference = leaf.grad.double() - grad[part].nan_to_num()
        error = difference.masked_fill(leaf.grad.isnan() & (not finite), 0.0).norm()
        findings.require(float(error) <= most, f"{name}: {what}: error {float(error):.2e}, allowed {most:.1e}")

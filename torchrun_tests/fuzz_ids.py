"""One drawn call of the operations on some ids of the vocabulary, against materialised logits."""

from functools import partial

import torch
import torch.distributed as dist
from fuzz_cases import DEFAULT_DTYPES, Case, Tensors, as_drawn
from fuzz_setting import Findings, Setting, Share, check_same_bits_on_every_rank, default_dtype, tensors_drawn
from torch import Tensor

import megatron_lce
from tests.jsd_oracle import logits_of_products
from tests.oracle import largest_error


def check_ids(case: Case, tensors: Tensors, share: Share, setting: Setting, findings: Findings) -> None:
    """`linear_logits_at`, `support_logprobs` over the same ids, and `linear_topk`, against materialised logits."""
    ((hidden, weight),), labels, ids = tensors.heads, tensors.labels, tensors.keywords["candidates"]
    ignored, upstream = labels == tensors.keywords["ignore_index"], tensors.upstream["candidate_logprobs"]
    keywords = {name: value for name, value in share.keywords.items() if name not in ("candidates", "ignore_index")}
    own = [tensor.clone().requires_grad_() for tensor in (hidden[share.rows], weight[share.columns])]
    drawn, width = partial(as_drawn, case), ids.shape[-1]
    offsets = torch.arange(labels.numel() + 1, dtype=torch.int64, device=labels.device) * width
    sets = {"ignore_index": tensors.keywords["ignore_index"], "empty_rows": case.padding == 0}
    with default_dtype(DEFAULT_DTYPES[case.default_dtype]):
        heads = list(map(drawn, own))
        others = tensors_drawn(keywords, drawn)
        logits = megatron_lce.linear_logits_at(*heads, drawn(ids), **others)
        logits.backward(upstream)
        support = megatron_lce.support_logprobs(
            *heads, drawn(labels), drawn(ids.reshape(-1)), drawn(offsets), **sets, **others
        ).detach()
        top = megatron_lce.linear_topk(*heads, width, **others)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    temperature = torch.as_tensor(keywords["temperature"], dtype=torch.float64, device=labels.device)
    temperature = torch.where((temperature > 0) & temperature.isfinite(), temperature, torch.nan)[..., None]
    products = (leaves[0] @ leaves[1].T)[..., : keywords["vocab_size"]]
    exact = logits_of_products(products, keywords["logits_scale"], keywords.get("softcap"))
    usable, exact = ~temperature.isnan()[..., 0].expand(labels.shape), exact / temperature.nan_to_num(1.0)
    exact = exact.masked_fill(~usable[..., None], torch.nan)
    size, padding = exact.shape[-1], ids < 0
    at = exact.gather(-1, ids.clamp(min=0)).masked_fill(padding, 0.0)
    # Of rows without a temperature fp64 makes every gradient NaN, and the operation those of their ids.
    products.retain_grad()
    torch.where(usable[..., None], at, 0.0).backward(upstream.double())
    # Each rank rounds its part of hidden's gradient, which may cancel another's.
    part_of_rank = products.grad[..., share.columns] @ leaves[1].detach()[: products.shape[-1]][share.columns]
    rounded = part_of_rank.nan_to_num().norm()[None]
    dist.all_reduce(rounded, group=setting.group)
    eps, own_eps, exact = torch.finfo(torch.float32).eps, torch.finfo(hidden.dtype).eps, exact.detach()
    factor = (keywords["logits_scale"] / temperature).nan_to_num(0, 0, 0)
    largest = float((products.detach() * factor).abs().max()) if ids.numel() else 0.0
    allowed = 8 * eps * (1 + largest)

    def compare(name: str, value: Tensor, expected: Tensor, most: float) -> None:
        error = largest_error(value.detach(), expected)
        findings.require(error <= most, f"{name}: error {error:.2e}, allowed {most:.1e}")

    compare("logits_at", logits, at.detach(), allowed)
    for name, found, leaf, part, other, norm in (
        ("grad_hidden", own[0].grad, leaves[0].grad, share.rows, leaves[1], float(rounded)),
        (
            "grad_weight",
            own[1].grad,
            leaves[1].grad,
            share.columns,
            leaves[0],
            float(leaves[1].grad.nan_to_num().norm()),
        ),
    ):
        row = float(other.detach().norm(dim=-1).max()) if other.numel() else 0.0
        terms = float((upstream.double().abs() * factor.abs()).sum()) * row
        step = torch.finfo(hidden.dtype).smallest_normal * own_eps  # of subnormal numbers
        most = 2 * own_eps * norm + (allowed + 8 * eps) * terms + step * leaf.numel() ** 0.5
        wrong = found.isnan() & bool(usable.all())
        error = (found.double() - leaf[part].nan_to_num()).masked_fill(found.isnan() & ~wrong, 0.0).norm()
        findings.require(float(error) <= most, f"{name}: error {float(error):.2e}, allowed {most:.1e}")
    kept = torch.zeros_like(exact).scatter_add_(-1, ids.clamp(min=0), (~padding).double()) > 0
    empty = padding.all(-1, keepdim=True)
    valid = (labels >= 0) & (labels < size)
    of_label = torch.where(valid, labels, 0)[..., None]
    inside = valid[..., None] & (kept | empty).gather(-1, of_label) & (~empty | sets["empty_rows"])
    expected = exact.masked_fill(~(kept | empty), -torch.inf).log_softmax(-1).gather(-1, of_label)
    expected = expected.masked_fill(~inside, torch.nan)[..., 0].masked_fill(ignored, 0.0)
    compare("support_logprobs", support, expected, 8 * allowed)
    best = exact.sort(-1, descending=True).values[..., :width]
    lse = exact.logsumexp(-1, keepdim=True)
    logprobs = torch.nn.functional.pad(best - lse, (0, width - best.shape[-1]), value=-torch.inf)
    compare("topk: logprobs", top.logprobs[usable].exp(), logprobs[usable].exp(), 8 * allowed)
    chosen = exact.gather(-1, top.ids[..., : best.shape[-1]].clamp(min=0))
    compare("topk: ids", chosen[usable], best[usable], 4 * allowed)
    findings.require(bool((top.ids[~usable] == -1).all()), "topk: ids of unusable rows")
    check_same_bits_on_every_rank([logits.detach(), support, *top], setting, findings)

"""The primitives in plain torch, one slab of vocabulary at a time: for CPUs and devices Triton does not know."""

import torch
from torch import Tensor

from megatron_lce.core.blocks import BlockBytes, cut, plan_blocks
from megatron_lce.core.products import copied_row_bytes, product
from megatron_lce.core.rows import finish, prepare_rows, row_terms
from megatron_lce.core.softmax_stats import empty_stats, merge_stats, packed_rows, unpack

__all__ = [
    "cache_columns",
    "finish",
    "grad_logits",
    "grad_logits_bytes",
    "merge_stats",
    "prepare_rows",
    "row_terms",
    "softmax_stats",
    "softmax_stats_bytes",
]


def cache_columns(num_tokens: int, num_columns: int, hidden: Tensor, logits_cache_bytes: int) -> int:
    """Nothing is kept: where this backend runs, a cache is not what saves time."""
    return 0


def grad_logits_bytes(hidden: Tensor, weight: Tensor) -> BlockBytes:
    """What `grad_logits` takes for its intermediates, its output, and fp32 copies of its inputs."""
    per_token = max(upcast_row_bytes(hidden), copied_row_bytes(hidden))
    per_column = max(upcast_row_bytes(weight), copied_row_bytes(weight))
    return BlockBytes(3 * 4 + hidden.element_size(), per_token, per_column)


def softmax_stats_bytes(hidden: Tensor, weight: Tensor, entropy: bool, telemetry: bool) -> BlockBytes:
    """What `softmax_stats` takes for a slab of logits, their exponentials, and fp32 copies of its inputs."""
    return BlockBytes(2 * 4, upcast_row_bytes(hidden), upcast_row_bytes(weight))


def softmax_stats(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [N] int32 ids into weight's rows; -1: owned by nobody here
    row_scale: Tensor,  # [N] fp32, see `logits_base2`
    *,
    softcap_scale: float | None,
    entropy: bool,
    telemetry: bool,
    vocab_start: int,
    workspace_bytes: int,
    cache: None = None,
) -> Tensor:
    """Packed softmax statistics [K, N] of V columns, see `megatron_lce.core.softmax_stats`."""
    num_tokens, num_columns = hidden.shape[0], weight.shape[0]
    blocks = plan_blocks(
        num_tokens,
        num_columns,
        workspace_bytes,
        softmax_stats_bytes(hidden, weight, entropy, telemetry),
        preferred_columns=4096,
    )
    packed = hidden.new_empty(packed_rows(entropy, telemetry), num_tokens, dtype=torch.float32)
    for tokens in cut(num_tokens, blocks.tokens):
        merged = empty_stats(tokens.stop - tokens.start, entropy, telemetry, hidden.device)
        for columns in cut(num_columns, blocks.columns):
            logits = logits_base2(hidden[tokens], weight[columns], row_scale[tokens], softcap_scale)
            slab = _slab_stats(logits, labels[tokens] - columns.start, entropy, telemetry, vocab_start + columns.start)
            merged = merge_stats(torch.stack([merged, slab]), entropy, telemetry)
        packed[:, tokens] = merged
    return packed


def grad_logits(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [C, H], the slab
    labels: Tensor,  # [N] int32 ids; the slab's rows are first_column and up
    row_scale: Tensor,  # [N] fp32
    row_terms: Tensor,  # [5, N] fp32, see `megatron_lce.core.rows.row_terms`
    out: Tensor,  # [N, C] of hidden's dtype
    *,
    first_column: int,
    softcap_scale: float | None,
    entropy: bool,
) -> None:
    """Gradient of one slab of the products `hidden @ weight.T`."""
    lse, p_term, entropy_term, label_term, _ = row_terms.unbind()
    logits = logits_base2(hidden, weight, row_scale, softcap_scale)
    tanh_squared = (logits / row_scale[:, None]).square_() if softcap_scale is not None else None
    log_p = logits.sub_(lse[:, None])
    grad = log_p.exp2()
    if entropy:
        grad.mul_(log_p.mul_(-entropy_term[:, None]).add_(p_term[:, None]))
    else:
        grad.mul_(p_term[:, None])
    labels = labels - first_column
    in_slab = (labels >= 0) & (labels < weight.shape[0])
    column = torch.where(in_slab, labels, 0).long()[:, None]
    grad.scatter_(1, column, grad.gather(1, column) + torch.where(in_slab, label_term, 0.0)[:, None])
    if tanh_squared is not None:
        grad.mul_(tanh_squared.neg_().add_(1.0))
    out.copy_(grad)


def logits_base2(hidden: Tensor, weight: Tensor, row_scale: Tensor, softcap_scale: float | None) -> Tensor:
    """`row_scale * hidden @ weight.T`, or `row_scale * tanh(softcap_scale * hidden @ weight.T)`: [N, C] in fp32."""
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    # Sums of sums in fp32: one running sum over a long H would lose what full fp32 products are asked for.
    for part in cut(hidden.shape[1], 256 if hidden.dtype == torch.float32 else hidden.shape[1]):
        product(hidden[:, part], weight[:, part].T, logits, accumulate=part.start > 0)
    if softcap_scale is not None:
        logits.mul_(softcap_scale).tanh_()
    return logits.mul_(row_scale[:, None])


def upcast_row_bytes(matrix: Tensor) -> int:
    """Bytes of a row's fp32 copy, where products need one."""
    return 4 * matrix.shape[1] if matrix.device.type == "cpu" and matrix.dtype != torch.float32 else 0


def _slab_stats(logits: Tensor, labels: Tensor, entropy: bool, telemetry: bool, first_id: int) -> Tensor:
    """Packed statistics of one slab of logits [N, C], which is overwritten."""
    packed = empty_stats(logits.shape[0], entropy, telemetry, logits.device)
    stats = unpack(packed, entropy, telemetry)
    in_slab = (labels >= 0) & (labels < logits.shape[1])
    label_logit = logits.gather(1, torch.where(in_slab, labels, 0).long()[:, None])[:, 0]
    stats.label_logit.copy_(torch.where(in_slab, label_logit, -torch.inf))
    max_logit, argmax = logits.max(dim=1)
    stats.max_logit.copy_(max_logit)
    if stats.min_logit is not None and stats.argmax is not None:
        stats.min_logit.copy_(logits.amin(dim=1))
        stats.argmax.copy_(argmax + first_id)
    shifted = logits.sub_(max_logit[:, None])
    exp = shifted.exp2()
    stats.sum_exp.copy_(exp.sum(dim=1))
    if stats.sum_exp_logit is not None:
        stats.sum_exp_logit.copy_(exp.mul_(shifted).sum(dim=1))
    return packed

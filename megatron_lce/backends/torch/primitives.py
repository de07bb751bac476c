"""`Backend` in plain torch, for CPUs and any other device."""

import torch
from torch import Tensor

from megatron_lce.backends.torch import divergence
from megatron_lce.backends.torch.divergence import (
    divergence_grad_logits,
    divergence_softmaxes,
    divergence_sums,
)
from megatron_lce.backends.torch.row_values import prepare_rows, row_terms, write_outputs
from megatron_lce.core.lm_head import LOWEST_LOG_P, ExpCache, LMHead, RowInputs, RowTerms
from megatron_lce.core.matmul import copies_to_fp32, matmul
from megatron_lce.core.options import Options, Shard, Telemetry
from megatron_lce.core.plan import ScratchBytes, slices
from megatron_lce.core.statistics import (
    CHUNK_COLUMNS,
    FIXED_POINT_UNIT,
    LOWEST_LOGIT,
    merge_extremes,
    row_counts,
    unpack_extremes,
)

_ROWS = 1024  # rows that `scale_rows` holds in fp32 at a time


def scratch_bytes(hidden: Tensor, weight: Tensor, telemetry: Telemetry) -> ScratchBytes:
    # Without a cache, which would save little where this backend runs.
    hidden_row, weight_row = upcast_row_bytes(hidden, weight.dtype), upcast_row_bytes(weight, weight.dtype)
    matrices = 3 + (telemetry is True)  # logits of a chunk, exponentials, temporaries
    return ScratchBytes(
        CHUNK_COLUMNS,
        slab_per_logit=3 * 4,
        stats_per_token=4 * matrices * CHUNK_COLUMNS + hidden_row,
        stats_per_column=weight_row,
        slab_per_token=hidden_row,
        slab_per_column=weight_row,
        divergence_columns=divergence.CHUNK_COLUMNS,
    )


def softmax_stats(
    head: LMHead,
    rows: RowInputs,
    options: Options,
    *,
    vocab_start: int,
    cache: ExpCache | None = None,
    max_copied_columns: int | None = None,
) -> Tensor:
    # One product per chunk: for another width, a library may sum in another order.
    hidden, weight = head.hidden, head.weight
    chunks = list(slices(weight.shape[0], CHUNK_COLUMNS))
    entropy, telemetry = options.entropy, options.telemetry
    *_, num_rows = row_counts(entropy, telemetry)
    stats = hidden.new_empty(len(chunks), num_rows, hidden.shape[0], dtype=torch.float32)
    if upcast_row_bytes(hidden, weight.dtype):
        hidden = hidden.float()
    for out, columns in zip(stats, chunks, strict=True):
        logits = logits_base2(head._replace(hidden=hidden, weight=weight[columns]), rows.scale)
        out.copy_(chunk_stats(logits, rows.labels - columns.start, vocab_start + columns.start, entropy, telemetry))
    return stats


def chunk_stats_of_logits(raw_logits: Tensor, row_scale: Tensor) -> Tensor:
    num_tokens, num_columns = raw_logits.shape
    nowhere = torch.full((num_tokens,), -1, dtype=torch.int32, device=raw_logits.device)
    stats = [
        chunk_stats(raw_logits[:, columns] * row_scale[:, None], nowhere, 0, False, False)
        for columns in slices(num_columns, CHUNK_COLUMNS)
    ]
    return torch.stack(stats) if stats else raw_logits.new_empty(0, 3, num_tokens)


def merge_chunks(
    stats: Tensor, all_extremes: Tensor, num_columns: int, entropy: bool, telemetry: Telemetry
) -> tuple[Tensor, Tensor]:
    # Chunk by chunk: torch may round an exponential differently depending on its place in a longer tensor.
    packed_extremes = merge_extremes(all_extremes, telemetry)
    extremes = unpack_extremes(packed_extremes, telemetry)
    num_extremes, num_sums, _ = row_counts(entropy, telemetry)
    sums = torch.zeros(num_sums, stats.shape[2], dtype=torch.int64, device=stats.device)
    max_abs_logit = None
    if extremes.min_logit is not None:
        max_abs_logit = torch.maximum(extremes.max_logit.abs(), extremes.min_logit.abs())
        max_abs_logit = torch.where(max_abs_logit > 0, max_abs_logit, 1.0)
        sums[-1] = num_columns
    for chunk in stats:
        sum_exp, *others = chunk[num_extremes:]
        shift = chunk[0] - extremes.max_logit
        factor = shift.exp2()
        terms = [factor * sum_exp]
        if entropy:
            terms.append(torch.where(factor > 0, factor * (others.pop(0) + sum_exp * shift), 0.0))
        if max_abs_logit is not None:
            terms.append(others.pop(0) / max_abs_logit)
        if telemetry is True:
            sum_exp_squared, sum_logit_squared = others
            terms += [factor * factor * sum_exp_squared, sum_logit_squared / max_abs_logit / max_abs_logit]
        for total, term in zip(sums, terms, strict=False):
            total += (term / FIXED_POINT_UNIT).long()
    return packed_extremes, sums


def grad_logits(
    head: LMHead, rows: RowInputs, terms: Tensor, out: Tensor, *, slab_start: int, entropy: bool, shift: Tensor | None
) -> None:
    assert shift is None  # `scratch_bytes` allows no cache
    each = RowTerms(*terms[:, :, None])
    logits = logits_base2(head, rows.scale)
    tanh_squared = (logits / rows.scale[:, None]).square_() if head.softcap is not None else None
    log_p = logits.sub_(each.max_logit).sub_(each.log_sum)
    grad = log_p.exp2()
    if entropy:
        grad.mul_(log_p.clamp_(min=LOWEST_LOG_P).mul_(-each.entropy_term).add_(each.p_term))
    else:
        grad.mul_(each.p_term)
    labels = rows.labels - slab_start
    has_label = (labels >= 0) & (labels < out.shape[1])
    column = torch.where(has_label, labels, 0).long()[:, None]
    grad.scatter_(1, column, grad.gather(1, column) + torch.where(has_label[:, None], each.label_term, 0.0))
    if each.mean_term is not None:
        grad.add_(each.mean_term)
    if tanh_squared is not None:
        grad.mul_(tanh_squared.neg_().add_(1.0))
    out.copy_(grad)


def logits_base2(head: LMHead, row_scale: Tensor) -> Tensor:
    """Return `row_scale * x` or `row_scale * tanh(softcap_scale * x)`, x = hidden @ weight.T: [N, C] fp32."""
    hidden, weight = head.hidden, head.weight
    if weight.dtype == torch.float32:
        hidden = hidden.float()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    # fp32 inputs: sums over 256 of H are added up, because one running sum over a long H loses digits.
    for part in slices(hidden.shape[1], 256 if weight.dtype == torch.float32 else hidden.shape[1]):
        for columns in slices(weight.shape[0], CHUNK_COLUMNS):  # as in the statistics, so that both have the same bits
            matmul(hidden[:, part], weight[columns, part].T, logits[:, columns], accumulate=part.start > 0)
    if head.logits_dtype is not None:
        logits.copy_(logits.to(head.logits_dtype))
    if head.softcap_scale is not None:
        logits.mul_(head.softcap_scale).tanh_()
    return logits.mul_(row_scale[:, None])


def upcast_row_bytes(matrix: Tensor, weight: torch.dtype) -> int:
    """Return the bytes of an fp32 copy of a row, as products of 16-bit inputs need on CPUs or with an fp32 weight."""
    copied = copies_to_fp32(matrix) or (weight == torch.float32 and matrix.dtype != torch.float32)
    return 4 * matrix.shape[1] if copied else 0


def chunk_stats(logits: Tensor, labels: Tensor, first_id: int, entropy: bool, telemetry: Telemetry) -> Tensor:
    """Return statistics [K, N] of one chunk of base-2 logits [N, C], whose first column has this id."""
    has_label = (labels >= 0) & (labels < logits.shape[1])
    label_logit = logits.gather(1, torch.where(has_label, labels, 0).long()[:, None])[:, 0]
    max_logit, argmax = logits.max(dim=1)
    max_logit.clamp_(min=LOWEST_LOGIT)  # a chunk may be -inf throughout
    shifted = logits.sub(max_logit[:, None])
    exp = shifted.exp2()
    sum_exp = exp.sum(dim=1)
    max_logit = torch.where(sum_exp.isnan(), sum_exp, max_logit)
    stats = [max_logit, torch.where(has_label, label_logit, -torch.inf)]
    sum_logit = [logits.sum(dim=1)] if telemetry else []
    squares = [exp.square().sum(dim=1), logits.square().sum(dim=1)] if telemetry is True else []
    if telemetry is True:
        stats += [logits.amin(dim=1), (argmax + first_id).int().view(torch.float32)]
    else:
        stats += [-total.abs() for total in sum_logit]
    stats.append(sum_exp)
    if entropy:
        stats.append(exp.mul_(shifted.clamp_(min=LOWEST_LOGIT)).sum(dim=1))  # 0 times -inf must be 0
    return torch.stack(stats + sum_logit + squares)


def scale_rows(matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
    for rows in slices(matrix.shape[0], _ROWS):
        scaled = matrix[rows].float() * factor
        out[rows].copy_(scaled.add_(out[rows]) if accumulate else scaled)


def indexed_logits(
    head: LMHead, token_index: Tensor, ids: Tensor, rows: RowInputs, shard: Shard, workspace_bytes: int
) -> Tensor:
    hidden, weight = head.hidden, head.weight
    logits_and_owners = hidden.new_empty(2, ids.shape[0], dtype=torch.float32)
    logits, cap = logits_and_owners[0], head.softcap_scale
    local, elsewhere = _local(ids, shard)
    bytes_of_one = hidden.shape[1] * (2 * hidden.element_size() + 3 * 4)  # both rows, in fp32 too, and their product
    for part in slices(ids.shape[0], max(1, workspace_bytes // bytes_of_one)):
        of_weight = weight.index_select(0, local[part]).float()
        torch.sum(of_weight.mul_(hidden.index_select(0, token_index[part])), dim=1, out=logits[part])
    if head.logits_dtype is not None:
        logits.copy_(logits.to(head.logits_dtype))
    if cap is not None:
        logits.mul_(cap).tanh_()
    # -0.0 is 0.0, as after a sum over ranks.
    logits.mul_(rows.scale[token_index]).add_(0.0).masked_fill_(elsewhere, 0.0)
    logits_and_owners[1] = ~elsewhere | (ids < 0)
    return logits_and_owners


def _local(ids: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return rows of the shard, and a mask of ids that are padding or not in the shard."""
    local = ids - shard.start
    clamped = local.clamp(0, max(shard.num_columns - 1, 0))
    return clamped, (clamped != local) | (shard.num_columns == 0)


def bag_sums(
    matrix: Tensor,
    indices: Tensor,
    factors: Tensor,
    offsets: Tensor,
    out: Tensor,
    shard: Shard | None = None,
    *,
    accumulate: bool,
    workspace_bytes: int,
) -> None:
    bytes_of_column = indices.shape[0] * (matrix.element_size() + 2 * 4) + 2 * 4 * out.shape[0]
    zero_mask = factors == 0
    if shard is not None:
        indices, elsewhere = _local(indices, shard)
        zero_mask |= elsewhere
    for columns in slices(out.shape[1], max(1, workspace_bytes // max(bytes_of_column, 1))):
        terms = matrix[:, columns].index_select(0, indices).float().mul_(factors[:, None])
        terms.masked_fill_(zero_mask[:, None], 0.0)
        sums = torch.segment_reduce(terms, "sum", offsets=offsets, unsafe=True)
        out[:, columns] = out[:, columns].float() + sums if accumulate else sums


def write_columns(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    # Columns outside the matrix are redirected to one column of the row, to which they write the same value.
    col_mask = (columns >= 0) & (columns < matrix.shape[1])
    one = col_mask.to(torch.uint8).argmax(dim=1, keepdim=True)
    any_inside = col_mask.gather(1, one)
    column = torch.where(any_inside, columns.gather(1, one), 0)
    value = torch.where(any_inside, values.gather(1, one).to(matrix.dtype), matrix.gather(1, column))
    matrix.scatter_(1, torch.where(col_mask, columns, column), torch.where(col_mask, values.to(matrix.dtype), value))

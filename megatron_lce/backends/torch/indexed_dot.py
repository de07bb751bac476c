"""Products of hidden states with single rows of the weight, and their gradients, in torch."""

import torch
from torch import Tensor

from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.options import Shard
from megatron_lce.core.plan import slices


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

"""Products of hidden states with single rows of the weight, and their gradients, in torch; arguments: see `Backend`."""

import torch
from torch import Tensor

from megatron_lce.core.options import Options, Shard
from megatron_lce.core.plan import cut
from megatron_lce.core.rows import Rows, softcap_scale


def gathered_logits(
    hidden: Tensor, weight: Tensor, tokens: Tensor, ids: Tensor, rows: Rows, options: Options, shard: Shard
) -> Tensor:
    """Return [2, M] fp32: base-2 logits, and ones; both 0 at an id of another shard, and the first at padding."""
    found = hidden.new_empty(2, ids.shape[0], dtype=torch.float32)
    logits, cap = found[0], softcap_scale(options)
    local, elsewhere = _local(ids, shard)
    bytes_of_one = hidden.shape[1] * (2 * hidden.element_size() + 3 * 4)  # both rows, in fp32 too, and their product
    for part in cut(ids.shape[0], max(1, options.workspace_bytes // bytes_of_one)):
        of_weight = weight.index_select(0, local[part]).float()
        torch.sum(of_weight.mul_(hidden.index_select(0, tokens[part])), dim=1, out=logits[part])
    if options.logits_dtype is not None:
        logits.copy_(logits.to(options.logits_dtype))
    if cap is not None:
        logits.mul_(cap).tanh_()
    logits.mul_(rows.scale[tokens]).add_(0.0).masked_fill_(elsewhere, 0.0)  # -0.0 is 0.0, as after a sum over ranks
    found[1] = ~elsewhere | (ids < 0)
    return found


def _local(ids: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return numbers of the shard's rows, and where they are of another's id or padding."""
    local = ids - shard.start
    clamped = local.clamp(0, max(shard.columns - 1, 0))
    return clamped, (clamped != local) | (shard.columns == 0)


def set_logprobs(
    logits: Tensor, ids: Tensor, tokens: Tensor, offsets: Tensor, labels: Tensor, to_nats: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] of labels in their sets in nats, NaN outside, and 1[label] - p [M]; 0 in ignored rows."""

    def of_sets(how: str, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, how, offsets=offsets, unsafe=True)

    absent = (ids < 0) | (to_nats == 0)[tokens]
    is_label = (ids == labels[tokens]).masked_fill_(absent, False)
    shifted = logits - of_sets("max", logits.masked_fill(absent, -torch.inf))[tokens]
    exp = shifted.exp2().masked_fill_(absent, 0.0)
    total = of_sets("sum", exp)
    found = of_sets("sum", is_label.float())
    logprobs = (of_sets("sum", torch.where(is_label, shifted, 0.0)) - total.log2()) * (found / found)
    slopes = is_label.float() - exp / total[tokens] + 0.0 * logprobs[tokens]
    return (logprobs * to_nats).masked_fill_(to_nats == 0, 0.0), slopes.masked_fill_(absent, 0.0)


def largest_values(
    values: Tensor, k: int, scale: Tensor | None = None, parts: Tensor | None = None, width: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the largest values [N, k] of each row's parts and their columns, ascending; on ties the first ones."""
    columns, num_columns = None, values.shape[1]
    if parts is not None:
        within = torch.arange(width, dtype=torch.int64, device=parts.device)
        columns = (parts[:, :, None] * width + within).flatten(1)
        values = values.gather(1, columns.clamp(max=num_columns - 1))
    values = values + 0.0 if scale is None else values * scale[:, None] + 0.0  # -0.0 is 0.0
    if columns is not None:
        values.masked_fill_(columns >= num_columns, -torch.inf)
    places = values.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    return values.gather(1, places), places if columns is None else columns.gather(1, places)


def gathered_sums(
    matrix: Tensor,
    places: Tensor,
    factors: Tensor,
    offsets: Tensor,
    out: Tensor,
    shard: Shard | None = None,
    *,
    accumulate: bool,
    workspace_bytes: int,
) -> None:
    """Write the sums of factors * matrix[places] over each part to `out`, or add them; some columns at a time."""
    bytes_of_column = places.shape[0] * (matrix.element_size() + 2 * 4) + 2 * 4 * out.shape[0]
    nothing = factors == 0
    if shard is not None:
        places, elsewhere = _local(places, shard)
        nothing |= elsewhere
    for columns in cut(out.shape[1], max(1, workspace_bytes // max(bytes_of_column, 1))):
        terms = matrix[:, columns].index_select(0, places).float().mul_(factors[:, None])
        terms.masked_fill_(nothing[:, None], 0.0)
        sums = torch.segment_reduce(terms, "sum", offsets=offsets, unsafe=True)
        out[:, columns] = out[:, columns].float() + sums if accumulate else sums


def write_columns(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """Write values to some columns of each row. The other places repeat what is written to one of the row's columns."""
    inside = (columns >= 0) & (columns < matrix.shape[1])
    one = inside.to(torch.uint8).argmax(dim=1, keepdim=True)
    any_inside = inside.gather(1, one)
    column = torch.where(any_inside, columns.gather(1, one), 0)
    value = torch.where(any_inside, values.gather(1, one).to(matrix.dtype), matrix.gather(1, column))
    matrix.scatter_(1, torch.where(inside, columns, column), torch.where(inside, values.to(matrix.dtype), value))

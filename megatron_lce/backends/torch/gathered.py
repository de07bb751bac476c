"""Products of hidden states with single rows of the weight, and their gradients, in torch; arguments: see `Backend`."""

import torch
from torch import Tensor

from megatron_lce.core.plan import cut


def gathered_products(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, workspace_bytes: int) -> Tensor:
    """Return hidden[rows] . weight[ids], [M] fp32, 0 without an id."""
    products = hidden.new_empty(ids.shape[0], dtype=torch.float32)
    bytes_of_one = hidden.shape[1] * (2 * hidden.element_size() + 3 * 4)  # both rows, in fp32 too, and their product
    for part in cut(ids.shape[0], max(1, workspace_bytes // bytes_of_one)):
        of_hidden = hidden.index_select(0, rows[part]).float()
        of_weight = weight.index_select(0, ids[part].clamp(min=0)).float()
        torch.sum(of_hidden * of_weight, dim=1, out=products[part])
    return products.masked_fill_(ids < 0, 0.0)


def set_logprobs(logits: Tensor, ids: Tensor, rows: Tensor, offsets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return base-2 logprobs [N] of labels in their sets, NaN outside; and their derivatives by the logits [M]."""

    def of_sets(how: str, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, how, offsets=offsets, unsafe=True)

    absent = ids < 0
    is_label = (ids == labels[rows]).masked_fill_(absent, False)
    shifted = logits - of_sets("max", logits.masked_fill(absent, -torch.inf))[rows]
    exp = shifted.exp2().masked_fill_(absent, 0.0)
    total = of_sets("sum", exp)
    found = of_sets("sum", is_label.float())
    logprobs = (of_sets("sum", torch.where(is_label, shifted, 0.0)) - total.log2()) * (found / found)
    slopes = is_label.float() - exp / total[rows] + 0.0 * logprobs[rows]
    return logprobs, slopes.masked_fill_(absent, 0.0)


def largest(
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
    *,
    accumulate: bool,
    workspace_bytes: int,
) -> None:
    """Write the sums of factors * matrix[places] over each part to `out`, or add them; some columns at a time."""
    bytes_of_column = places.shape[0] * (matrix.element_size() + 2 * 4) + 2 * 4 * out.shape[0]
    nowhere = (places < 0)[:, None]
    for columns in cut(out.shape[1], max(1, workspace_bytes // max(bytes_of_column, 1))):
        terms = matrix[:, columns].index_select(0, places.clamp(min=0)).float().mul_(factors[:, None])
        terms.masked_fill_(nowhere, 0.0)
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

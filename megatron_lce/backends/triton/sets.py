"""A softmax over some ids of each token, and the largest of each row's values; arguments: see `Backend`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.core.statistics import LOWEST_LOGIT

_LOWEST_LOGIT = tl.constexpr(LOWEST_LOGIT)


def set_logprobs(
    logits: Tensor, ids: Tensor, tokens: Tensor, offsets: Tensor, labels: Tensor, to_nats: Tensor
) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] of labels in their sets in nats, NaN outside, and 1[label] - p [M]; 0 in ignored rows."""
    logprobs, slopes = torch.empty_like(to_nats), torch.empty_like(logits)
    if labels.shape[0]:
        _set_logprobs_kernel[(labels.shape[0],)](
            logits, ids, offsets, labels.contiguous(), to_nats, logprobs, slopes, BLOCK=64, num_warps=1
        )
    return logprobs, slopes


def largest_values(
    values: Tensor, k: int, scale: Tensor | None = None, parts: Tensor | None = None, width: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the largest values [N, k] of each row's parts and their columns, ascending; on ties the first ones."""
    num_rows, num_columns = values.shape
    found, columns = values.new_empty(num_rows, k), values.new_empty(num_rows, k, dtype=torch.int64)
    num_values = num_columns if parts is None else parts.shape[1] * width
    block = max(128, triton.next_power_of_2(num_values))
    if found.numel():
        _largest_values_kernel[(num_rows,)](
            values,
            scale,
            parts,
            found,
            columns,
            k,
            num_columns,
            num_values,
            *values.stride(),
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return found, columns


@triton.jit
def _set_logprobs_kernel(
    logits_ptr,  # [M] fp32
    ids_ptr,  # [M] int64
    offsets_ptr,  # [N + 1] int64
    labels_ptr,  # [N] int64
    to_nats_ptr,  # [N] fp32
    logprobs_ptr,  # [N] fp32 out
    slopes_ptr,  # [M] fp32 out
    BLOCK: tl.constexpr,
):
    """Write one set's logprob, from running sums of BLOCK parts of it, and then its derivatives."""
    row = tl.program_id(0)
    first, last = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    label, to_nats = tl.load(labels_ptr + row), tl.load(to_nats_ptr + row)
    largest = tl.full((BLOCK,), _LOWEST_LOGIT, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    of_label = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + entries, mask=entries < last, other=-1)
        logits = tl.load(logits_ptr + entries, mask=ids >= 0, other=float("-inf"))
        larger = tl.maximum(largest, logits)
        total = total * tl.exp2(largest - larger) + tl.exp2(logits - larger)
        largest = larger
        of_label = tl.where((ids == label) & (ids >= 0), logits, of_label)
    max_logit = tl.max(largest, 0)
    sum_exp = tl.sum(total * tl.exp2(largest - max_logit), 0)
    logprob = (tl.max(of_label, 0) - max_logit) - tl.log2(sum_exp)
    logprob = tl.where(logprob > float("-inf"), logprob, float("nan"))
    tl.store(logprobs_ptr + row, tl.where(to_nats == 0.0, 0.0, logprob * to_nats))
    for start in range(first, last, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + entries, mask=entries < last, other=-1)
        logits = tl.load(logits_ptr + entries, mask=ids >= 0, other=0.0)
        slopes = tl.where(ids == label, 1.0, 0.0) - tl.exp2(logits - max_logit) / sum_exp + 0.0 * logprob
        slopes = tl.where(to_nats == 0.0, 0.0, slopes)
        tl.store(slopes_ptr + entries, tl.where(ids >= 0, slopes, 0.0), mask=entries < last)


@triton.jit(do_not_specialize=["K"])
def _largest_values_kernel(
    values_ptr,  # [N, C] fp32
    scale_ptr,  # [N] fp32, or None
    parts_ptr,  # [N, P] int64, or None
    found_ptr,  # [N, K] fp32 out
    columns_ptr,  # [N, K] int64 out
    K,
    C,
    num_values,  # P * WIDTH, or C
    row_stride,
    column_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the K-th largest of one row's values bit by bit, and write the values above, and the first ones at it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_values
    if parts_ptr is not None:
        part = tl.load(parts_ptr + row * (num_values // WIDTH) + columns // WIDTH, mask=inside, other=0).to(tl.int32)
        columns = part * WIDTH + columns % WIDTH
    valid = inside & (columns < C)
    values = tl.load(values_ptr + row * row_stride + columns.to(tl.int64) * column_stride, mask=valid, other=0.0)
    if scale_ptr is not None:
        values *= tl.load(scale_ptr + row)
    values = tl.where(valid, tl.where(values == 0.0, 0.0, values), float("-inf"))  # -0.0 is 0.0
    bits = values.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the values' order
    enough = tl.sum((inside & (keys >= 0)).to(tl.int32), 0) >= K
    threshold = tl.where(enough, 0, -2147483648)
    for step in range(31):
        higher = threshold | (1 << (30 - step))
        enough = tl.sum((inside & (keys >= higher)).to(tl.int32), 0) >= K
        threshold = tl.where(enough, higher, threshold)
    above = inside & (keys > threshold)
    equal = (inside & (keys == threshold)).to(tl.int32)
    chosen = above | ((equal > 0) & (tl.cumsum(equal, 0) <= K - tl.sum(above.to(tl.int32), 0)))
    places = row * K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(found_ptr + places, values, mask=chosen)
    tl.store(columns_ptr + places, columns.to(tl.int64), mask=chosen)

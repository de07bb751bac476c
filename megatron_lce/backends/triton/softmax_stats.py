"""Softmax statistics of hidden @ weight.T, with the logits in registers only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.dot_tile import (
    device_descriptor,
    dot_parts,
    dot_rows,
    dot_tile,
    halves,
    host_descriptor,
    padded_h,
    rounded_to_bf16,
    shared_arguments,
    tanh,
    tile_position,
)
from megatron_lce.backends.triton.fp32_split import split_fp32
from megatron_lce.backends.triton.packed import extremes_at, sums_at
from megatron_lce.core.lm_head import ExpCache, LMHead, RowInputs
from megatron_lce.core.options import Options
from megatron_lce.core.plan import MIN_TOKENS, ceil_div, slices
from megatron_lce.core.statistics import LOWEST_LOGIT, Extremes, row_counts

_LABEL_LOGIT = Extremes._fields.index("label_logit")
_LOWEST_LOGIT = tl.constexpr(LOWEST_LOGIT)


def softmax_stats(
    head: LMHead,
    rows: RowInputs,
    options: Options,
    *,
    vocab_start: int,
    cache: ExpCache | None = None,
    max_copied_columns: int | None = None,
) -> Tensor:
    hidden, weight = head.hidden, head.weight
    num_tokens, (num_columns, width) = hidden.shape[0], weight.shape
    tile = tiles.choose_tiles(hidden.dtype, weight.dtype, hidden.device)
    if cache is None and tile == tiles.HOPPER_16_BIT and num_tokens <= tiles.HOPPER_FEW_ROWS.block_n:
        tile = tiles.HOPPER_FEW_ROWS  # all tiles give a row the same bits
    *_, num_rows = row_counts(options.entropy, options.telemetry)
    stats = hidden.new_empty(ceil_div(num_columns, tile.chunk), num_rows, num_tokens, dtype=torch.float32)
    if num_columns == 0:
        return stats
    hidden, hidden_pow2 = split_fp32(hidden, tile.hidden_parts) if tile.hidden_parts else (hidden, None)
    exp, shift = (None, None) if cache is None else cache
    step = max_copied_columns if tile.weight_parts and max_copied_columns else num_columns
    for columns in slices(num_columns, step):  # one, unless the weight is split: then there is no cache
        slab, weight_pow2 = weight[columns], None
        if tile.weight_parts:
            slab, weight_pow2 = split_fp32(slab, tile.weight_parts)
        tiles.launch(
            _softmax_stats_kernel,
            tiles.tile_grid(num_tokens, slab.shape[0], tile, hidden.device),
            hidden,
            fp_fusion=False,  # logprobs must have the same bits for all constexprs
            **shared_arguments(tile, head),
            hidden_desc=host_descriptor(hidden, tile.block_n, tile.block_h),
            hidden_pow2=hidden_pow2,
            weight_desc=host_descriptor(slab, tile.block_v, tile.block_h),
            weight_pow2=weight_pow2,
            row_scale_ptr=rows.scale,
            stats_ptr=stats[columns.start // tile.chunk :],
            exp_desc=None if exp is None else host_descriptor(exp, tile.block_n, tile.block_v // 2),
            shift_ptr=shift,
            N=num_tokens,
            C=slab.shape[0],
            H=width,
            first_column=columns.start,
            vocab_start=vocab_start,
            shift_stride=0 if shift is None else shift.stride(0),
            ENTROPY=options.entropy,
            MEAN=bool(options.telemetry),
            TELEMETRY=options.telemetry is True,
            CHUNK=tile.chunk,
            PERSISTENT=tiles.has_tma(hidden.device),
            BLOCK_V=tile.block_v,
            GROUP_N=32 if width <= 2048 else 16,  # larger groups read a wide weight less often (3 to 6 % on an H200)
        )
        del slab, weight_pow2  # the parts of these columns
    out = stats[0, _LABEL_LOGIT]  # after the statistics kernel, which fills it with -inf
    if hidden_pow2 is None:
        _label_logits(head, None, rows, out, tile)
        return stats
    # The weight's row at the label is copied and then split, which takes as much memory as two columns.
    for tokens in slices(num_tokens, max(MIN_TOKENS, step // 2 // MIN_TOKENS * MIN_TOKENS)):
        of_tokens = head._replace(hidden=hidden[tokens])
        _label_logits(of_tokens, hidden_pow2[tokens.start :], rows.select(tokens), out[tokens], tile)
    return stats


def _label_logits(head: LMHead, hidden_pow2: Tensor | None, rows: RowInputs, out: Tensor, tile: tiles.Tiles) -> None:
    """Write label logits to `out` [N]. The head's hidden is split, where `tile` says so."""
    hidden, weight, label_rows, label_pow2 = head.hidden, head.weight, None, None
    if tile.weight_parts:
        label_rows, label_pow2 = split_fp32(weight.index_select(0, rows.labels.clamp(min=0)), tile.weight_parts)
    # A square, whose diagonal is the label logits, no larger than the tile of the statistics.
    block = min(tile.block_n, tile.block_v)
    is_hopper = tile in (tiles.HOPPER_16_BIT, tiles.HOPPER_FEW_ROWS)
    tile = tiles.HOPPER_LABELS if is_hopper else tile._replace(block_n=block, block_v=block)
    tiles.launch(
        _label_logits_kernel,
        (ceil_div(out.shape[0], tile.block_n),),
        hidden,
        fp_fusion=False,
        hidden_desc=host_descriptor(hidden, tile.block_n, tile.block_h),
        hidden_pow2=hidden_pow2,
        weight=weight if label_rows is None else host_descriptor(label_rows, tile.block_n, tile.block_h),
        weight_pow2=label_pow2,
        label_ptr=rows.labels,
        row_scale_ptr=rows.scale,
        out_ptr=out,
        N=out.shape[0],
        H=weight.shape[1],
        weight_stride=weight.stride(0),
        **shared_arguments(tile, head),
    )


@triton.jit(do_not_specialize=["N"])
def _label_logits_kernel(
    hidden_desc,  # [N, H]
    hidden_pow2,  # [N] fp32; None without parts, as weight_pow2
    weight,  # a pointer to [V, H], or the descriptor of the parts of each label's row, [N, 2 * width]
    weight_pow2,  # [N] fp32
    label_ptr,  # [N] int32; -1: not this shard's
    row_scale_ptr,  # [N] fp32
    out_ptr,  # [N] fp32 out; -inf for a label of -1
    N,
    H,
    weight_stride,
    softcap_scale,
    SOFTCAP: tl.constexpr,
    HIDDEN_PARTS: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute the label logits of some tokens, as the diagonal of a tile whose columns are their labels.

    They have the same bits as in the statistics, so that none exceeds the largest logit. Looking for the label in the
    tiles of the statistics would take 1 to 5 % of the forward.
    """
    hidden_desc = device_descriptor(hidden_desc, N, padded_h(H, HIDDEN_PARTS), BLOCK_N, BLOCK_H)
    row_start = tl.program_id(0) * BLOCK_N
    offs_n = row_start + tl.arange(0, BLOCK_N)
    row_mask = offs_n < N
    label = tl.load(label_ptr + offs_n, mask=row_mask, other=-1)
    row_scale = tl.load(row_scale_ptr + offs_n, mask=row_mask, other=0.0)
    if HIDDEN_PARTS:
        label_rows = device_descriptor(weight, N, padded_h(H, 2), BLOCK_N, BLOCK_H)
        logits = dot_parts(
            hidden_desc, hidden_pow2, label_rows, weight_pow2, row_start, row_start, H,
            BLOCK_N, BLOCK_N, BLOCK_H, HIDDEN_PARTS,
        )  # fmt: skip
    else:
        label_rows = weight + tl.where(label >= 0, label, 0).to(tl.int64)[:, None] * weight_stride
        logits = dot_rows(hidden_desc, label_rows, row_start, H, BLOCK_N, BLOCK_N, BLOCK_H)
    if ROUND:
        logits = rounded_to_bf16(logits)
    if SOFTCAP:
        logits = tanh(logits * softcap_scale)
    logits = logits * row_scale[:, None]
    diagonal = tl.arange(0, BLOCK_N)[:, None] == tl.arange(0, BLOCK_N)[None, :]
    label_logit = tl.sum(tl.where(diagonal, logits, 0.0), 1)
    tl.store(out_ptr + offs_n, tl.where(label >= 0, label_logit, float("-inf")), row_mask)


@triton.jit(do_not_specialize=["N", "C", "first_column", "vocab_start", "shift_stride"])
def _softmax_stats_kernel(
    hidden_desc,  # [N, H]
    hidden_pow2,  # [N] fp32; None without parts, as weight_pow2
    weight_desc,  # [C, H]
    weight_pow2,  # [C] fp32
    row_scale_ptr,  # [N] fp32
    stats_ptr,  # [chunks, K, N] fp32 out, rows as in packed.py; row 1, the label logit, is -inf
    exp_desc,  # [N, C] out; None: no cache
    shift_ptr,  # [chunks, N] fp32 out, rows shift_stride apart; None: no cache
    N,
    C,
    H,
    first_column,
    vocab_start,
    shift_stride,
    softcap_scale,  # with SOFTCAP, HIDDEN_PARTS, ROUND, BLOCK_N and BLOCK_H from `shared_arguments`
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,  # of the logits
    TELEMETRY: tl.constexpr,  # all of it, the mean included
    SOFTCAP: tl.constexpr,
    PERSISTENT: tl.constexpr,  # programs take one tile after the other
    HIDDEN_PARTS: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Write statistics of each tile of logits, [BLOCK_N, BLOCK_V], which stays in registers (its exp may be cached)."""
    EXTREMES: tl.constexpr = 2 + MEAN + TELEMETRY  # as in `row_counts`
    K: tl.constexpr = EXTREMES + 1 + ENTROPY + MEAN + 2 * TELEMETRY
    CHUNKS: tl.constexpr = BLOCK_V // CHUNK
    hidden_desc = device_descriptor(hidden_desc, N, padded_h(H, HIDDEN_PARTS), BLOCK_N, BLOCK_H)
    weight_desc = device_descriptor(weight_desc, C, padded_h(H, 2 if HIDDEN_PARTS else 0), BLOCK_V, BLOCK_H)
    if exp_desc is not None:
        exp_desc = device_descriptor(exp_desc, N, C, BLOCK_N, BLOCK_V // 2)
    num_row_blocks = tl.cdiv(N, BLOCK_N)
    num_column_tiles = tl.cdiv(C, BLOCK_V)
    for tile_id in tl.range(
        tl.program_id(0), num_row_blocks * num_column_tiles, tl.num_programs(0), flatten=PERSISTENT
    ):
        row_block, column_tile = tile_position(tile_id, num_row_blocks, num_column_tiles, GROUP_N)
        row_start = row_block * BLOCK_N
        col_start = column_tile * BLOCK_V
        offs_n = row_start + tl.arange(0, BLOCK_N)
        row_mask = offs_n < N
        row_scale = tl.load(row_scale_ptr + offs_n, mask=row_mask, other=0.0)

        if HIDDEN_PARTS:
            logits = dot_parts(
                hidden_desc, hidden_pow2, weight_desc, weight_pow2, row_start, col_start, H,
                BLOCK_N, BLOCK_V, BLOCK_H, HIDDEN_PARTS,
            )  # fmt: skip
        else:
            logits = dot_tile(hidden_desc, weight_desc, row_start, col_start, H, BLOCK_N, BLOCK_V, BLOCK_H)
        if ROUND:
            logits = rounded_to_bf16(logits)
        offs_v = col_start + tl.arange(0, BLOCK_V)
        if SOFTCAP:
            if MEAN:  # inf * 0 gives NaN in columns past the end, which sums of logits include
                logits = tl.where((offs_v < C)[None, :], logits, 0.0)
            logits = tanh(logits * softcap_scale)
        logits = logits * row_scale[:, None]  # [BLOCK_N, BLOCK_V]

        chunks = tl.arange(0, CHUNKS)
        first_row = stats_ptr + (column_tile * CHUNKS + chunks).to(tl.int64)[None, :] * (K * N) + offs_n[:, None]
        # Before 9.0 stores add offsets to one pointer: pointers to all rows spill 72 bytes more (8.0, softcap, cache).
        row, origin = (first_row, 0) if PERSISTENT else (0, first_row)
        extremes, sums = extremes_at(row, N), sums_at(row, N, ENTROPY, TELEMETRY, EXTREMES)
        mask = row_mask[:, None] & (col_start + chunks * CHUNK < C)[None, :]  # [BLOCK_N, CHUNKS]
        if MEAN:
            # Products past the end of the vocabulary are zero. Sums first: in this order no register spills.
            zero_ended = tl.reshape(logits, (BLOCK_N, CHUNKS, CHUNK))
            sum_logit = tl.sum(zero_ended, 2)
            tl.store(origin + sums.sum_logit, sum_logit, mask)
            if TELEMETRY:
                tl.store(origin + sums.sum_logit_squared, tl.sum(zero_ended * zero_ended, 2), mask)
                min_logit = tl.where((offs_v < C)[None, :], logits, float("inf"))
                min_logit = tl.min(tl.reshape(min_logit, (BLOCK_N, CHUNKS, CHUNK)), 2)
            else:  # tl.min would ignore a NaN
                min_logit = tl.where(sum_logit == sum_logit, -tl.abs(sum_logit), float("-inf"))
            tl.store(origin + extremes.min_logit, min_logit, mask)
        if col_start + BLOCK_V > C:
            logits = tl.where((offs_v < C)[None, :], logits, _LOWEST_LOGIT)

        logits = tl.reshape(logits, (BLOCK_N, CHUNKS, CHUNK))
        max_logit = tl.maximum(tl.max(logits, 2), _LOWEST_LOGIT)  # [BLOCK_N, CHUNKS]; a chunk may be -inf throughout
        if TELEMETRY:
            argmax = tl.argmax(logits, 2) + (col_start + first_column + vocab_start + chunks * CHUNK)[None, :]
            tl.store(origin + extremes.argmax, argmax.to(tl.float32, bitcast=True), mask)
        shifted = logits - max_logit[:, :, None]
        exp = tl.exp2(shifted)
        sum_exp = tl.sum(exp, 2)
        if ENTROPY:
            # 0 times -inf must be 0. The maximum costs nothing; a branch for the chunks that need it costs 5 to 10 %.
            finite = tl.maximum(shifted, _LOWEST_LOGIT)
            tl.store(origin + sums.sum_exp_logit, tl.sum(exp * finite, 2), mask)
        if TELEMETRY:
            tl.store(origin + sums.sum_exp_squared, tl.sum(exp * exp, 2), mask)
        tl.store(origin + sums.sum_exp, sum_exp, mask)
        # tl.max ignores a NaN; a sum does not.
        max_logit = tl.where(sum_exp == sum_exp, max_logit, float("nan"))
        tl.store(origin + extremes.max_logit, max_logit, mask)
        tl.store(origin + extremes.label_logit, tl.full((BLOCK_N, CHUNKS), float("-inf"), tl.float32), mask)
        if exp_desc is not None:
            chunk = (column_tile * CHUNKS + chunks).to(tl.int64)[None, :]
            tl.store(shift_ptr + chunk * shift_stride + offs_n[:, None], max_logit, mask)
            left, right = halves(tl.reshape(exp, (BLOCK_N, BLOCK_V)).to(exp_desc.dtype))
            exp_desc.store([row_start, col_start], left)
            exp_desc.store([row_start, col_start + BLOCK_V // 2], right)

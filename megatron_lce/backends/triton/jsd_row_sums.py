"""Sums over a row that its programs find together, while they hold its logits.

Each program stores its part where nothing was; one program more adds a row's parts up, in one order, and stores the
sums, for which the others wait. A number is there when it is another than `_NOTHING`, and wants no fence. GPUs start
programs in order (NVIDIA's CUB and PyTorch's scans count on it, too), so that all of a row run, and none waits for
ever, where there is room for one row's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.jsd_probabilities import WARP_COLUMNS
from megatron_lce.core.blocks import ceil_div

_NOTHING = tl.constexpr(-1)  # as two of fp32 NaNs, but not the one that is stored
_NAN = tl.constexpr(0x7FC00000)
_BLOCK_S = tl.constexpr(512)  # parts of most vocabularies at once
WARPS = 2  # of a program
# H200, us of 512 x 151936 logits of two heads by programs of 1, 2, 4 warps: 451, 272 and 289 at a beta of 0.5, 405, 208
# and 216 at 1, 192, 182 and 182 at 0. The divergence and then the gradient take 337 and 327 (see `tiles.reading_rows`).
REGISTERS = 72  # of a thread between the ends of beta: 250 us for 272, as more programs run at once
_RUNNING = 4  # programs of a multiprocessor at once, at least: a third of what any of them has these registers for


def can_share(logits: Tensor, beta: float) -> bool:
    """Whether programs may wait for each other, which an interpreter runs one by one.

    At a beta of 0, whose gradient wants no sums, only those do that add up, and what they wait for runs before them.
    """
    return beta == 0 or (
        tiles.speaks_ptx() and _programs_of_row(logits) <= _RUNNING * tiles.num_programs(logits.device)
    )


def room_to_share(logits: Tensor) -> Tensor:
    """[N, programs] for the parts of each row's divergence and KL(p_student || m), a pair in 64 bits, and the sums."""
    return logits.new_full((logits.shape[0], _programs_of_row(logits)), _NOTHING.value, dtype=torch.int64)


def _programs_of_row(logits: Tensor) -> int:
    return ceil_div(logits.shape[1], WARPS * WARP_COLUMNS) + 1


@triton.jit
def share_part(shared, part, divergence, student_kl, row_mask):
    """This program's part of its rows' sums, [BLOCK_N, 1] each; shared: pointers to the rows' first."""
    tl.atomic_xchg(shared[:, None] + part, _pair(divergence, student_kl), row_mask[:, None], sem="relaxed")


@triton.jit
def share_sums(shared, num_parts, row_mask, BLOCK_N: tl.constexpr):
    """The rows' sums, [BLOCK_N, 1] each, of parts that others share."""
    divergence = tl.zeros((BLOCK_N, 1), tl.float32)
    student_kl = tl.zeros((BLOCK_N, 1), tl.float32)
    for start in range(0, num_parts, _BLOCK_S):
        parts = start + tl.arange(0, _BLOCK_S)[None, :]
        divergences, student_kls = _await(shared[:, None] + parts, row_mask[:, None] & (parts < num_parts))
        divergence += tl.sum(divergences, 1, keep_dims=True)
        student_kl += tl.sum(student_kls, 1, keep_dims=True)
    share_part(shared, num_parts, divergence, student_kl, row_mask)
    return divergence, student_kl


@triton.jit
def shared_sums(shared, num_parts, row_mask):
    """What `share_sums` shared."""
    return _await(shared[:, None] + num_parts, row_mask[:, None])


@triton.jit
def _pair(first, second):
    return (_bits(first) << 32) | _bits(second)


@triton.jit
def _bits(value):
    return tl.where(value == value, value.to(tl.uint32, bitcast=True), _NAN).to(tl.int64)


@triton.jit
def _await(place, mask):
    pair = tl.load(place, mask, other=0, volatile=True)
    while tl.min(tl.where(pair == _NOTHING, 0, 1)) == 0:
        pair = tl.load(place, mask, other=0, volatile=True)
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), pair.to(tl.int32).to(tl.float32, bitcast=True)

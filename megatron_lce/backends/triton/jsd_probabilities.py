"""What kernels make of both heads' logits: where they are in memory, their probabilities and those of the mixture."""

import triton
import triton.language as tl
from torch import Tensor

from megatron_lce.backends.triton import tiles
from megatron_lce.backends.triton.tile_products import MASKED_LOGIT, SMALLEST_NORMAL
from megatron_lce.core.blocks import ceil_div

# Of a program that reads logits. H200, 256 against 512, ms of 512 x 151936 of two heads: 0.186 and 0.143 for their
# divergence, 0.205 and 0.184 for its gradient; a copy of what they read takes 0.148.
READ_COLUMNS = 512


def reading_grid(logits: Tensor) -> tuple[int]:
    rows = tiles.reading_rows(logits.device)
    return (ceil_div(logits.shape[0], rows) * ceil_div(logits.shape[1], READ_COLUMNS),)


def reading_constexprs(logits: Tensor) -> dict[str, int]:
    return {"BLOCK_N": tiles.reading_rows(logits.device), "BLOCK_V": READ_COLUMNS, "num_warps": 1}


@triton.jit
def place_of(N, V, logits_stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """This program's rows and columns, and where their logits are."""
    num_blocks = tl.cdiv(V, BLOCK_V)
    rows = tl.program_id(0) // num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) % num_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    return rows, rows < N, columns, rows.to(tl.int64)[:, None] * logits_stride + columns[None, :]


@triton.jit
def read_logits(logits_ptr, row_mask, columns, V, logits_stride):
    """Logits of these columns; those past the end have no weight in any sum.

    Read to the end of a row's storage: a bound that Triton knows to be a multiple of 16.
    """
    logits = tl.load(logits_ptr, row_mask[:, None] & (columns < logits_stride)[None, :], other=0.0)
    return tl.where((columns < V)[None, :], logits, MASKED_LOGIT)


@triton.jit
def log_probability(logits, stats_ptr, stats_stride, row_mask):
    """log2 p of one head."""
    log_sum = tl.log2(tl.load(stats_ptr + stats_stride, row_mask, other=1.0))
    return shifted(logits, stats_ptr, row_mask) - log_sum[:, None]


@triton.jit
def shifted(logits, max_ptr, row_mask):
    """By the largest of the row."""
    return logits - tl.load(max_ptr, row_mask, other=0.0)[:, None]


@triton.jit
def log_mixture(ps, pt, beta):
    """log2 m, held where 0 * log(p / m) is 0 if p_s and p_t underflow; finite for NaN too, which p_s or p_t brings."""
    return _log2_of_normal(tl.maximum(tl.fma(beta, pt, (1 - beta) * ps), SMALLEST_NORMAL))


@triton.jit
def _log2_of_normal(x):
    """log2 of a positive normal number, to 1.4e-7 of the result, and 0 at 1.

    x = 2^e (1 + f) with 1 + f between the square roots of 1/2 and 2, and log2(1 + f) = f times a polynomial (minimax
    fit). Half the instructions of the general logarithm, which minds zero, infinity and subnormal numbers.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    polynomial = tl.fma(f, 0.129264208, -0.208933778)
    polynomial = tl.fma(f, polynomial, 0.215212268)
    polynomial = tl.fma(f, polynomial, -0.238675687)
    polynomial = tl.fma(f, polynomial, 0.287939094)
    polynomial = tl.fma(f, polynomial, -0.360716264)
    polynomial = tl.fma(f, polynomial, 0.48091028)
    polynomial = tl.fma(f, polynomial, -0.721347199)
    polynomial = tl.fma(f, polynomial, 1.442695)
    return tl.fma(f, polynomial, exponent.to(tl.float32) * 1.1920928955078125e-07)

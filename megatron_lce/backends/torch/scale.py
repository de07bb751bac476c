"""`scale` multiplies a matrix by one number on the device, or by one for each row, in fp32."""

from torch import Tensor

from megatron_lce.core.plan import cut

_ROWS = 1024  # rows that are in fp32 at a time


def scale(
    matrix: Tensor,  # [M, K]
    factor: Tensor,  # [] or [M] fp32
    out: Tensor,  # [M, K]; may be the matrix
    *,
    accumulate: bool,  # True: out += factor * matrix, False: out = factor * matrix
) -> None:
    """Scale in fp32: in the matrix's dtype torch would round the factor first."""
    for rows in cut(matrix.shape[0], _ROWS):
        scaled = matrix[rows].float() * (factor[rows, None] if factor.dim() else factor)
        out[rows].copy_(scaled.add_(out[rows]) if accumulate else scaled)

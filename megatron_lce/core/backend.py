"""The functions that a backend module supplies. Core knows nothing else about backends."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron_lce.core.divergence_types import Heads
from megatron_lce.core.lm_head import ExpCache, LMHead, RowInputs, RowSoftmax
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, Shard, Telemetry
from megatron_lce.core.plan import ScratchBytes


class Backend(Protocol):
    """The primitives of every operation."""

    def scratch_bytes(self, hidden: Tensor, weight: Tensor, telemetry: Telemetry) -> ScratchBytes:
        """Return the bytes of intermediates that the primitives allocate."""

    def prepare_rows(self, head: LMHead, labels: Tensor, ignore_index: int, shard: Shard) -> RowInputs:
        """Return per-row inputs from labels [N], int64 global ids, and temperatures; an unusable one gives NaN."""

    def softmax_stats(
        self,
        head: LMHead,  # of N tokens and V columns
        rows: RowInputs,
        options: Options,
        *,
        vocab_start: int,
        cache: ExpCache | None = None,
        max_copied_columns: int | None = None,  # most rows of the weight that may be copied at a time; None: all
    ) -> Tensor:
        """Return statistics [chunks, K, N], see `megatron_lce.core.statistics`, and fill the cache, if any."""

    def merge_chunks(
        self,
        stats: Tensor,  # [chunks, K, N]
        all_extremes: Tensor,  # [S, E or more, N] of S disjoint sets of columns that make up the vocabulary
        num_columns: int,  # of the chunks
        entropy: bool,
        telemetry: Telemetry,
    ) -> tuple[Tensor, Tensor]:
        """Return the extremes of the vocabulary [E, N], and the sums of the chunks, int64 [sums, N].

        Sums are in `FIXED_POINT_UNIT`s, relative to the extremes of the vocabulary. On one rank `stats` also serve as
        `all_extremes`.
        """

    def write_outputs(
        self,
        packed_extremes: Tensor,  # [E, N]
        sums: Tensor,  # int64 [sums, N]
        rows: RowInputs,
        options: Options,
        outputs: LinearCrossEntropyOutput,  # out, [N] each, contiguous; None: not requested
    ) -> RowSoftmax:
        """Turn statistics of the vocabulary into outputs in nats: 0 in ignored rows, NaN in broken ones."""

    def row_terms(
        self,
        rows: RowInputs,
        softmax: RowSoftmax,
        upstream: Sequence[Tensor | None],  # gradients of the `DIFFERENTIABLE_SCALARS` outputs, [N] fp32, any stride
        head: LMHead,
    ) -> tuple[Tensor, Tensor]:
        """Return packed `RowTerms`, [6, N], or [7, N] if the mean logit has a gradient, and a mask [N] of rows.

        The mask is true in rows with a nonzero gradient. Broken rows have NaN terms, and the mask is true there.
        """

    def grad_logits(
        self,
        head: LMHead,  # of N tokens and the slab's C columns
        rows: RowInputs,
        terms: Tensor,  # [6 or 7, N], packed `RowTerms`
        out: Tensor,  # [N, C] of weight's dtype
        *,
        slab_start: int,  # of the slab in the shard
        entropy: bool,  # `terms.entropy_term` may be nonzero
        shift: Tensor | None,  # of an `ExpCache`, whose exponentials are in `out`; None: logits are recomputed
    ) -> None:
        """Write the gradient of the products `hidden @ weight.T` to `out`, scale, softcap and temperature included.

        From exponentials there is no `mean_term` under a softcap.
        """

    def indexed_logits(
        self,
        head: LMHead,
        token_index: Tensor,  # [M] int64 rows of hidden
        ids: Tensor,  # [M] int64 global ids; negative: padding
        rows: RowInputs,
        shard: Shard,
        workspace_bytes: int,
    ) -> Tensor:
        """Return [2, M] fp32: base-2 logits, and ones; both 0 at an id of another shard, and the first at padding.

        The bits of a logit do not depend on the other ids.
        """

    def bag_sums(
        self,
        matrix: Tensor,  # [R, H]
        indices: Tensor,  # [M] int64 rows of the matrix, or with a shard global ids
        factors: Tensor,  # [M] fp32; 0: no term, even if the matrix is not finite there
        offsets: Tensor,  # [S + 1] int64, the first of the M terms of each sum
        out: Tensor,  # [S, H]
        shard: Shard | None = None,  # ids of other shards are left out
        *,
        accumulate: bool,
        workspace_bytes: int,
    ) -> None:
        """Write the S sums of factors * matrix[indices] to `out`, or add them, always in the same order."""

    def chunk_stats_of_logits(self, raw_logits: Tensor, row_scale: Tensor) -> Tensor:
        """Return `softmax_stats`, without entropy and telemetry, of fp32 products [N, C] times their scale [N]."""

    def write_columns(self, matrix: Tensor, columns: Tensor, values: Tensor) -> None:
        """Write values [N, K] fp32 to columns [N, K] int64 of a matrix [N, C].

        Columns outside [0, C) are skipped. The others are distinct within a row.
        """

    # They read the products of student and teacher with C columns, [2, N, C] fp32, rows a multiple of `SLAB_ROW_STEP`
    # apart. `stats` [10 or 13, N] is packed `DivergenceStats`.

    def divergence_softmaxes(self, heads: Heads, raw_logits: Tensor, stats: Tensor) -> None:
        """Fill the first `SOFTMAX_ROWS` rows of `stats` for these columns."""

    def divergence_sums(self, heads: Heads, raw_logits: Tensor, stats: Tensor) -> None:
        """Fill the other rows of `stats` from the first, which may cover more columns than C."""

    def divergence_grad_logits(
        self,
        heads: Heads,  # with a coefficient
        raw_logits: Tensor,
        stats: Tensor,  # may cover more columns than C
        gradient: Tensor,  # [N, C] out, of the student's dtype, rows as far apart as those of the products
    ) -> None:
        """Write the gradient of the student's products."""

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Compute `out = a @ b`, or `out += ...`, at least as precisely as `megatron_lce.core.matmul`."""

    def scale_rows(self, matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Compute `out = factor * matrix`, or `out += ...`, in fp32; the factor is [], and `out` may be the matrix."""

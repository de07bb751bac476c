"""A backend is a module with these functions; core calls them and knows no more of a backend."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron_lce.core.jsd_heads import Heads
from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, Shard
from megatron_lce.core.plan import Costs
from megatron_lce.core.rows import Rows, SoftmaxOfRow


class Backend(Protocol):
    """A backend supplies these primitives; core defines the types of their arguments."""

    def costs(self, hidden: Tensor, weight: Tensor, telemetry: bool) -> Costs:
        """Return the bytes that the primitives take beside inputs and results."""

    def prepare_rows(
        self,
        labels: Tensor,  # [N] int64 global ids
        temperature: Tensor | float,  # [N] if a tensor
        options: Options,
        shard: Shard,
    ) -> Rows:
        """Return what the primitives read of each row: NaN for an unusable temperature."""

    def softmax_stats(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        rows: Rows,
        options: Options,
        *,
        vocab_start: int,
        cache: LogitsCache | None = None,
        columns_at_once: int | None = None,  # of which the weight's rows may be copied; None: all
    ) -> Tensor:
        """Return statistics [chunks, K, N], see `megatron_lce.core.statistics`, and fill the cache, if any."""

    def sum_chunks(
        self,
        parts: Tensor,  # [chunks, K, N]
        all_extremes: Tensor,  # [S, E or more, N] of S disjoint sets of columns that make up the vocabulary
        num_columns: int,  # of the chunks
        entropy: bool,
        telemetry: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the vocabulary's extremes [E, N], and the chunks' sums, int64 [`num_sums`, N] in `UNIT`s."""

    def finish(
        self,
        packed_extremes: Tensor,  # [E, N]
        sums: Tensor,  # [`num_sums`, N]
        rows: Rows,  # [N]
        options: Options,
        outputs: LinearCrossEntropyOutput,  # out, [N] each, contiguous; None: not asked for
    ) -> SoftmaxOfRow:
        """Turn the vocabulary's statistics into outputs in nats: 0 in ignored rows, NaN in broken ones."""

    def row_terms(
        self,
        rows: Rows,
        softmax: SoftmaxOfRow,
        upstream: Sequence[Tensor | None],  # gradients of the `DIFFERENTIABLE` outputs, [N] fp32, of any stride
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Return packed `RowTerms`, [6, N], or [7, N] with a gradient of the mean logit; and a mask [N] of rows.

        The mask is true in rows whose gradient is not zero. A broken row's terms are NaN, and it is true there.
        """

    def grad_logits(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [C, H], the slab
        rows: Rows,  # labels are ids; the slab's rows are first_column and up
        terms: Tensor,  # [6 or 7, N], packed `RowTerms`
        out: Tensor,  # [N, C] of weight's dtype
        options: Options,
        *,
        first_column: int,
        entropy: bool,  # it has an upstream gradient
    ) -> None:
        """Write the gradient of one slab of the products `hidden @ weight.T` to `out`."""

    def grad_logits_from_cache(
        self,
        cache: LogitsCache,
        rows: Rows,
        terms: Tensor,  # [6 or 7, N], packed `RowTerms`
        options: Options,
        *,
        entropy: bool,  # it has an upstream gradient
        factored: bool,
    ) -> Tensor | None:
        """Turn kept exponentials into the gradient of their products, in place; no `mean_term` under a softcap.

        If `factored` (the cache then holds all columns), it may return factors [N]: the gradient is factor * cache.
        """

    def gathered_logits(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        tokens: Tensor,  # [M] int64 numbers of hidden's rows
        ids: Tensor,  # [M] int64 global ids; negative: padding
        rows: Rows,
        options: Options,
        shard: Shard,
    ) -> Tensor:
        """Return [2, M] fp32: base-2 logits, and ones; both 0 at an id of another shard, and the first at padding."""

    def gathered_sums(
        self,
        matrix: Tensor,  # [R, H]
        places: Tensor,  # [M] int64 numbers of matrix's rows; with a shard global ids
        factors: Tensor,  # [M] fp32; 0: no term, whatever the matrix holds
        offsets: Tensor,  # [S + 1] int64, where each sum's part of the M begins
        out: Tensor,  # [S, H]
        shard: Shard | None = None,  # ids of others are left out
        *,
        accumulate: bool,
        workspace_bytes: int,
    ) -> None:
        """Write the sums of factors * matrix[places] over each part to `out`, or add them, always in one order."""

    def product_stats(self, products: Tensor, row_scale: Tensor) -> Tensor:
        """Return `softmax_stats`, without entropy and telemetry, of fp32 products [N, C] times their scale [N]."""

    def write_columns(
        self,
        matrix: Tensor,  # [N, C]
        columns: Tensor,  # [N, K] int64, each at most once a row; outside [0, C): none
        values: Tensor,  # [N, K] fp32
    ) -> None:
        """Write values to some columns of each row."""

    def intermediate_bytes(self, num_columns: int) -> int:
        """Return the bytes per token that a reading of products with so many columns takes beside its arguments."""

    # Readings of the student's and the teacher's products with C columns, [2, N, C] fp32, rows a multiple of
    # `SLAB_ROW_STEP` apart. `stats` [6 or 9, N] is packed `JsdStats`.

    def softmaxes_of_products(self, heads: Heads, products: Tensor, stats: Tensor) -> None:
        """Fill the first `SOFTMAX_ROWS` rows of `stats`, of these columns."""

    def divergence_of_products(self, heads: Heads, products: Tensor, stats: Tensor) -> None:
        """Fill the other rows of `stats` from the first, which may be those of more columns than C."""

    def gradient_of_products(
        self,
        heads: Heads,  # with a coefficient
        products: Tensor,
        stats: Tensor,
        gradient: Tensor,  # [N, C] out, of the student's dtype, rows as far apart as the products'
    ) -> None:
        """Write the gradient of the student's products, from statistics that may be of more columns than C."""

    def product(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Compute `out = a @ b`, or `out += ...`, as `megatron_lce.core.products` does or better."""

    def scale(self, matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Compute `out = factor * matrix`, or `out += ...`, in fp32; one factor, [], or one for each row, [M].

        `out` [M, K] may be the matrix.
        """

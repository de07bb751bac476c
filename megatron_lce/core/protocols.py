"""What a backend supplies: a module with these functions. Core calls them and knows no more of a backend."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import LinearCrossEntropyOutput, Options, Shard
from megatron_lce.core.plan import Costs
from megatron_lce.core.rows import Rows, Saved
from megatron_lce.core.two_heads import Gradient, Pair


class Backend(Protocol):
    """The primitives; what their arguments mean is said where core defines the types."""

    def costs(self, hidden: Tensor, telemetry: bool) -> Costs:
        """Bytes that the primitives take beside inputs and results."""

    def prepare_rows(
        self,
        labels: Tensor,  # [N] int64 global ids
        temperature: Tensor | float,  # [N] if a tensor
        options: Options,
        shard: Shard,
    ) -> Rows:
        """What the primitives read of each row."""

    def softmax_stats(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [N] int32 ids into weight's rows; -1: owned by nobody here
        row_scale: Tensor,  # [N] fp32
        *,
        softcap_scale: float | None,
        entropy: bool,
        telemetry: bool,
        vocab_start: int,
        cache: LogitsCache | None = None,
    ) -> Tensor:
        """Statistics [chunks, K, N], see `megatron_lce.core.statistics`. Fills the cache, if any."""

    def merge_extremes(self, parts: Tensor, telemetry: bool) -> Tensor:
        """[S, E or more, N] of S disjoint sets of columns -> [E, N] of their union."""

    def sum_chunks(
        self,
        parts: Tensor,  # [chunks, K, N] of so many columns
        all_extremes: Tensor,  # [S, E or more, N] of S disjoint sets of columns, which are the whole vocabulary
        num_columns: int,
        entropy: bool,
        telemetry: bool,
    ) -> tuple[Tensor, Tensor]:
        """The whole vocabulary's extremes [E, N], and the sums of these columns int64 [`num_sums`, N], in `UNIT`s."""

    def finish(
        self,
        packed_extremes: Tensor,  # [E, N]
        sums: Tensor,  # [`num_sums`, N]
        rows: Rows,  # [N]
        options: Options,
        outputs: LinearCrossEntropyOutput,  # out, those that are asked for, contiguous
        order: Tensor | None,  # [N] int64, where in the flat outputs a row's go; None: N of them, as they are
    ) -> Saved:
        """Statistics of the whole vocabulary to outputs in nats: 0 in ignored rows, NaN in broken ones."""

    def row_terms(
        self,
        rows: Rows,
        saved: Saved,
        upstream: Sequence[Tensor | None],  # gradients of the flat `DIFFERENTIABLE` outputs, fp32
        options: Options,
        order: Tensor | None,  # as in `finish`
    ) -> tuple[Tensor, Tensor]:
        """[6, N], packed `RowTerms`, or [7, N] with a gradient of the mean logit; and [N] bool, where there is any.

        There is in a broken row, whose terms are NaN, whatever its upstream gradient.
        """

    def grad_logits(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [C, H], the slab
        rows: Rows,  # labels are ids; the slab's rows are first_column and up
        row_terms: Tensor,  # [6 or 7, N]
        out: Tensor,  # [N, C] of hidden's dtype
        *,
        first_column: int,
        softcap_scale: float | None,
        entropy: bool,
    ) -> None:
        """Gradient of one slab of the products `hidden @ weight.T`."""

    def grad_logits_from_cache(
        self,
        cache: LogitsCache,
        rows: Rows,
        row_terms: Tensor,  # [6 or 7, N]
        *,
        softcap: bool,
        entropy: bool,
        factored: bool,
    ) -> Tensor | None:
        """Kept exponentials to the gradient of their products, in place; not with a `mean_term` under a softcap.

        Where `factored`, of all columns, it may return numbers [N] which every gradient is still to be multiplied by.
        """

    def intermediate_bytes(self, num_columns: int) -> int:
        """Bytes per token that `read_products` takes beside its arguments for so many columns."""

    def read_products(
        self,
        pair: Pair,
        found: Tensor,  # [6, N], packed `Found`
        gradient: Gradient | None = None,
        *,
        softmaxes: bool = False,
        divergence: bool = False,
    ) -> None:
        """Read both heads' products with C columns up to three times, each time with what was found before.

        `softmaxes` fills the first four rows of `found`, `divergence` the last two; then comes the gradient of the
        student's products. What is not filled is read, where it is needed: with C columns of many, numbers of all.
        """

    def scale(self, matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """`out = factor * matrix`, or `out += factor * matrix`, in fp32; a factor [], or one for each row, [M]."""

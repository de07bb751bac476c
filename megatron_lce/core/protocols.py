"""What a backend supplies: a module with these functions. Core calls them and knows no more of a backend."""

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from megatron_lce.core.blocks import BlockBytes
from megatron_lce.core.jsd_stats import Head
from megatron_lce.core.options import LinearCrossEntropyOutput, Options
from megatron_lce.core.rows import Rows, Saved


class LogitsCache(Protocol):
    """Exponentials of the first columns, kept from forward to become their gradient."""

    @property
    def exp(self) -> Tensor:
        """[N, C] of hidden's dtype, zeros behind its rows."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What the backend's `LogitsCache` is made of, `exp` first."""

    def select(self, rows: slice) -> Self:
        """A view of some of the rows."""


class CommonBackend(Protocol):
    """What every operation takes of its backend."""

    def prepare_rows(self, labels: Tensor, temperature: Tensor | float, options: Options) -> Rows: ...

    def scale(self, matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """`out = factor * matrix`, or `out += factor * matrix`, in fp32; a factor [], or one for each row, [M]."""


class CrossEntropyBackend(CommonBackend, Protocol):
    """The primitives of `linear_cross_entropy`; what they mean is said where core defines their types."""

    def new_cache(self, num_tokens: int, hidden: Tensor, options: Options) -> LogitsCache | None:
        """Room for what `logits_cache_bytes` allows; None: nothing is kept."""

    def kept_row_bytes(self, hidden: Tensor, num_columns: int) -> int | None:
        """What a cache of these columns takes for a token; None: nothing can be kept of such inputs."""

    def softmax_stats_bytes(self, hidden: Tensor, options: Options) -> BlockBytes:
        """What `softmax_stats` takes at most, for the group's largest shard."""

    def softmax_stats(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [N] int32
        row_scale: Tensor,  # [N] fp32
        *,
        softcap_scale: float | None,
        entropy: bool,
        telemetry: bool,
        vocab_start: int,
        cache: LogitsCache | None = None,
    ) -> Tensor:
        """[chunks, K, N], see `megatron_lce.core.softmax_stats`. Fills the cache, if any."""

    def merge_extremes(self, parts: Tensor, telemetry: bool) -> Tensor:
        """[S, E or more, N] of S disjoint sets of columns -> [E, N] of their union."""

    def sum_chunks(
        self,
        parts: Tensor,  # [chunks, K, N] of so many columns
        of_all: Tensor,  # [S, E or more, N] of S disjoint sets of columns, which are the whole vocabulary
        num_columns: int,
        entropy: bool,
        telemetry: bool,
    ) -> tuple[Tensor, Tensor]:
        """The whole vocabulary's extremes [E, N], and the sums of these columns int64 [`num_sums`, N], in `UNIT`s."""

    def finish(
        self,
        packed_extremes: Tensor,  # [E, N or more]
        sums: Tensor,  # [`num_sums`, as many]
        rows: Rows,  # [N]
        options: Options,
        outputs: LinearCrossEntropyOutput,  # out, those that are asked for, contiguous
        order: Tensor | None,  # [N] int64, where in the flat outputs a row's go; None: N of them, as they are
    ) -> Saved: ...

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

    def grad_logits_bytes(self, hidden: Tensor) -> BlockBytes:
        """What `grad_logits` takes for its output and its intermediates."""

    def grad_logits(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [C, H]
        rows: Rows,
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


class JsdBackend(CommonBackend, Protocol):
    """The primitives of `linear_jsd`. Logits are [N, C] fp32 in base 2, rows a multiple of `SLAB_ROW_STEP` apart."""

    def logits_bytes(self, student: Head, teacher: Head, num_columns: int) -> BlockBytes:
        """Both heads' logits, and what the functions that read them take beside them, of that many columns."""

    def logits(self, head: Head, row_scale: Tensor, out: Tensor, *, stats: bool) -> Tensor | None:
        """Logits; with `stats` also [S, 2, N] of S disjoint sets of their columns.

        That is the largest logit of each set and the sum of 2^(z - largest), which is NaN where not all are finite.
        """

    def merge_stats(self, student: Tensor, teacher: Tensor, out: Tensor) -> None:
        """Either head's, [S, 2, N] -> those of their union, [4, N]: the first rows of `Found`."""

    def divergence_parts(self, student: Tensor, teacher: Tensor, found: Tensor, *, beta: float) -> Tensor:
        """Logits of both heads and the first rows of `Found` -> [S, 2, N] sums: divergence, KL(p_student || m).

        At the ends of beta m is the teacher's p or the student's, and the second sum of no use at 0.
        """

    def sum_parts(self, parts: Tensor, out: Tensor) -> None:
        """[S, 2, N] -> [2, N]."""

    def grad_logits_bytes(self, student: Head, teacher: Head) -> BlockBytes | None:
        """What `grad_logits` takes for its output and copies of its inputs; None: of these heads it can make none."""

    def grad_logits(
        self,
        student: Head,  # [N, H_s], [C, H_s]
        teacher: Head,
        scale: Tensor,  # [N] fp32 factor from products to base-2 logits at a logits_scale of 1
        found: Tensor,  # [6, N], packed `Found`
        coefficient: Tensor,  # [N]; 0: no gradient
        out: Tensor,  # [N, C] of the student's dtype
        *,
        beta: float,
    ) -> None:
        """Gradient of one slab of the student's products, with no logits in memory."""

    def grad_logits_from_kept(
        self,
        student: Tensor,  # [N, C] logits
        teacher: Tensor,
        found: Tensor,
        coefficient: Tensor,
        tanh_scale: Tensor | None,  # [N] factor from the student's tanh to its logits; None without a softcap
        out: Tensor,
        *,
        beta: float,
    ) -> None:
        """The same from logits in memory."""

    def divergence_and_grad(
        self,
        student: Tensor,  # as in `grad_logits_from_kept`
        teacher: Tensor,
        found: Tensor,  # the last two rows are filled
        coefficient: Tensor,
        tanh_scale: Tensor | None,
        out: Tensor,
        *,
        beta: float,
    ) -> None:
        """The sums of `divergence_parts` and the gradient, where these columns are all, or at a beta of 0.

        There the gradient wants no sums, and they may be of some of the columns.
        """

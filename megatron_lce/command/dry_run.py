"""A step of the head without its arithmetic: the package runs on meta tensors, and live bytes and matmuls are counted.

The group only has a size, and the backend allocates what Triton's allocates on a Hopper GPU. Neither Triton nor a GPU
is needed.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_lce.core.logits_cache import LogitsCache
from megatron_lce.core.options import DIFFERENTIABLE_SCALARS, LinearCrossEntropyOutput, Options, Shard, Telemetry
from megatron_lce.core.plan import COLUMN_STEP, SLAB_ROW_STEP, ScratchBytes, ceil_div, fp32_scratch_bytes, round_up
from megatron_lce.core.rows import NUM_TERMS, RowInputs, RowSoftmax
from megatron_lce.core.statistics import CHUNK_COLUMNS, num_extremes, num_stats, num_sums

FP32 = torch.float32


class Counter(TorchDispatchMode):
    """Counts bytes of the storages made inside, and multiplications of matrix products.

    Memory that an operation of torch takes and gives back by itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0  # of these, some of which may be gone
        self.peak_bytes = 0
        self.multiplications = 0
        self.recomputed_logits = self.cached_logits = 0  # whose gradients the kernels of `AllocatingBackend` compute

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for a second

    @property
    def live_bytes(self) -> int:
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        self._bytes = sum(size for _, size in self._made.values())
        return self._bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = list(_tensors((*args, *(kwargs or {}).values())))
        out = _run(func, inputs, args, kwargs or {})
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[:2] if func.overloadpacket is torch.ops.aten.mm else args[1:3]
            self.multiplications += a.numel() * b.shape[1]
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for storage in (tensor.untyped_storage() for tensor in _tensors((out,))):
            if storage._cdata not in storages:
                _, replaced = self._made.get(storage._cdata, (None, 0))
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._bytes += storage.nbytes() - replaced
        if self._bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _run(func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
    """Run an operation; of few numbers on zeros, because torch's rules for meta tensors import its compiler."""
    if func.namespace != "aten" or not _makes_tensors(func) or any(tensor.numel() > 2**20 for tensor in inputs):
        return func(*args, **kwargs)
    args, kwargs = tree_map_only(Tensor, lambda x: torch.zeros_like(x, device="cpu"), (args, kwargs))
    return tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), func(*args, **kwargs))


@cache
def _makes_tensors(func: Any) -> bool:
    """Return whether an operation neither writes to its arguments nor returns views of them."""
    return all(value.alias_info is None for value in (*func._schema.arguments, *func._schema.returns))


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class SizedGroup(dist.ProcessGroup):
    """A group of so many ranks whose collectives do nothing."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]

    def allreduce(self, *_: Any) -> Any:
        return _Done()

    _allgather_base = _reduce_scatter_base = allreduce  # type: ignore[assignment]
    # Their names from torch 2.13 on.
    all_gather_single = reduce_scatter_single = allreduce  # type: ignore[assignment]


class MetaSink:
    """A buffer such as Megatron's `main_grad`, made before the step."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._buffer = weight, torch.empty_like(weight, dtype=FP32)

    def buffer(self) -> Tensor:
        return self._buffer

    def finish(self) -> Tensor:
        return self._weight.new_empty(()).expand_as(self._weight)


class AllocatingBackend:
    """The functions of `Backend` that `linear_cross_entropy` and `linear_token_loss` call."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def scratch_bytes(self, hidden: Tensor, weight: Tensor, telemetry: Telemetry) -> ScratchBytes:
        if weight.dtype == FP32:
            return fp32_scratch_bytes(weight.shape[1], 2, CHUNK_COLUMNS)
        return ScratchBytes(CHUNK_COLUMNS, tile_columns=2 * CHUNK_COLUMNS)

    def prepare_rows(self, labels: Tensor, temperature: Tensor | float, options: Options, shard: Shard) -> RowInputs:
        return RowInputs(*(torch.empty_like(labels, dtype=dtype) for dtype in (torch.int32, FP32, FP32)))

    def softmax_stats(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: RowInputs,
        options: Options,
        *,
        vocab_start: int,
        cache: LogitsCache | None = None,
        max_copied_columns: int | None = None,
    ) -> Tensor:
        self._counter.multiplications += hidden.numel() * weight.shape[0]
        stats_rows = num_stats(options.entropy, options.telemetry)
        stats = hidden.new_empty(ceil_div(weight.shape[0], CHUNK_COLUMNS), stats_rows, hidden.shape[0], dtype=FP32)
        parts = _split(hidden), _split(weight[:max_copied_columns])
        del parts
        return stats

    def merge_chunks(
        self, stats: Tensor, all_extremes: Tensor, num_columns: int, entropy: bool, telemetry: Telemetry
    ) -> tuple[Tensor, Tensor]:
        num_tokens = stats.shape[2]
        sums = stats.new_empty(num_sums(entropy, telemetry), num_tokens, dtype=torch.int64)
        return stats.new_empty(num_extremes(telemetry), num_tokens), sums

    def write_outputs(
        self,
        packed_extremes: Tensor,
        sums: Tensor,
        rows: RowInputs,
        options: Options,
        outputs: LinearCrossEntropyOutput,
    ) -> RowSoftmax:
        requested = (True, True, options.entropy, options.telemetry)
        others: list[Any] = [torch.empty_like(rows.scale) if is_requested else None for is_requested in requested]
        return RowSoftmax(packed_extremes[0], *others)

    def row_terms(
        self, rows: RowInputs, softmax: RowSoftmax, upstream: Sequence[Tensor | None], options: Options
    ) -> tuple[Tensor, Tensor]:
        num_tokens, with_mean = rows.scale.shape[0], upstream[DIFFERENTIABLE_SCALARS.index("mean_logit")] is not None
        terms = rows.scale.new_empty(NUM_TERMS + with_mean, num_tokens)
        return terms, torch.empty_like(rows.scale, dtype=torch.bool)

    def grad_logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: RowInputs,
        terms: Tensor,
        out: Tensor,
        options: Options,
        *,
        slab_start: int,
        entropy: bool,
    ) -> None:
        self._counter.multiplications += hidden.numel() * weight.shape[0]
        self._counter.recomputed_logits += out.numel()
        parts = _split(hidden), _split(weight)
        del parts

    def grad_logits_from_cache(
        self, cache: LogitsCache, rows: RowInputs, terms: Tensor, options: Options, *, entropy: bool, factored: bool
    ) -> Tensor | None:
        self._counter.cached_logits += cache.exp.numel()
        factored = factored and not (options.softcap or terms.shape[0] > NUM_TERMS or entropy)
        return torch.empty_like(rows.scale) if factored and cache.exp.dtype == torch.bfloat16 else None

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        self._counter.multiplications += a.numel() * b.shape[1]
        parts = _split(a, 3, torch.bfloat16), _split(b, 3, torch.bfloat16)
        del parts

    def scale_rows(self, matrix: Tensor, factor: Tensor, out: Tensor, *, accumulate: bool) -> None:
        pass


def _split(matrix: Tensor, number: int = 2, dtype: torch.dtype = torch.float16) -> Any:
    """Allocate the parts of an fp32 matrix and, of fp16 parts, the powers of its rows."""
    if matrix.dtype != FP32:
        return None
    parts = matrix.new_empty(matrix.shape[0], number * round_up(matrix.shape[1], SLAB_ROW_STEP), dtype=dtype)
    return parts, matrix.new_empty(round_up(matrix.shape[0], COLUMN_STEP)) if dtype == torch.float16 else None

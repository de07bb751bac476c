"""What a call takes, as torch's dispatcher sees it: memory on a CPU, where no allocator tells, and products."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_live_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """Most bytes that storages made during the call held at once, and what it returned.

    What an operation of torch takes and gives back by itself is not seen.
    """
    with _LiveStorages() as live:
        result = call()
    return live.peak, result


def kept_bytes(call: Callable[[], Any]) -> int:
    """Bytes of the storages made during the call that are still alive while its result is."""
    with _LiveStorages() as live:
        result = call()
    kept = sum(size for ref, size in live.alive.values() if not ref.expired())
    del result
    return kept


class Products(TorchDispatchMode):
    """[m, k] @ [k, n] of the matrix products inside the context, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def logits_in_gradients(self, hidden_size: int, parts: int = 1) -> int:
        """Tokens times columns of the products that give gradients of hidden and weight, of both together.

        Each product is made of `parts`, see `parts_of_a_product`.
        """
        return sum(m * k for m, k, n in self.shapes if n == hidden_size) // parts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[:2] if func.overloadpacket is torch.ops.aten.mm else args[1:3]
            self.shapes.append((*a.shape, b.shape[1]))
        return func(*args, **(kwargs or {}))


def parts_of_a_product(dtype: torch.dtype, backend: str, device: torch.device) -> int:
    """On a GPU the triton backend makes an fp32 product of six products of bf16 parts."""
    return 6 if dtype == torch.float32 and backend == "triton" and device.type == "cuda" else 1


class _LiveStorages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

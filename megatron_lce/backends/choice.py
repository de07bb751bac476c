"""The choice of a backend: by configuration and hardware alone, so that ranks agree."""

import importlib.util
import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any, cast

import torch

from megatron_lce.backends.torch import primitives as torch_backend
from megatron_lce.core.options import BackendName
from megatron_lce.core.protocols import Backend


def load_backend(backend: BackendName, device: torch.device) -> Backend:
    """Return the module that supplies the primitives; "reference" has none of its own and gets torch's."""
    if backend in ("torch", "reference") or (backend == "auto" and device.type != "cuda"):
        return torch_backend
    obstacle = auto_obstacle(device) if backend == "auto" else triton_obstacle(device)
    if obstacle is None:
        return _triton_backend()
    if backend == "triton":
        raise ValueError(f"backend must be one that can run here, got 'triton', but {obstacle}")
    _warn_once(obstacle)
    return torch_backend


@lru_cache
def _triton_backend() -> Backend:
    from megatron_lce.backends.triton import primitives

    if torch.version.hip is None:
        return primitives
    names = [name for name in vars(Backend) if not name.startswith("_")]
    return cast(Backend, SimpleNamespace(**{name: _untried(getattr(primitives, name)) for name in names}))


def _untried(primitive: Callable[..., Any]) -> Callable[..., Any]:
    """Return the primitive, whose errors say that nobody has run it on an AMD GPU, and what to do."""
    from triton.errors import TritonError

    @wraps(primitive)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return primitive(*arguments, **keywords)
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError) as error:
            raise RuntimeError(
                f"{primitive.__name__} failed on this AMD GPU, where nobody has run its Triton kernels; "
                f"use backend='torch' there: {error}"
            ) from error

    return call


@lru_cache
def _warn_once(obstacle: str) -> None:
    warnings.warn(f"megatron_lce runs on its torch backend, which is slower: {obstacle}", UserWarning, stacklevel=4)


def describe_backend(backend: BackendName, device: torch.device) -> str:
    """Describe which backend runs on this device and, if a GPU's is not triton, why."""
    obstacle = auto_obstacle(device) if backend == "auto" else triton_obstacle(device)
    if backend == "auto":
        on_gpu = "triton" if obstacle is None else f"torch, not triton: {obstacle}"
        return on_gpu if device.type == "cuda" else "torch"
    return f"triton, which cannot run: {obstacle}" if backend == "triton" and obstacle is not None else backend


def auto_obstacle(device: torch.device) -> str | None:
    """Return why "auto" does not take Triton for tensors of this device, or None if it does."""
    if torch.version.hip is None or device.type != "cuda":
        return triton_obstacle(device)
    return triton_obstacle(device) or "nobody has run its kernels on an AMD GPU; backend='triton' asks for them"


def triton_obstacle(device: torch.device) -> str | None:
    """Return why Triton cannot run on tensors of this device, or None if it can."""
    if not _triton_installed():
        return "triton is not installed"
    if device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return f"Triton needs compute capability 8.0 or newer, this is {torch.cuda.get_device_capability(device)}"
        return None
    if device.type == "cpu":
        import triton

        return None if triton.knobs.runtime.interpret else "CPU tensors need Triton's interpreter (TRITON_INTERPRET=1)"
    return f"Triton does not run on device type {device.type!r}"


@lru_cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None

"""The choice of a backend by configuration and hardware alone, so that all ranks choose the same."""

import importlib.util
from functools import lru_cache

import torch

from megatron_lce.backends.torch import primitives as torch_backend
from megatron_lce.core.backend import Backend
from megatron_lce.core.eager import warn
from megatron_lce.core.options import BackendName


def load_backend(backend: BackendName, device: torch.device) -> Backend:
    """Return the module that supplies the primitives."""
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return torch_backend
    obstacle = triton_obstacle(backend, device)
    if obstacle is None:
        from megatron_lce.backends.triton import primitives

        if backend == "triton" and device.type == "cuda" and torch.version.hip is not None:
            _warn_once("nobody has run the Triton kernels on an AMD GPU: if one fails there, use backend='torch'")
        return primitives
    if backend == "triton":
        raise ValueError(f"backend must be one that can run here, got 'triton', but {obstacle}")
    _warn_once(f"megatron_lce runs on its torch backend, which is slower: {obstacle}")
    return torch_backend


@lru_cache
def _warn_once(message: str) -> None:
    warn(message)


def describe_backend(backend: BackendName, device: torch.device) -> str:
    """Describe which backend runs on this device and, if a GPU does not run triton, why."""
    if backend != "auto" or device.type != "cuda":
        return "torch" if backend == "auto" else backend
    obstacle = triton_obstacle(backend, device)
    return "triton" if obstacle is None else f"torch, not triton: {obstacle}"


def triton_obstacle(backend: BackendName, device: torch.device) -> str | None:
    """Return why Triton does not run on this device if this backend is requested, or None if it does."""
    if not _triton_installed():
        return "triton is not installed"
    if device.type == "cuda" and torch.version.hip is not None:
        on_amd = "nobody has run its kernels on an AMD GPU; backend='triton' asks for them"
        return on_amd if backend == "auto" else None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return None if capability >= (8, 0) else f"Triton needs compute capability 8.0 or newer, this is {capability}"
    if device.type == "cpu":
        try:
            import triton
        except ModuleNotFoundError as error:
            return f"its interpreter needs {error.name}, which is not installed"
        return None if triton.knobs.runtime.interpret else "CPU tensors need Triton's interpreter (TRITON_INTERPRET=1)"
    return f"Triton does not run on device type {device.type!r}"


@lru_cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None

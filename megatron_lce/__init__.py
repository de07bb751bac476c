"""Fused linear cross-entropy for Megatron-LM: the loss of a vocab-sharded head in less memory and time."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lce.public import *  # noqa: F403

__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    """Load `megatron_lce.public` when a name of it is read first: the command's help answers without torch."""
    if name == "__all__" or not name.startswith("_"):
        public = importlib.import_module("megatron_lce.public")
        globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

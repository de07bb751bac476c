"""Warnings that point at the line of a user's that led to them."""

import sys
import warnings

from megatron_lce.core.eager import eager

_OURS = ("megatron_lce.", "torch.", "megatron.core.", "contextlib.")


@eager
def warn(message: str) -> None:
    """Warn at the last line before this package, torch and megatron-core, through which a model calls its head."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)

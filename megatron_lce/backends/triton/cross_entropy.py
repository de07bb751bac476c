"""The Triton backend: the primitives of this package, under the names that every backend has."""

from megatron_lce.backends.triton.grad_logits import grad_logits, grad_logits_bytes, grad_logits_from_cache
from megatron_lce.backends.triton.logits_cache import LogitsCache, kept_row_bytes, new_cache
from megatron_lce.backends.triton.merge_stats import merge_extremes, sum_chunks
from megatron_lce.backends.triton.rows import finish, prepare_rows, row_terms
from megatron_lce.backends.triton.scale import scale
from megatron_lce.backends.triton.softmax_stats import softmax_stats, softmax_stats_bytes

__all__ = [
    "LogitsCache",
    "finish",
    "grad_logits",
    "grad_logits_bytes",
    "grad_logits_from_cache",
    "kept_row_bytes",
    "merge_extremes",
    "new_cache",
    "prepare_rows",
    "row_terms",
    "scale",
    "softmax_stats",
    "softmax_stats_bytes",
    "sum_chunks",
]

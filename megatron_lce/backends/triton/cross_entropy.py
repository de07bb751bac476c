"""The Triton backend: the primitives of this package, under the names that every backend has."""

from megatron_lce.backends.triton.grad_logits import grad_logits, grad_logits_bytes, grad_logits_from_cache
from megatron_lce.backends.triton.merge_stats import merge_stats
from megatron_lce.backends.triton.rows import finish, prepare_rows, row_terms
from megatron_lce.backends.triton.softmax_stats import LogitsCache, cache_columns, softmax_stats, softmax_stats_bytes

__all__ = [
    "LogitsCache",
    "cache_columns",
    "finish",
    "grad_logits",
    "grad_logits_bytes",
    "grad_logits_from_cache",
    "merge_stats",
    "prepare_rows",
    "row_terms",
    "softmax_stats",
    "softmax_stats_bytes",
]

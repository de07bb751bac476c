"""The Triton backend's primitives, under the names of the `Backend` protocol."""

from megatron_lce.backends.triton.divergence import (
    divergence_grad_logits,
    divergence_softmaxes,
    divergence_sums,
)
from megatron_lce.backends.triton.fp32_split import matmul
from megatron_lce.backends.triton.grad_logits import grad_logits
from megatron_lce.backends.triton.indexed_dot import bag_sums, indexed_logits, write_columns
from megatron_lce.backends.triton.merge_stats import chunk_stats_of_logits, merge_chunks
from megatron_lce.backends.triton.row_values import prepare_rows, row_terms, write_outputs
from megatron_lce.backends.triton.scale_rows import scale_rows
from megatron_lce.backends.triton.softmax_stats import softmax_stats
from megatron_lce.backends.triton.tiles import scratch_bytes

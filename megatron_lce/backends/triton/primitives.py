"""The Triton backend's primitives, under the names of the `Backend` protocol."""

from megatron_lce.backends.triton.divergence import (
    divergence_of_products,
    gradient_of_products,
    intermediate_bytes,
    softmaxes_of_products,
)
from megatron_lce.backends.triton.fp32_split import matmul
from megatron_lce.backends.triton.grad_logits import grad_logits, grad_logits_from_cache
from megatron_lce.backends.triton.indexed_dot import bag_sums, indexed_logits, write_columns
from megatron_lce.backends.triton.merge_stats import product_stats, sum_chunks
from megatron_lce.backends.triton.row_values import finish, prepare_rows, row_terms
from megatron_lce.backends.triton.scale import scale
from megatron_lce.backends.triton.softmax_stats import softmax_stats
from megatron_lce.backends.triton.tiles import costs

"""Logprobs and entropy from materialised vocab-parallel logits: what a training program does without the fused head."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


def vocab_parallel_log_softmax(logits: Tensor) -> Tensor:
    """log p of this rank's columns, [..., V / tp]; the row's normaliser collects the gradients of every rank."""
    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits.detach().amax(-1, keepdim=True)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits - largest
    total = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1, keepdim=True))
    return shifted - copy_to_tensor_model_parallel_region(total.log())


def logprobs_and_entropy(
    logits: Tensor,  # [..., V / tp], this rank's columns
    labels: Tensor,  # [...] int64 global vocabulary ids
    temperature: float,
    vocab_size: int,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """fp32 log p(label) and entropy of softmax(logits / temperature) over the first `vocab_size` columns, [...].

    Every sum over ranks is Megatron's all-reduce whose gradient passes unchanged, so each rank's logits get the whole
    gradient. Ignored rows are 0.
    """
    columns = logits.shape[-1]
    start = parallel_state.get_tensor_model_parallel_rank() * columns
    ids = torch.arange(start, start + columns, device=logits.device)
    padded = ids >= vocab_size
    log_p = vocab_parallel_log_softmax((logits.float() / temperature).masked_fill(padded, -torch.inf))
    local = labels - start
    owned = (local >= 0) & (local < columns)
    logprobs = log_p.gather(-1, local.clamp(0, columns - 1)[..., None])[..., 0].masked_fill(~owned, 0.0)
    # A padded column is -inf with probability 0; its product must be 0, not NaN.
    entropy = -(log_p.exp() * log_p.masked_fill(padded, 0.0)).sum(-1)
    logprobs, entropy = (reduce_from_tensor_model_parallel_region(x) for x in (logprobs, entropy))
    ignored = labels == ignore_index
    return logprobs.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)

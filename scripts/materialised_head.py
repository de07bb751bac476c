"""Logprobs and entropy from materialised vocab-parallel logits: what a training program does without the fused head."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor


def logprobs_and_entropy(
    logits: Tensor,  # [..., V / tp], this rank's columns
    labels: Tensor,  # [...] int64 global vocabulary ids
    temperature: float,
    vocab_size: int,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """fp32 log p(label) and entropy of softmax(logits / temperature) over the first `vocab_size` columns, [...].

    With m the row's maximum, S = sum exp(z - m) and M = sum exp(z - m) (z - m) over all ranks: log p = z_label - m -
    log S and entropy = log S - M / S. Every sum over ranks is Megatron's all-reduce whose gradient passes unchanged, so
    each rank's logits get the whole gradient. Ignored rows are 0.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    columns = logits.shape[-1]
    start = parallel_state.get_tensor_model_parallel_rank() * columns
    ids = torch.arange(start, start + columns, device=logits.device)
    z = (logits.float() / temperature).masked_fill(ids >= vocab_size, -torch.inf)
    largest = z.detach().amax(-1)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    z = z - largest[..., None]
    weights = z.exp()
    total = reduce_from_tensor_model_parallel_region(weights.sum(-1))
    # A padded column is -inf with weight 0; its product must be 0, not NaN.
    moment = reduce_from_tensor_model_parallel_region((weights * z.masked_fill(ids >= vocab_size, 0.0)).sum(-1))
    local = labels - start
    owned = (local >= 0) & (local < columns)
    label_z = z.gather(-1, local.clamp(0, columns - 1)[..., None])[..., 0]
    label_z = reduce_from_tensor_model_parallel_region(label_z.masked_fill(~owned, 0.0))
    ignored = labels == ignore_index
    log_total = total.log()
    return (label_z - log_total).masked_fill(ignored, 0.0), (log_total - moment / total).masked_fill(ignored, 0.0)

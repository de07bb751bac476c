"""The oracle and its yardstick: materialised logits, plain autograd, one rank. It shares no code with the backends."""

import torch
from torch import Tensor

from megatron_lce.core.options import LinearCrossEntropyOutput


def reference_linear_cross_entropy(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [N] ids into weight's rows
    temperature: float | Tensor = 1.0,  # [N] if a tensor
    *,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,  # columns at or past it are padding
    entropy: bool = True,
    telemetry: bool = False,
    logits_dtype: torch.dtype | None = None,
    candidates: Tensor | None = None,  # [N, K]; negative: padding
) -> LinearCrossEntropyOutput:
    """Outputs of every row: products in the inputs' dtype, what follows them in fp32, or in fp64 if the inputs are.

    Of fp64 inputs that is the oracle, of others what a user writes in eager PyTorch.
    """
    if hidden.dtype != weight.dtype:  # an fp32 head
        hidden = hidden.to(weight.dtype)
    num_columns = weight.shape[0] if vocab_size is None else min(vocab_size, weight.shape[0])
    products = hidden @ weight[:num_columns].T  # [N, V]
    products = products if products.dtype == torch.float64 else products.float()
    if logits_dtype is not None:  # the gradient passes
        products = products + (products.detach().to(logits_dtype).to(products.dtype) - products.detach())
    logits = products * logits_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    ignored = labels == ignore_index
    off_vocab = (labels < 0) | (labels >= num_columns)
    broken = off_vocab
    if isinstance(temperature, Tensor):
        usable = (temperature > 0) & temperature.isfinite()
        broken = broken | ~usable
        temperature = torch.where(usable, temperature, 1.0)[:, None]
    logits = logits / temperature
    nan_where_broken = torch.ones_like(logits[:, 0]).masked_fill(broken & ~ignored, torch.nan)

    all_logprobs = logits.log_softmax(dim=-1)
    logprobs = all_logprobs.gather(1, torch.where(off_vocab, 0, labels)[:, None])[:, 0]
    row_entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1) if entropy else None

    def finish(value: Tensor) -> Tensor:
        # A factor, not a fill: the gradient of a broken row is NaN too.
        return torch.where(ignored, 0.0, value * nan_where_broken)

    statistics: dict[str, Tensor] = {}
    if telemetry:
        detached = logits.detach()
        row_is_nan = broken | detached.isnan().any(dim=-1)
        statistics = {
            "max_logit": finish(detached.amax(dim=-1)),
            "min_logit": finish(detached.amin(dim=-1)),
            "argmax": torch.where(ignored, 0, torch.where(row_is_nan, -1, detached.argmax(dim=-1))),
            "sum_pi_squared": finish(all_logprobs.detach().exp().square().sum(dim=-1)),
            "logits_norm": finish(detached.norm(dim=-1)),
            "mean_logit": finish(logits.mean(dim=-1)),
        }
    if candidates is not None:
        factor = (candidates >= 0).to(logits.dtype).masked_fill(candidates >= num_columns, torch.nan)
        factor = factor.masked_fill(ignored[:, None], 0.0)  # NaN would reach the gradient of the row
        candidate_logprobs = all_logprobs.gather(1, candidates.clamp(0, num_columns - 1)) * factor
        candidate_logprobs = candidate_logprobs * nan_where_broken[:, None]
        statistics["candidate_logprobs"] = torch.where(ignored[:, None], 0.0, candidate_logprobs)
    return LinearCrossEntropyOutput(
        finish(logprobs),
        None if row_entropy is None else finish(row_entropy),
        finish(logits.logsumexp(dim=-1)),
        **statistics,
    )

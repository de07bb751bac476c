"""`linear_cross_entropy`: checks the arguments, chooses a backend, and runs it."""

from dataclasses import fields

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.checks import validation
from megatron_lce.checks.together import checked_together
from megatron_lce.core.one_head import OneHead
from megatron_lce.core.options import (
    WORKSPACE_BYTES,
    BackendName,
    LinearCrossEntropyOutput,
    Options,
    Telemetry,
    WeightGradSink,
)
from megatron_lce.core.passes import forward_with_gradient


@validation.renamed("skip_ignored", "skip_masked")
def linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # [...]
    *,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float | Tensor = 1.0,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    entropy: bool = True,
    telemetry: Telemetry = False,
    logits_dtype: torch.dtype | None = None,
    candidates: Tensor | None = None,
    skip_ignored: bool | int = False,
    logits_cache_bytes: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    reduce_grad_hidden: bool = True,
    backend: BackendName = "auto",
    weight_grad_sink: WeightGradSink | None = None,
) -> LinearCrossEntropyOutput:
    """Per-token logprobs, entropy and log-sum-exp of a vocab-sharded LM head, without its fp32 logits.

    With `z = softcap * tanh(logits_scale * hidden @ weight.T / softcap) / temperature` over the whole vocabulary and
    `p = softmax(z)`, accumulated in fp32: `logprobs = log p[label]`, `lse = logsumexp(z)`,
    `entropy = -sum(p log p)`. Gradients: `d logprobs / dz = 1[label] - p`, `d lse / dz = p`,
    `d entropy / dz = -p (log p + entropy)`, with `telemetry` `d mean_logit / dz = 1 / columns`. Each output takes its
    own upstream gradient per token, which must be equal on every rank of the group. Each of R ranks passes

                             hidden          weight       labels, outputs
        tensor parallel      [s, ..., H]     [V / R, H]   [s, ...]
        sequence parallel    [s / R, ..., H] [V / R, H]   [s, ...]

    DTensors over one mesh dimension need no group: place weight as `Shard(0)`, and hidden as `Replicate()`, or as
    `Shard(0)` for sequence parallelism. Gradients have the same placements; outputs are plain tensors.

    Args:
        hidden: [..., H], fp32, bf16 or fp16.
        weight: [V_local, H], this rank's rows of the vocabulary, of hidden's dtype; or fp32 with 16-bit hidden states,
            which are then multiplied exactly, as if they were fp32, too; the weight gradient is fp32.
        labels: [...] int64 global vocabulary ids. A label that no rank owns makes its row NaN (see `check_labels`).
        tp_group: the ranks that the vocabulary is sharded over; `None`: the weight is whole.
        sequence_parallel: hidden is sharded along its first dimension: it is gathered inside, and its gradient
            reduce-scattered. No effect on a single rank.
        temperature: a positive float, or a floating tensor of labels' shape, without gradient; a row whose temperature
            is not positive and finite is NaN.
        logits_scale: factor on the products (MuP).
        softcap: bound of the logits before the temperature, as in Gemma; `None`: no bound.
        ignore_index: label of ignored rows, whose outputs are 0 and which get no gradient. A hidden state there that is
            not finite makes the weight gradient NaN, as in eager PyTorch, and maybe its own; not with `skip_ignored`.
        vocab_start: first global id of this shard; `None`: rank * V_local. Ids end before 2^31. Uneven shards: give it
            on every rank. With plain tensors, the host then waits for an all-reduce in every call.
        vocab_size: true size of the vocabulary; columns from it on are padding, without probability or gradient.
            `None`: no padding.
        entropy: False: `entropy` is None and costs nothing.
        telemetry: True: `max_logit`, `min_logit`, `argmax`, `sum_pi_squared`, `logits_norm` and `mean_logit` are
            filled; only `mean_logit` has a gradient. "mean_logit": it alone. False: they cost nothing.
        logits_dtype: torch.bfloat16: each product is rounded once, before scale, softcap and temperature, as a sampler
            rounds its logits (docs/numerics.md); backward is straight-through. `None`: never rounded.
        candidates: int64 [..., K] global ids, K for each label, in any order, repeated or not; negative: padding.
            `candidate_logprobs` [..., K] are then filled, with a gradient: 0 at padding, NaN at an id that no rank
            owns. Cost: K products of length H a token, and about 100 bytes an id in addition to the workspace.
        skip_ignored: leave ignored rows out of products and statistics; the same on every rank. True: the host waits
            once for the device to count them; backward also leaves out rows whose upstream gradients are all zero, and
            waits once more. An int: the number of rows that are not ignored; the host does not wait, and every output
            is NaN if the labels have another number. False: all rows are computed.
        logits_cache_bytes: logits are kept from forward to backward, in 16 bits, all or none: then backward recomputes
            none. `None`: all, where they take at most 8 H bytes a column of the largest shard, which is 4 H computed
            rows. An int: all, if they fit in it. 0: none, the least memory. None are kept with fp32 inputs, by the
            torch backend, and under a softcap with telemetry, a temperature tensor or a temperature of more than
            softcap / 8. Kept logits show in the entropy gradient of rows whose logits differ by less than about 0.3.
            Pass the same value on every rank; do not derive it from free memory.
        workspace_bytes: most memory of transient buffers, for any number of tokens. In addition, backward holds one
            fp32 accumulator: of the hidden-state gradient (4 N H bytes); or of the weight gradient (4 V_local H bytes;
            none with a sink), if the shard has fewer columns than there are tokens and the workspace holds its logits
            of 4096 tokens. Under `sequence_parallel` both passes hold the gathered hidden: all of it, or two blocks if
            backward sums the weight gradient.
        reduce_grad_hidden: False: the hidden-state gradient stays this rank's partial sum.
        backend: "triton", "torch", or "auto": triton on a GPU that Triton supports, torch elsewhere. A named backend
            that cannot run raises.
        weight_grad_sink: a `megatron_lce.core.options.WeightGradSink`, for integrations: receives the weight gradient,
            which is then not returned.

    Returns:
        Tensors of labels' shape, fp32 (`argmax` int64), the same bits on every rank of the group.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
        RuntimeError: in backward with `create_graph=True`.
    """
    given = locals()
    options = Options(**{field.name: given[field.name] for field in fields(Options)})  # named once, in the signature
    with checked_together("linear_cross_entropy", hidden, weight, labels, options, takes_dtensors=True) as checks:
        pass  # it takes nothing else
    return forward_with_gradient(OneHead(checks.call)).outputs

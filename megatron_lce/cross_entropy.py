"""`linear_cross_entropy`: validate, choose a backend, call."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from megatron_lce.arguments import Checks, checked_together, shaped
from megatron_lce.backends.reference import reference_linear_cross_entropy
from megatron_lce.compiled import as_one_node
from megatron_lce.core.autograd import linear_cross_entropy_autograd
from megatron_lce.core.call import Call
from megatron_lce.core.options import (
    WORKSPACE_BYTES,
    BackendName,
    LinearCrossEntropyOutput,
    Options,
    WeightGradSink,
)


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
    telemetry: bool = False,
    logits_dtype: torch.dtype | None = None,
    candidates: Tensor | None = None,
    skip_ignored: bool | int = False,
    logits_cache_bytes: int = 0,
    workspace_bytes: int = WORKSPACE_BYTES,
    reduce_grad_hidden: bool = True,
    backend: BackendName = "auto",
    weight_grad_sink: WeightGradSink | None = None,
) -> LinearCrossEntropyOutput:
    """Per-token logprobs, entropy and log-sum-exp of a vocab-sharded LM head, without its logits.

    With `z = softcap * tanh(logits_scale * hidden @ weight.T / softcap) / temperature` over the whole vocabulary and
    `p = softmax(z)`, accumulated in fp32: `logprobs = log p[label]`, `lse = logsumexp(z)`,
    `entropy = -sum(p log p)`. Gradients: `d logprobs / dz = 1[label] - p`, `d lse / dz = p`,
    `d entropy / dz = -p (log p + entropy)`; each output takes its own upstream gradient per token, which must be
    equal on every rank of the group. With `telemetry`, `d mean_logit / dz = 1 / columns`.

    hidden and weight may be DTensors over one mesh dimension, the weight placed as `Shard(0)` and hidden as
    `Replicate()`, or as `Shard(0)` for sequence parallelism. The mesh gives the group, gradients have the same
    placements, and outputs are plain tensors.

    Args:
        hidden: [..., H], fp32, bf16 or fp16; under `sequence_parallel` this rank's [s / tp, ..., H].
        weight: [V_local, H] of hidden's dtype, this rank's rows of the vocabulary; or fp32 beside 16-bit hidden states,
            which are then multiplied exactly, as if they were fp32 too, and the gradient is fp32.
        labels: [...] int64 global vocabulary ids; under `sequence_parallel` the full [s, ...]. A label that no rank
            owns makes its row NaN (see `check_labels`).
        tp_group: the ranks that the vocabulary is sharded over; `None`: the weight is whole.
        sequence_parallel: hidden is sharded along its first dimension; it is gathered inside and its gradient
            reduce-scattered. Nothing to do on a single rank.
        temperature: a positive float, or a floating tensor of labels' shape, one a token, without gradient; a row
            whose temperature is not positive and finite is NaN.
        logits_scale: factor on the products (MuP).
        softcap: bound of the logits before the temperature, as in Gemma; `None`: no bound.
        ignore_index: rows with this label have outputs 0 and no gradient.
        vocab_start: first global id of this shard; `None`: rank * V_local, all shards being equal. With uneven shards
            every rank passes its own.
        vocab_size: true size of the vocabulary; columns at or past it are padding, take no probability and get no
            gradient. `None`: every column counts.
        entropy: False: `entropy` is None and costs nothing.
        telemetry: True: `max_logit`, `min_logit`, `argmax`, `sum_pi_squared`, `logits_norm` and `mean_logit` are
            filled; only `mean_logit` has a gradient. False: they cost nothing.
        logits_dtype: torch.bfloat16: each product is rounded to it once, before scale, softcap and temperature, as a
            sampler rounds its logits (docs/precision.md); gradients pass the rounding as if it were not there. `None`:
            never rounded.
        candidates: int64 [..., K] global ids, K of them for each label, in any order, repeated or not; negative:
            padding. `candidate_logprobs` [..., K] are then filled, with a gradient: 0 at padding, NaN at an id that no
            rank owns. They cost K products of length H a token, and about 100 bytes an id beside the workspace.
        skip_ignored: leave ignored rows out of products and statistics. True: they are counted on the device, for which
            the host waits once, and backward leaves out rows whose upstream gradients are all zero too, for which it
            waits once more. An int: how many rows are not ignored, known to the host; nothing is looked at, and every
            output is NaN where it is not the labels' count. Every rank of the group passes the same. False: all rows
            are computed.
        logits_cache_bytes: most that this call keeps from forward to spare backward recomputation; nothing is kept of
            fp32 inputs, nor by the torch backend, and a second backward raises where something was. What is kept has 16
            bits, which shows in the entropy's gradient of rows whose logits differ by less than about 0.3. This number
            and workspace_bytes are the same on every rank, so never taken from free memory: ranks plan by them.
        workspace_bytes: most that transient buffers take, for any number of tokens. Beside it backward holds an fp32
            accumulator: of hidden's gradient (4 N H bytes) or, where the shard has fewer columns than there are tokens
            and they hold all its logits of 4096 tokens, of the weight's (4 V_local H bytes; none with a sink). Under
            `sequence_parallel` both passes hold the gathered hidden, in the latter case of a block of tokens.
        reduce_grad_hidden: False: hidden's gradient stays this rank's partial sum.
        backend: "triton", "torch", "reference" (one rank, materialised logits), or "auto": triton on a GPU that
            Triton supports, torch elsewhere. A named backend that cannot run raises.
        weight_grad_sink: for integrations: where the weight's gradient is added, instead of being returned; see
            `megatron_lce.core.options.WeightGradSink`.

    Returns:
        Tensors of labels' shape, fp32 (`argmax` int64), the same bits on every rank of the group.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
        RuntimeError: in backward with `create_graph=True`; in a second backward where logits were kept.
    """
    options = Options(
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        temperature=temperature,
        logits_scale=logits_scale,
        softcap=softcap,
        ignore_index=ignore_index,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        entropy=entropy,
        telemetry=telemetry,
        logits_dtype=logits_dtype,
        candidates=candidates,
        skip_ignored=skip_ignored,
        logits_cache_bytes=logits_cache_bytes,
        workspace_bytes=workspace_bytes,
        reduce_grad_hidden=reduce_grad_hidden,
        backend=backend,
        weight_grad_sink=weight_grad_sink,
    )
    with checked_together(
        "linear_cross_entropy", hidden, weight, labels, options, takes_dtensors=True, has_reference=True
    ) as checks:
        checks.head()
        checks.rest()
    return outputs_of(checks)


def outputs_of(checks: Checks) -> LinearCrossEntropyOutput:
    """The outputs of a call whose arguments are checked."""
    options = checks.options
    if checks.is_traced and options.backend != "reference" and options.weight_grad_sink is None:
        return as_one_node(checks.hidden, checks.weight, checks.labels, options)
    call = checks.call()
    return _reference(call) if options.backend == "reference" else linear_cross_entropy_autograd(call)


def _reference(call: Call) -> LinearCrossEntropyOutput:
    options = call.options
    with torch.autocast(call.hidden.device.type, enabled=False):
        outputs = reference_linear_cross_entropy(
            call.hidden,
            call.weight,
            call.labels,
            call.temperature,
            logits_scale=options.logits_scale,
            softcap=options.softcap,
            ignore_index=options.ignore_index,
            vocab_size=call.shard.columns,
            entropy=options.entropy,
            telemetry=options.telemetry,
            logits_dtype=options.logits_dtype,
            candidates=call.candidates,
        )
    outputs = shaped(outputs, call.shape)
    if isinstance(options.skip_ignored, bool):
        return outputs
    is_count = (call.labels != options.ignore_index).sum() == options.skip_ignored
    unless_nan = is_count.new_ones((), dtype=torch.float32).masked_fill_(~is_count, torch.nan)
    return tree_map_only(Tensor, lambda x: x * unless_nan if x.is_floating_point() else x.where(is_count, -1), outputs)

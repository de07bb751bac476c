"""`linear_cross_entropy`: validate, choose a backend, call."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.backends.choice import load_backend
from megatron_lce.backends.reference import reference_linear_cross_entropy
from megatron_lce.core import collectives, validation
from megatron_lce.core.autograd import linear_cross_entropy_autograd
from megatron_lce.core.options import Backend, LinearCrossEntropyOutput, Options, WeightGradSink


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
    logits_cache_bytes: int = 0,
    workspace_bytes: int = 512 * 2**20,
    reduce_grad_hidden: bool = True,
    backend: Backend = "auto",
) -> LinearCrossEntropyOutput:
    """Per-token logprobs, entropy and log-sum-exp of a vocab-sharded LM head, without its logits.

    With `z = softcap * tanh(logits_scale * hidden @ weight.T / softcap) / temperature` over the whole vocabulary and
    `p = softmax(z)`, accumulated in fp32: `logprobs = log p[label]`, `lse = logsumexp(z)`,
    `entropy = -sum(p log p)`. Gradients: `d logprobs / dz = 1[label] - p`, `d lse / dz = p`,
    `d entropy / dz = -p (log p + entropy)`; each output takes its own upstream gradient per token, which must be
    equal on every rank of the group.

    Args:
        hidden: [..., H], fp32, bf16 or fp16; under `sequence_parallel` this rank's [s / tp, ..., H].
        weight: [V_local, H] of hidden's dtype, this rank's rows of the vocabulary.
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
        telemetry: True: `max_logit`, `min_logit` and `argmax` are filled; they have no gradient.
        logits_cache_bytes: most that this call keeps from forward to spare backward recomputation; nothing is kept of
            fp32 inputs, nor by the torch backend, and a second backward raises where something was. What is kept has 16
            bits, which shows in the entropy's gradient of rows whose logits differ by less than about 0.3.
        workspace_bytes: most that transient buffers take, for any number of tokens. Beside it backward holds an fp32
            accumulator of hidden's gradient (4 N H bytes) and, under `sequence_parallel`, both passes the gathered
            hidden.
        reduce_grad_hidden: False: hidden's gradient stays this rank's partial sum.
        backend: "triton", "torch", "reference" (one rank, materialised logits), or "auto": triton on a GPU that
            Triton supports, torch elsewhere. A named backend that cannot run raises.

    Returns:
        fp32 tensors of labels' shape, the same bits on every rank of the group.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it, what it must be and what it was.
    """
    return _linear_cross_entropy(
        hidden,
        weight,
        labels,
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
        logits_cache_bytes=logits_cache_bytes,
        workspace_bytes=workspace_bytes,
        reduce_grad_hidden=reduce_grad_hidden,
        backend=backend,
    )


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
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
    logits_cache_bytes: int = 0,
    workspace_bytes: int = 512 * 2**20,
    reduce_grad_hidden: bool = True,
    backend: Backend = "auto",
    weight_grad_sink: WeightGradSink | None = None,
) -> LinearCrossEntropyOutput:
    """`linear_cross_entropy` with a place for the weight's gradient, for integrations."""
    validation.check_group(tp_group)
    for name, flag in (
        ("sequence_parallel", sequence_parallel),
        ("entropy", entropy),
        ("telemetry", telemetry),
        ("reduce_grad_hidden", reduce_grad_hidden),
    ):
        validation.check_flag(name, flag)
    ranks = collectives.group_size(tp_group)
    sequence_parallel = sequence_parallel and ranks > 1
    validation.check_tensors(hidden, weight, labels, ranks if sequence_parallel else 1)
    validation.check_temperature(temperature, labels)
    validation.check_number("logits_scale", logits_scale)
    validation.check_integer("ignore_index", ignore_index)
    validation.check_options(
        vocab_size=vocab_size,
        softcap=softcap,
        logits_cache_bytes=logits_cache_bytes,
        workspace_bytes=workspace_bytes,
        backend=backend,
    )
    first, num_columns = owned_columns(weight, tp_group, vocab_start, vocab_size)
    if sequence_parallel and not reduce_grad_hidden:
        raise ValueError("reduce_grad_hidden must be True with sequence_parallel, got False")

    options = Options(
        tp_group=tp_group if ranks > 1 else None,
        sequence_parallel=sequence_parallel,
        logits_scale=float(logits_scale),
        softcap=None if softcap is None else float(softcap),
        ignore_index=ignore_index,
        vocab_start=first,
        num_columns=num_columns,
        entropy=entropy,
        telemetry=telemetry,
        logits_cache_bytes=logits_cache_bytes,
        workspace_bytes=workspace_bytes,
        reduce_grad_hidden=reduce_grad_hidden,
        weight_grad_sink=weight_grad_sink,
    )
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat_labels = labels.reshape(-1)
    flat_temperature = temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature)
    if backend == "reference":
        flat = _reference(flat_hidden, weight, flat_labels, flat_temperature, options)
    else:
        primitives = load_backend(backend, hidden.device)
        flat = linear_cross_entropy_autograd(
            flat_hidden, weight.contiguous(), flat_labels, flat_temperature, options, primitives
        )
    return LinearCrossEntropyOutput(*(None if output is None else output.view(labels.shape) for output in flat))  # type: ignore[arg-type]


def owned_columns(
    weight: Tensor, tp_group: ProcessGroup | None, vocab_start: int | None, vocab_size: int | None
) -> tuple[int, int]:
    """The first global id of this rank's shard, and how many of its columns are vocabulary and not padding."""
    if vocab_start is not None:
        validation.check_integer("vocab_start", vocab_start, minimum=0)
    first = collectives.group_rank(tp_group) * weight.shape[0] if vocab_start is None else vocab_start
    num_columns = weight.shape[0] if vocab_size is None else min(max(vocab_size - first, 0), weight.shape[0])
    return first, num_columns


def _reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor, options: Options
) -> LinearCrossEntropyOutput:
    if options.tp_group is not None:
        raise ValueError("tp_group must have one rank for backend='reference', got a larger group")
    if options.vocab_start:
        raise ValueError(f"vocab_start must be 0 for backend='reference', got {options.vocab_start}")
    with torch.autocast(hidden.device.type, enabled=False):
        return reference_linear_cross_entropy(
            hidden,
            weight,
            labels,
            temperature,
            logits_scale=options.logits_scale,
            softcap=options.softcap,
            ignore_index=options.ignore_index,
            vocab_size=options.num_columns,
            entropy=options.entropy,
            telemetry=options.telemetry,
        )

"""`linear_cross_entropy`: validate, choose a backend, call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron_lce.backends.choice import load_backend
from megatron_lce.backends.reference import reference_linear_cross_entropy
from megatron_lce.core import collectives, validation
from megatron_lce.core.agreement import agreed_options
from megatron_lce.core.autograd import linear_cross_entropy_autograd
from megatron_lce.core.options import (
    WORKSPACE_BYTES,
    Backend,
    LinearCrossEntropyOutput,
    Options,
    WeightGradSink,
    outputs_asked_for,
)
from megatron_lce.core.products import laid_out
from megatron_lce.core.tokens import nan_unless
from megatron_lce.dtensors import local_arguments


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
    skip_ignored: bool | int = False,
    logits_cache_bytes: int = 0,
    workspace_bytes: int = WORKSPACE_BYTES,
    reduce_grad_hidden: bool = True,
    backend: Backend = "auto",
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
        telemetry: True: `max_logit`, `min_logit`, `argmax`, `sum_pi_squared`, `logits_norm` and `mean_logit` are
            filled; only `mean_logit` has a gradient. False: they cost nothing.
        skip_ignored: leave ignored rows out of products and statistics. True: they are counted on the device, for which
            the host waits once, and backward leaves out rows whose upstream gradients are all zero too, for which it
            waits once more. An int: how many rows are not ignored, known to the host; nothing is looked at, and every
            output is NaN where it is not the labels' count. Every rank of the group passes the same. False: all rows
            are computed.
        logits_cache_bytes: most that this call keeps from forward to spare backward recomputation; nothing is kept of
            fp32 inputs, nor by the torch backend, and a second backward raises where something was. What is kept has 16
            bits, which shows in the entropy's gradient of rows whose logits differ by less than about 0.3.
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
    arguments: dict[str, Any] = {  # not locals(), which torch.compile of torch 2.11 does not trace
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "tp_group": tp_group,
        "sequence_parallel": sequence_parallel,
        "temperature": temperature,
        "logits_scale": logits_scale,
        "softcap": softcap,
        "ignore_index": ignore_index,
        "vocab_start": vocab_start,
        "vocab_size": vocab_size,
        "entropy": entropy,
        "telemetry": telemetry,
        "skip_ignored": skip_ignored,
        "logits_cache_bytes": logits_cache_bytes,
        "workspace_bytes": workspace_bytes,
        "reduce_grad_hidden": reduce_grad_hidden,
        "backend": backend,
        "weight_grad_sink": weight_grad_sink,
    }
    if isinstance(hidden, DTensor) or isinstance(weight, DTensor):
        return linear_cross_entropy(**local_arguments(**arguments))
    if torch.compiler.is_compiling() and backend != "reference" and weight_grad_sink is None:
        return _as_one_node(**arguments)
    call = prepare_call(**arguments)
    if backend == "reference":
        flat = _reference(call)
        return LinearCrossEntropyOutput(*(None if output is None else output.view(labels.shape) for output in flat))  # type: ignore[arg-type]
    kernels = load_backend(backend, hidden.device)
    return linear_cross_entropy_autograd(*call.inputs, call.options, kernels, labels.shape)


def _as_one_node(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None,
    temperature: float | Tensor,
    skip_ignored: bool | int,
    entropy: bool,
    telemetry: bool,
    weight_grad_sink: None,
    **others: Any,
) -> LinearCrossEntropyOutput:
    """The call as torch.compile traces it, see `megatron_lce.compiled`."""
    per_token, counted = isinstance(temperature, Tensor), not isinstance(skip_ignored, bool)
    grad = torch.is_grad_enabled()
    outputs = torch.ops.megatron_lce.linear_cross_entropy(
        hidden,
        weight,
        labels,
        temperature=1.0 if per_token else temperature,
        temperatures=temperature if per_token else None,
        tp_group=None if tp_group is None else tp_group.group_name,
        entropy=entropy,
        telemetry=telemetry,
        skip_ignored=False if counted else skip_ignored,
        num_counted=skip_ignored if counted else None,
        needs_hidden=grad and hidden.requires_grad,
        needs_weight=grad and weight.requires_grad,
        # The compiler makes one node of equal ones, and one cache serves one backward. No two empty tensors are equal.
        itself=torch.empty(0, dtype=torch.uint8, device=hidden.device) if others["logits_cache_bytes"] else None,
        **others,
    )
    given = dict(zip(outputs_asked_for(entropy, telemetry), outputs, strict=False))
    return LinearCrossEntropyOutput(*(given.get(name) for name in LinearCrossEntropyOutput._fields))  # type: ignore[arg-type]


class Call(NamedTuple):
    """A validated call, its tokens in one dimension."""

    hidden: Tensor  # [N, H], under sequence parallel [N / tp, H]
    weight: Tensor  # [V_local, H], contiguous
    labels: Tensor  # [N]
    temperature: float | Tensor  # [N] if a tensor
    options: Options

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
        return self.hidden, self.weight, self.labels, self.temperature


def prepare_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    operation: str = "linear_cross_entropy",
    check: Callable[[], None] = lambda: None,
    **keywords: Any,
) -> Call:
    """Check the arguments of `linear_cross_entropy`, on every rank of the group at the first call of their kind.

    `check`: what else the operation requires; where it raises, or anything here does, on one rank, it does on all of
    them at that first call.

    Raises:
        TypeError, ValueError: see `linear_cross_entropy`.
    """

    def checked(ranks: int) -> Options:
        check()
        return checked_options(hidden, weight, labels, ranks, **keywords)

    options = agreed_options(
        keywords["tp_group"],
        checked,
        lambda: {"operation": operation, **_describe(hidden, weight, labels, keywords)},
        weight,
        keywords["vocab_start"],
        {"the shape of hidden": validation.shape_of(hidden)},
    )
    temperature = keywords["temperature"]
    return Call(
        laid_out(hidden.reshape(-1, hidden.shape[-1])),
        laid_out(weight.contiguous()),
        labels.reshape(-1),
        temperature.reshape(-1) if isinstance(temperature, Tensor) else float(temperature),
        options,
    )


def checked_options(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ranks: int,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    temperature: float | Tensor,
    vocab_start: int | None,
    vocab_size: int | None,
    backend: Backend,
    **others: Any,  # the fields of `Options` that are taken as they are
) -> Options:
    for name in ("entropy", "telemetry", "reduce_grad_hidden"):
        validation.check_flag(name, others[name])
    validation.check_flag("sequence_parallel", sequence_parallel)
    sequence_parallel = sequence_parallel and ranks > 1
    validation.check_tensors(hidden, weight, labels, ranks if sequence_parallel else 1)
    validation.check_temperature(temperature, labels)
    validation.check_number("logits_scale", others["logits_scale"])
    validation.check_integer("ignore_index", others["ignore_index"])
    validation.check_skip_ignored(others["skip_ignored"], labels.numel())
    validation.check_options(
        vocab_size=vocab_size,
        softcap=others["softcap"],
        logits_cache_bytes=others["logits_cache_bytes"],
        workspace_bytes=others["workspace_bytes"],
        backend=backend,
    )
    first, num_columns = owned_columns(weight, tp_group, vocab_start, vocab_size)
    if sequence_parallel and not others["reduce_grad_hidden"]:
        raise ValueError("reduce_grad_hidden must be True with sequence_parallel, got False")
    check_sink(others["weight_grad_sink"], weight)
    if backend == "reference":
        _check_reference(ranks, first, others["weight_grad_sink"])
    return Options(
        tp_group=tp_group if ranks > 1 else None,
        sequence_parallel=sequence_parallel,
        vocab_start=first,
        num_columns=num_columns,
        largest_shard=weight.shape[0],
        vocab_size=vocab_size,
        **others,
    )


def _describe(hidden: Tensor, weight: Tensor, labels: Tensor, keywords: dict[str, Any]) -> dict[str, Any]:
    """What every rank of a group must call with; values that may change from call to call by their types only."""
    own = {"tp_group", "vocab_start", "skip_ignored"}
    # In one order in every process, as a set of strings is not.
    by_type = ("temperature", "weight_grad_sink")
    return {
        "hidden": validation.kind_of(hidden),
        "weight": validation.kind_of(weight),
        "labels": validation.kind_of(labels[..., None]) if isinstance(labels, Tensor) else type(labels),
        "gradients": (torch.is_grad_enabled(), *(getattr(x, "requires_grad", None) for x in (hidden, weight))),
        **{name: value for name, value in keywords.items() if name not in own.union(by_type)},
        **{name: type(keywords[name]).__name__ for name in by_type},
        "skip_ignored": validation.kind_of_skipping(keywords["skip_ignored"]),
    }


def owned_columns(
    weight: Tensor, tp_group: ProcessGroup | None, vocab_start: int | None, vocab_size: int | None
) -> tuple[int, int]:
    """The first global id of this rank's shard, and how many of its columns are vocabulary and not padding."""
    if vocab_start is not None:
        validation.check_integer("vocab_start", vocab_start, minimum=0)
    first = collectives.group_rank(tp_group) * weight.shape[0] if vocab_start is None else vocab_start
    num_columns = weight.shape[0] if vocab_size is None else min(max(vocab_size - first, 0), weight.shape[0])
    return first, num_columns


def check_sink(sink: WeightGradSink | None, weight: Tensor) -> None:
    step = 16 // weight.element_size()
    if sink is not None and weight.shape[1] % step:
        raise ValueError(f"weight_grad_sink must be None where H is no multiple of {step}, got {tuple(weight.shape)}")


def _check_reference(ranks: int, vocab_start: int, sink: WeightGradSink | None) -> None:
    if ranks > 1:
        raise ValueError("tp_group must have one rank for backend='reference', got a larger group")
    if vocab_start:
        raise ValueError(f"vocab_start must be 0 for backend='reference', got {vocab_start}")
    if sink is not None:
        raise ValueError(f"weight_grad_sink must be None for backend='reference', got a {type(sink).__name__}")


def _reference(call: Call) -> LinearCrossEntropyOutput:
    options = call.options
    with torch.autocast(call.hidden.device.type, enabled=False):
        outputs = reference_linear_cross_entropy(
            *call.inputs,
            logits_scale=options.logits_scale,
            softcap=options.softcap,
            ignore_index=options.ignore_index,
            vocab_size=options.num_columns,
            entropy=options.entropy,
            telemetry=options.telemetry,
        )
    if isinstance(options.skip_ignored, bool):
        return outputs
    is_count = (call.labels != options.ignore_index).sum() == options.skip_ignored
    unless_nan = nan_unless(is_count)
    checked = {
        name: output * unless_nan if output.is_floating_point() else output.where(is_count, -1)
        for name, output in outputs._asdict().items()
        if output is not None
    }
    return outputs._replace(**checked)

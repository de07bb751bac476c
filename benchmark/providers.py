"""The heads that are compared: ours and its peers, each behind one small adapter.

A head is called as `head(hidden, weight, labels, mode)` and returns what the mode is about:

    fwd      logprobs, entropy         no gradient
    rl       logprobs, entropy         a random upstream gradient per token on each
    logprob  logprobs                  a random upstream gradient per token
    sft      mean of -logprobs         scalar

Our own (benchmark.ours) take all inputs instead, as `step(inputs, mode)`: some are told the upstream gradients.
Peers are imported when they are asked for and only then; one that is not installed is reported, never dropped.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmark import te_loss
from benchmark.ours import MIB, Ours, as_mode
from benchmark.shapes import choose

MODES = ("fwd", "rl", "logprob", "sft")

Head = Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, ...]] | Ours


@dataclass(frozen=True)
class Provider:
    """One head: how to load it, and what it can and cannot do.

    load          imports and returns what is called: a `Head`, or another case's loss
    modes         the modes it supports
    missing       why it does not support the others
    holds_logits  whether it keeps a tensor of N x V elements
    parallel      whether it runs under tensor and sequence parallelism
    package       the distribution whose version is reported; None: torch alone
    """

    name: str
    load: Callable[..., Any]
    modes: tuple[str, ...] = MODES
    missing: str = ""
    holds_logits: bool = False
    parallel: bool = False
    package: str | None = None


def _eager_head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
    logits = (hidden @ weight.T).float()
    if mode == "sft":
        return (F.cross_entropy(logits, labels),)
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax.gather(-1, labels[:, None]).squeeze(-1)
    if mode == "logprob":
        return (logprobs,)
    return logprobs, -(log_softmax.exp() * log_softmax).sum(-1)


def _group_of_all() -> ProcessGroup:
    """The group of all ranks; of this process alone where there is none yet."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def logits_of(hidden: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """By Megatron's product, which gathers hidden from the ranks of a sequence-parallel group."""
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    return linear_with_grad_accumulation_and_async_allreduce(
        input=hidden,
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=group.size() > 1,
        tp_group=group,
    )


def _load_megatron() -> Head:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = _group_of_all()

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
        losses = fused_vocab_parallel_cross_entropy(logits_of(hidden, weight, group), labels, group)
        return as_mode(mode, -losses, None)

    return head


def _load_te(overwrite_input: bool = False) -> Head:
    cross_entropy, group = te_loss.load(overwrite_input=overwrite_input), _group_of_all()

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
        logits = hidden @ weight.T if group.size() == 1 else logits_of(hidden, weight, group)
        losses = cross_entropy(logits[None], labels[None], group)
        return as_mode(mode, -losses.squeeze(0), None)

    return head


def _load_liger() -> Head:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
        reduction = "mean" if mode == "sft" else "none"
        # bias, class weights, ignore_index, z-loss, label smoothing: all off
        out = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, reduction)
        return (out[0],) if mode == "sft" else (-out[0],)

    return head


def load_verl(module: str) -> types.ModuleType:
    """A module of `verl.utils`, without importing verl, which pulls in Ray and more.

    Its folders are entered into `sys.modules` as bare packages that point at the installed ones.
    """
    if "verl" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("No module named 'verl'")
        for name in ("", "/utils", "/utils/megatron"):
            package = types.ModuleType(f"verl{name}".replace("/", "."))
            package.__path__ = [spec.submodule_search_locations[0] + name]
            sys.modules[package.__name__] = package
    return importlib.import_module(f"verl.utils.{module}")


def load_verl_kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    """verl's `linear_cross_entropy(hidden, weight, labels, temperature, reduction, group) -> (logprobs, entropy)`."""
    return load_verl("kernel.linear_cross_entropy").linear_cross_entropy


def _load_verl() -> Head:
    kernel, group = load_verl_kernel(), dist.group.WORLD if dist.is_initialized() else None
    parallel = group is not None and group.size() > 1

    def head(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> tuple[Tensor, ...]:
        if parallel:  # the kernel leaves both sums over the group to its caller
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        logprobs, entropy = kernel(hidden, weight, labels, 1.0, "none", group if parallel else None)
        return as_mode(mode, logprobs, entropy if mode in ("fwd", "rl") else None)

    return head


_GRADIENT = ("rl", "logprob", "sft")
_KNOWN_LOSS = {"modes": _GRADIENT, "missing": "is about gradients", "parallel": True}
_ONE_NUMBER = {"modes": ("sft",), "missing": "is about one upstream gradient for all tokens", "parallel": True}
_NO_ENTROPY = {"modes": ("logprob", "sft"), "missing": "gives no entropy"}
_LOGITS = {**_NO_ENTROPY, "holds_logits": True, "parallel": True}

PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("ours", Ours, parallel=True, holds_logits=True),
        Provider("ours-0", partial(Ours, 0), parallel=True),
        Provider("ours-cached", partial(Ours, 2**62), parallel=True, holds_logits=True),
        Provider("ours-token-640", partial(Ours, workspace_bytes=640 * MIB, token_loss=True), **_KNOWN_LOSS),
        Provider("ours-known-640", partial(Ours, workspace_bytes=640 * MIB, known_loss=True), **_ONE_NUMBER),
        Provider("eager", lambda: _eager_head, holds_logits=True),
        Provider("compile", lambda: torch.compile(_eager_head, dynamic=False), holds_logits=True),
        Provider("megatron", _load_megatron, **_LOGITS, package="megatron-core"),
        Provider("te", _load_te, **_LOGITS),
        Provider("te-overwrite", partial(_load_te, overwrite_input=True), **_LOGITS),
        Provider("liger", _load_liger, **_NO_ENTROPY, package="liger-kernel"),
        Provider("verl", _load_verl, parallel=True, package="verl"),
    )
}


def select_providers(names: str) -> list[Provider]:
    """Comma-separated names; `all` is every provider."""
    return [PROVIDERS[name] for name in choose("a provider", names, PROVIDERS)]

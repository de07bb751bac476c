"""`linear_token_loss`: the sum of a caller's loss, with gradients computed in forward: no logit is computed twice."""

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from megatron_lce.api.keywords import TokenLossOptions
from megatron_lce.checks import validation
from megatron_lce.checks.together import check_keywords, checked_together, keyword_options
from megatron_lce.core.call import Call
from megatron_lce.core.collectives import is_cuda_graph_capturing, wait_if_async
from megatron_lce.core.eager import without_autocast
from megatron_lce.core.known_loss import sum_of_losses
from megatron_lce.core.losses import Metrics, TokenLossFunction
from megatron_lce.core.one_head import OneHead
from megatron_lce.core.options import LinearCrossEntropyOutput

_codes: set[frozenset[Any]] = set()  # code of losses that the host has checked to be per-token


class TokenLoss(NamedTuple):
    """Result of `linear_token_loss`.

    loss     fp32 scalar, the sum over the tokens that are not ignored; call backward once, with any upstream gradient
             (one that is not finite makes the gradients of ignored rows NaN, too)
    outputs  for every token, of labels' shape, without gradient
    metrics  further results of the caller's loss, [*labels.shape, ...] each, without gradient; or {}
    """

    loss: Tensor
    outputs: LinearCrossEntropyOutput
    metrics: Metrics


@validation.renamed("skip_ignored", "skip_masked")
def linear_token_loss(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V_local, H]
    labels: Tensor,  # [...]
    loss: TokenLossFunction,
    *per_token: Tensor,  # [..., *] each
    **options: Unpack[TokenLossOptions],
) -> TokenLoss:
    """The sum over tokens of a caller's loss, with both gradients computed in forward: three products, not four.

        def loss(out, old_logprobs, advantages):
            ratio = (out.logprobs - old_logprobs).exp()
            return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages), {"ratio": ratio}

        result = megatron_lce.linear_token_loss(hidden, weight, labels, loss, old_logprobs, advantages)
        (result.loss / num_tokens).backward()

    Each block of tokens is finished before the next: its logits, kept in 16 bits, its losses, and both gradients. With
    fp32 inputs, or if a block has no room for the logits of 128 tokens, four products are computed as in
    `linear_cross_entropy`.

    Memory: the two gradients, `workspace_bytes`, and the fp32 sum of the weight gradient (4 V_local H bytes; none if
    the logits of all tokens fit into workspace and sum). Under `sequence_parallel` also the gathered hidden, and its
    gradient until it is scattered. Blocks also use the memory of the weight gradient, which is written after the last
    one (not with a sink, whose buffer exists before).

    Args:
        hidden, weight, labels: as in `linear_cross_entropy`, but no DTensors.
        loss: called with the `LinearCrossEntropyOutput` of n tokens, [n] each, and their part of each tensor of
            `per_token`, [n, ...]; returns their losses, [n] fp32, or a pair of losses and a dict of metrics [n, ...].
            It must treat each token for itself, because blocks are cut arbitrarily: no mean or maximum over tokens, no
            ratio of a sequence, no normalisation by the batch. Compute those first, under no_grad, and pass them per
            token; or use `linear_cross_entropy`. The first call of its code recomputes the losses of some tokens twice,
            among different others, and raises if they differ. Values for ignored rows have no effect. Only the outputs
            may require grad; change neither them nor `per_token` in place. The loss runs without autocast. In fp16
            keep it at about 1 per token and divide the sum afterwards, because gradients are computed before a loss
            scale is known.
        per_token: tensors whose leading dimensions are the labels'.
        options: as in `linear_cross_entropy`, but no logits_cache_bytes.

    Raises:
        TypeError, ValueError: an argument, or a result of `loss`, is not as described; in the first call of its code
            also if a token's loss depends on others. Over several ranks, what `loss` raises on one is raised on all in
            the first call with its name and such options; in later calls the other ranks wait.
        RuntimeError: in a second backward, because the first scales the gradients in place.
    """
    per_token = tuple(wait_if_async(tensor) for tensor in per_token)
    name, compared = "linear_token_loss", {"loss": loss}
    given = keyword_options(options, TokenLossOptions, logits_cache_bytes=0)
    with checked_together(name, hidden, weight, labels, given, compared=compared) as checks:
        if "logits_cache_bytes" in options:
            raise TypeError(f"{name} has no keyword logits_cache_bytes: it keeps logits within workspace_bytes")
        check_keywords(name, options, TokenLossOptions)
        check_loss(loss, per_token, checks.shape, hidden.device)
    call = checks.call
    results, losses = sum_of_losses(name, OneHead(call), loss, flat_per_token(call, per_token))
    with without_autocast(hidden.device, name), call.telling():
        check_tokens_apart(loss, losses.sample)
    return TokenLoss(*results)


def check_loss(
    loss: TokenLossFunction, per_token: tuple[Tensor, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Check a caller's loss, and its tensors per token."""
    requirement = "be a function of the outputs and of per_token"
    validation.require(callable(loss), "loss", requirement, type(loss).__name__, TypeError)
    for i, tensor in enumerate(per_token):
        validation.check_per_token(f"per_token[{i}]", tensor, shape, device, further=True)


def flat_per_token(call: Call, per_token: tuple[Tensor, ...]) -> list[Tensor]:
    """Return tensors [*shape, ...] as [N, ...]."""
    return [tensor.reshape(call.labels.shape[0], *tensor.shape[len(call.shape) :]) for tensor in per_token]


def check_tokens_apart(
    loss: TokenLossFunction,
    sample: Callable[[], tuple[Tensor, Tensor, Tensor]],  # see `Losses.sample`
    alternative: str = "linear_cross_entropy",
) -> None:
    """Raise if losses depend on other tokens. The loss runs again only until its code has passed once."""
    code = codes_inside(loss)
    if code in _codes or is_cuda_graph_capturing():
        return
    with torch.no_grad():
        among_all, among_some, among_others = sample()
    same = torch.isclose(among_all, among_some, rtol=1e-4, atol=1e-5, equal_nan=True)
    # In the same place of tensors of the same shape, all but a few functions give the same bits.
    same &= torch.isclose(among_some, among_others, rtol=2**-20, atol=2**-22, equal_nan=True)
    if not same.all():
        token = int((~same).nonzero()[0])
        all_of_them, some, others = (float(losses[token]) for losses in (among_all, among_some, among_others))
        raise ValueError(
            "loss must treat each token for itself, because blocks are cut arbitrarily, "
            f"got {all_of_them:.6g} for a token among all, {some:.6g} among some of them, {others:.6g} among "
            f"others: pass per token what depends on others (a mean, a maximum), or use {alternative}"
        )
    _codes.add(code)


def codes_inside(loss: TokenLossFunction) -> frozenset[Any]:
    """Return the code of a loss and of the functions inside it, which a decorator, a closure or an object calls."""
    codes: set[Any] = set()
    pending: list[Any] = [loss]
    seen: set[int] = set()
    while pending:
        inner = pending.pop()
        if id(inner) in seen or not callable(inner) or isinstance(inner, type):
            continue
        seen.add(id(inner))
        codes.add(getattr(inner, "__code__", type(inner)))
        if isinstance(inner, functools.partial):
            pending += [inner.func, *inner.args, *inner.keywords.values()]
        elif isinstance(inner, MethodType):
            pending += [inner.__func__, inner.__self__]
        elif hasattr(inner, "__wrapped__"):  # torch.compile's closure holds the compiler
            pending.append(inner.__wrapped__)
        elif isinstance(inner, FunctionType):
            for cell in inner.__closure__ or ():
                with contextlib.suppress(ValueError):  # empty
                    pending.append(cell.cell_contents)
        else:
            pending += vars(inner).values() if hasattr(inner, "__dict__") else ()
    return frozenset(codes)

"""Losses of each token whose gradients are computed in forward, for some tokens after others.

Autograd gives the gradients of a caller's loss by the outputs; those of Megatron's are formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from megatron_lce.core.call import Telling
from megatron_lce.core.options import DIFFERENTIABLE_OUTPUTS, LinearCrossEntropyOutput
from megatron_lce.core.tokens import RowIndex

PER_TOKEN_HINT = "pass a tensor per token behind the loss, as per_token, which gets its part"
_MAX_SAMPLE_TOKENS = 2048  # the most tokens whose losses are compared

Metrics = dict[str, Tensor]
TokenLossFunction = Callable[..., Tensor | tuple[Tensor, Metrics]]


class TokenCrossEntropy(NamedTuple):
    """The loss of an enabled Megatron model: (1 - e) (-logprob) + e (lse - mean_logit) + z lse^2."""

    z_loss: float = 0.0  # z
    label_smoothing: float = 0.0  # e

    def __call__(self, out: LinearCrossEntropyOutput) -> Tensor:
        losses = -out.logprobs
        if self.label_smoothing:
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * (out.lse - out.mean_logit)
        return losses + self.z_loss * out.lse.square() if self.z_loss else losses

    def gradients(self, out: LinearCrossEntropyOutput, weights: Tensor) -> dict[str, Tensor | None]:
        """Return the gradients of the sum of weights times losses by the outputs."""
        smoothing, grads = self.label_smoothing, dict.fromkeys(DIFFERENTIABLE_OUTPUTS)
        grads["logprobs"] = weights * (smoothing - 1)
        if smoothing:
            grads |= {"lse": weights * smoothing, "mean_logit": weights * -smoothing}
        if self.z_loss:
            grads["lse"] = weights * (2 * self.z_loss * out.lse + smoothing)
        return grads


class KnownLosses:
    """The loss of an enabled model where the counted tokens share one upstream gradient, and others have none."""

    def __init__(self, formula: TokenCrossEntropy, counted: Tensor, only_if_faster: bool) -> None:
        """`counted`: [N] bool. `only_if_faster`: gradients are left to backward where logits are recomputed anyway."""
        self._formula, self._weights, self.only_if_faster = formula, counted.float(), only_if_faster
        self._outputs: list[LinearCrossEntropyOutput] = []
        self._num_rows = 0  # so far

    def select(self, row_index: RowIndex) -> None:
        """Take the computed rows, in the order of the blocks."""
        self._weights = row_index.select(self._weights)

    def add(self, outputs: LinearCrossEntropyOutput, ignored: Tensor) -> dict[str, Tensor | None]:
        """Return the gradients of the sum of the next tokens' losses by their outputs."""
        self._outputs.append(outputs)
        row_slice = slice(self._num_rows, self._num_rows + ignored.shape[0])
        self._num_rows = row_slice.stop
        return self._formula.gradients(outputs, self._weights[row_slice])

    def outputs(self, no_outputs: Callable[[], Any]) -> Any:
        """Return the outputs of all computed tokens."""
        return concatenated(self._outputs or [no_outputs()])


class Losses:
    """The caller's loss of some tokens after others."""

    only_if_faster = False

    def __init__(
        self,
        loss: TokenLossFunction,
        per_token: Sequence[Tensor],  # [N, ...] each
        names: tuple[str, ...],  # outputs that have a gradient
        needs_grad: bool,
        device: torch.device,
        telling: Telling = nullcontext,  # around each call of the loss
    ) -> None:
        self._loss, self._per_token, self._names, self._needs_grad = loss, per_token, names, needs_grad
        self._telling = telling
        self._loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        self._num_rows = 0  # so far
        self._losses: list[Tensor] = []
        self._ignored: list[Tensor] = []
        self._outputs: list[Any] = []
        self._metrics: list[Metrics] = []

    def select(self, row_index: RowIndex) -> None:
        """Take the computed rows, in the order of the blocks."""
        self._row_index, self._per_token = row_index, [row_index.select(tensor) for tensor in self._per_token]

    def add(self, outputs: Any, ignored: Tensor) -> dict[str, Tensor | None]:
        """Call the caller's loss for the next tokens; return the gradients of its sum with respect to outputs."""
        with self._telling():
            row_slice = slice(self._num_rows, self._num_rows + ignored.shape[0])
            self._num_rows = row_slice.stop
            by_name = {name: getattr(outputs, name) for name in self._names}
            leaves = {name: o.detach().requires_grad_(self._needs_grad) for name, o in by_name.items() if o is not None}
            # The hooks of a checkpoint around the call would recompute the whole call for each block.
            no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
            with torch.set_grad_enabled(self._needs_grad), no_hooks:
                per_token = [tensor[row_slice] for tensor in self._per_token]
                losses, metrics = checked_losses(self._loss, outputs._replace(**leaves), per_token, ignored.shape[0])
                loss_sum = torch.where(ignored, 0.0, losses).sum()
            if self._metrics and metrics.keys() != self._metrics[0].keys():
                names_of_both = f"{sorted(self._metrics[0])} and {sorted(metrics)}"
                raise ValueError(f"loss must return the same metrics for any tokens, got {names_of_both}")
            self._loss_sum += loss_sum.detach()
            self._losses.append(losses.detach())
            self._ignored.append(ignored)
            self._outputs.append(outputs)
            self._metrics.append(
                {
                    name: m.detach().masked_fill(ignored.view(-1, *(1,) * (m.dim() - 1)), 0)
                    for name, m in metrics.items()
                }
            )
            if not self._needs_grad or not ignored.shape[0]:
                return {}
            check_graph(loss_sum, leaves)
            grads = torch.autograd.grad(loss_sum, list(leaves.values()), allow_unused=True)
            return dict.fromkeys(self._names) | dict(zip(leaves, grads, strict=True))

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of some tokens: as computed, and as the loss gives them beside other tokens, twice.

        The others are tokens of the lower half of the first output, logprobs or a divergence, then of the upper half.
        The tokens themselves are neither the lowest nor the highest. So no mean, maximum or minimum over the tokens is
        the same in both calls.
        """
        losses, outputs = torch.cat(self._losses), concatenated(self._outputs)
        num_tokens = losses.shape[0]
        if not num_tokens:
            return losses, losses, losses
        num_sample = min((num_tokens + 1) // 2, _MAX_SAMPLE_TOKENS)
        num_others = num_sample + (2 * num_sample == num_tokens)  # a loss may also depend on the number of tokens
        # Ignored and NaN tokens come last, and take part only if there is no other.
        first = next(output for name in self._names if (output := getattr(outputs, name)) is not None)
        usable = ~(torch.cat(self._ignored) | first.isnan())
        order, count = first.where(usable, torch.inf).argsort(), usable.sum()
        step = torch.arange(num_others, dtype=torch.int64, device=losses.device)
        lower = step * ((count + 1) // 2) // num_others
        ranks = 1 + step[:num_sample] * (count - 2) // num_sample, lower, count - 1 - lower
        sample_index, *others = (order.index_select(0, rank.clamp(0, num_tokens - 1)) for rank in ranks)

        def among(other: Tensor) -> Tensor:
            index, every_token = torch.cat([sample_index, other]), (outputs, self._per_token)
            sample, per_token = tree_map_only(Tensor, lambda x: x.index_select(0, index), every_token)
            return checked_losses(self._loss, sample, per_token, index.shape[0])[0].detach()[:num_sample]

        return losses.index_select(0, sample_index), among(others[0]), among(others[1])

    def outputs(self, no_outputs: Callable[[], Any]) -> Any:
        """Return the outputs of all computed tokens."""
        if not self._outputs:  # a call of the loss with no tokens gives the names of its metrics
            self.add(no_outputs(), torch.empty(0, dtype=torch.bool, device=self._loss_sum.device))
        return concatenated(self._outputs)

    @torch.no_grad()
    def totals(self, shape: tuple[int, ...]) -> tuple[Tensor, Metrics]:
        """Return the sum over all tokens, [] fp32, and the metrics of every token, of that shape: 0 in skipped rows."""
        scatter, loss_sum = self._row_index.scatter, self._row_index.nan_if_wrong(self._loss_sum)
        metrics = {name: torch.cat([part[name] for part in self._metrics]) for name in self._metrics[0]}
        return loss_sum, {n: scatter(m).view((*shape, *m.shape[1:])) for n, m in metrics.items()}


def concatenated(parts: Sequence[Any]) -> Any:
    """Return outputs of some tokens after others as outputs of all, whose shapes may be changed."""
    if len(parts) == 1:
        return tree_map_only(Tensor, lambda tensor: tensor.view(tensor.shape), parts[0])
    return tree_map(lambda *tensors: None if tensors[0] is None else torch.cat(tensors), *parts)


def checked_losses(
    loss: TokenLossFunction, outputs: Any, per_token: Sequence[Tensor], num_tokens: int
) -> tuple[Tensor, Metrics]:
    """Call the caller's loss, whose errors also say what it is called with, and check what it returns."""
    try:
        result: Any = loss(outputs, *per_token)
    except (TypeError, AttributeError) as error:
        if "NoneType" in str(error):
            missing = ", ".join(name for name, output in outputs._asdict().items() if output is None)
            error.add_note(f"outputs that the call has not asked for are None: {missing}")
        raise
    except (RuntimeError, IndexError) as error:
        error.add_note(f"loss gets some of the tokens, in one dimension: {PER_TOKEN_HINT}")
        raise
    if isinstance(result, tuple) and len(result) != 2:
        raise TypeError(f"loss must return a tensor [n], or a pair of it and a dict, got a tuple of {len(result)}")
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(losses, Tensor):
        raise TypeError(f"loss must return a tensor [n], or a pair of it and a dict, got {type(losses).__name__}")
    if losses.shape != (num_tokens,):
        raise ValueError(
            f"loss must return one number for each of its {num_tokens} tokens, [n], got {tuple(losses.shape)}: "
            f"{PER_TOKEN_HINT}; the sum is taken outside, and a token's loss must not depend on other tokens"
        )
    if losses.dtype != torch.float32:
        raise TypeError(f"loss must return float32, got {losses.dtype}")
    if not isinstance(metrics, dict):
        raise TypeError(f"loss must return a dict of metrics beside its losses, got {type(metrics).__name__}")
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.shape[:1] != (num_tokens,):
            got = type(metric).__name__ + (f" of shape {tuple(metric.shape)}" if isinstance(metric, Tensor) else "")
            raise ValueError(f"metric {name!r} must be a tensor [n, ...] for n = {num_tokens} tokens, got {got}")
    return losses, metrics


def check_graph(loss_sum: Tensor, outputs: Mapping[str, Tensor]) -> None:
    """Check that the loss depends on outputs only: the gradients of other leaves would be lost."""
    if not loss_sum.requires_grad:
        names = ", ".join(outputs)
        raise ValueError(f"loss must return losses that depend on one of the outputs {names}, got one without a graph")
    output_ids = {id(output) for output in outputs.values()}
    nodes, seen = [loss_sum.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in output_ids:
            raise ValueError(
                f"loss must not depend on other tensors that require grad, got one of shape {tuple(leaf.shape)}: "
                "only hidden and weight get a gradient"
            )
        nodes += [next_node for next_node, _ in node.next_functions]

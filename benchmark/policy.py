"""The head of a policy update under tensor and sequence parallelism, beside verl's.

Forward and backward of the clipped objective over the tokens that are not masked, at a temperature of 0.8; gradients of
hidden and weight. `verl` is what verl's engine does to logits, `use_fused_kernels=False`; `verl-kernel` is `True`. Ours
is the default head that skips masked tokens, as verl's plugin runs it, and `linear_token_loss`. A coefficient of 0
leaves the entropy out, as verl does by default; its kernel computes it anyway.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import megatron_lce
from benchmark import measure
from benchmark.megatron_step import in_megatron
from benchmark.providers import Provider, load_verl, load_verl_kernel, logits_of
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs, rows_of_rank

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Update:
    """One problem; what is per token is of all ranks' tokens."""

    inputs: Inputs
    mask: Tensor  # of the trained tokens
    old_logprobs: Tensor
    entropy_coeff: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of our calls."""
        return self.inputs.hidden, self.inputs.weight, self.inputs.labels.where(self.mask, -100)

    @property
    def options(self) -> dict[str, Any]:
        parallel = {"tp_group": self.inputs.tp_group, "sequence_parallel": True}
        return {"temperature": TEMPERATURE, "entropy": self.entropy_coeff > 0, "skip_ignored": True, **parallel}

    def mean(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        losses = clipped(logprobs, entropy, self.old_logprobs, self.inputs.grad_logprobs, self.entropy_coeff)
        return losses.where(self.mask, 0.0).sum() / self.mask.sum()


Loss = Callable[[Update], Tensor]


def clipped(logprobs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor, coefficient: float) -> Tensor:
    ratio = (logprobs - old).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return losses if entropy is None else losses - coefficient * entropy


def make_update(shape: Shape, masked: float, coefficient: float, results: Results) -> Update:
    """The same on every rank, whole; old logprobs are a tenth off, so that some ratios are clipped."""
    inputs = make_inputs(shape, results.dtype, results.device)
    generator = torch.Generator(results.device).manual_seed(1)
    order = torch.randperm(shape.tokens, generator=generator, device=results.device)
    noise = 0.1 * torch.randn(shape.tokens, generator=generator, device=results.device)
    with torch.no_grad():
        tensors = inputs.hidden, inputs.weight, inputs.labels
        now = megatron_lce.linear_cross_entropy(*tensors, temperature=TEMPERATURE, entropy=False).logprobs
    return Update(inputs, order >= masked * shape.tokens, now + noise, coefficient)


def _load_verl() -> Loss:
    parallel = load_verl("megatron.tensor_parallel")

    def loss(update: Update) -> Tensor:
        inputs = update.inputs
        logits, entropy = logits_of(inputs.hidden, inputs.weight, inputs.tp_group).float(), None
        logits.div_(TEMPERATURE)
        kept = logits
        if update.entropy_coeff > 0:
            kept = logits.clone()
            entropy = parallel.vocab_parallel_entropy(logits)
        return update.mean(parallel.vocab_parallel_log_probs_from_logits(kept, inputs.labels), entropy)

    return loss


def _load_verl_kernel() -> Loss:
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    kernel = load_verl_kernel()

    def loss(update: Update) -> Tensor:
        inputs = update.inputs
        hidden = gather_from_sequence_parallel_region(inputs.hidden, group=inputs.tp_group)
        logprobs, entropy = kernel(hidden, inputs.weight, inputs.labels, TEMPERATURE, "none", inputs.tp_group)
        return update.mean(logprobs, entropy if update.entropy_coeff > 0 else None)

    return loss


def _ours(update: Update) -> Tensor:
    out = megatron_lce.linear_cross_entropy(*update.tensors, **update.options)
    return update.mean(out.logprobs, out.entropy)


def _token(out: Any, *told: Any) -> Tensor:
    return clipped(out.logprobs, out.entropy, *told)


def _ours_token(update: Update) -> Tensor:
    told = update.old_logprobs, update.inputs.grad_logprobs, torch.full_like(update.old_logprobs, update.entropy_coeff)
    return megatron_lce.linear_token_loss(*update.tensors, _token, *told, **update.options).loss / update.mask.sum()


def _eager(update: Update) -> Tensor:
    """Of the whole problem, in the dtype of its logits."""
    log_softmax = (update.inputs.hidden @ update.inputs.weight.T / TEMPERATURE).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) if update.entropy_coeff > 0 else None
    return update.mean(log_softmax.gather(-1, update.inputs.labels[:, None])[:, 0], entropy)


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("verl", _load_verl, holds_logits=True, package="verl"),
        Provider("verl-kernel", _load_verl_kernel, package="verl"),
        Provider("ours-skip", lambda: _ours),
        Provider("ours-token-skip", lambda: _ours_token),
    )
}


def step(loss: Loss, update: Update) -> tuple[Tensor, ...]:
    """The loss and the gradients of this rank's hidden and weight."""
    value = loss(update)
    return value.detach(), *torch.autograd.grad(value, (update.inputs.hidden, update.inputs.weight))


def compare(loss: Loss, whole: Update, group: ProcessGroup) -> dict:
    """With fp64, of the slowest rank."""
    exact = [x.detach().double().requires_grad_() for x in (whole.inputs.hidden, whole.inputs.weight)]
    expected, *gradients = step(_eager, replace(whole, inputs=replace(whole.inputs, hidden=exact[0], weight=exact[1])))
    found = step(loss, replace(whole, inputs=whole.inputs.of_rank(group)))
    pairs = zip(found, (expected, *(rows_of_rank(x, group) for x in gradients)), strict=True)
    names = ("loss_relative_error", "grad_hidden_relative_error", "grad_weight_relative_error")
    errors = {name: measure.relative_error(*pair) for name, pair in zip(names, pairs, strict=True)}
    return measure.slowest_rank(errors)


@in_megatron
def measure_case(results: Results, arguments: Any, device: torch.device) -> None:
    """All heads are compared with fp64 at the smaller shapes, and take turns at the others."""
    group, shapes = torch.distributed.group.WORLD, arguments.error_shape + arguments.shapes
    losses = results.load(PROVIDERS[name] for name in arguments.providers)
    for shape, masked, coefficient in itertools.product(shapes, arguments.masked, arguments.entropy_coeffs):
        problem = {"tp": arguments.tp, "shape": shape.name, "masked": masked, "entropy_coeff": coefficient}
        update, turns = make_update(shape, masked, coefficient, results), []
        if shape in arguments.error_shape:
            for name, loss in losses.items():
                results.attempt("policy_errors", problem | {"provider": name}, partial(compare, loss, update, group))
            continue
        update = replace(update, inputs=update.inputs.of_rank(group))
        measure.free_memory(device)  # of the whole problem
        for name, loss in losses.items():
            record = problem | {"provider": name, "gradients_mib": measure.gradients_mib(update.inputs, "rl")}
            turns.append((record, measure.Timed(partial(step, loss, update), device, after=measure.slowest_rank)))
        results.take_turns("policy", turns, torch.distributed.barrier, budget_ms=arguments.budget_ms)

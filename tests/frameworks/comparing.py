"""Small models at every layout, and a framework's results with the fused head beside its own, gradients included."""

import itertools
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import megatron_runtime  # found through the path above

VOCABULARY = 90
COLUMNS = 96  # of the head: the vocabulary at make_vocab_size_divisible_by=16, as Megatron pads it for 1 rank and for 2
TEMPERATURE = 0.7
ALLOWED = 1e-5  # norm over norm, fp32
Outputs = Callable[[nn.Module], dict[str, Tensor]]
TOKENS, LABELS = torch.randint(VOCABULARY, (2, 3, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(12)[None]
MASK = (torch.arange(12) > 4).expand(3, -1).float()  # of the tokens that count

failures: list[str] = []


@dataclass(frozen=True)
class Case:
    tied: bool
    sequence_parallel: bool
    hidden_size: int = 32
    mtp_layers: int = 0

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return f"TP={ranks}, {tied}{', sequence parallel' * self.sequence_parallel}"

    def build(self) -> nn.Module:
        """A GPT over all ranks, the same weights whenever it is built; padded rows are 0, as converters make them."""
        options = megatron_runtime.GptOptions(num_layers=1, vocab_size=COLUMNS, **asdict(self))
        model = megatron_runtime.build_gpt(options)
        clear_padding(model.shared_embedding_or_output_weight())
        return model


class Wrapper(nn.Module):
    """In place of DDP and of Float16Module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **keywords: Any) -> Tensor:
        return self.module(**keywords)


def clear_padding(weight: Tensor) -> None:
    first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    weight.data[max(VOCABULARY - first, 0) :] = 0


def cases() -> list[Case]:
    layouts = (False, True) if parallel_state.get_tensor_model_parallel_world_size() > 1 else (False,)
    return [Case(*choice) for choice in itertools.product((False, True), layouts)]


def sharpened(model: nn.Module) -> nn.Module:
    """A model other than it was, for a teacher or a reference."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def loss_of(values: Tensor, mask: Tensor = MASK) -> dict[str, Tensor]:
    """What trainers take of each token's loss."""
    return {"losses": (values * mask).detach(), "loss": (values * mask).sum()[None]}


def compare(name: str, case: Case, fused: Outputs, unfused: Outputs) -> None:
    """Outputs and every parameter's gradient, of an upstream gradient of its own for each token and output."""
    actual = _results(case, fused)
    check(name, actual, _results(case, unfused, only=actual))


def check(name: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Tensors of the same names, on every rank."""
    errors = {key: _error(value, expected[key]) for key, value in actual.items()}
    worst = max(errors, key=lambda key: errors[key])
    verdict = torch.tensor([max(errors.values())], dtype=torch.float64)
    dist.all_reduce(verdict, dist.ReduceOp.MAX)
    if not float(verdict) <= ALLOWED:
        failures.append(name)
        print(f"FAILED  {name}: rank {dist.get_rank()}: {worst}: {errors[worst]:.1e}", flush=True)
    elif dist.get_rank() == 0:
        print(f"ok      {name}: {len(errors)} tensors, largest error {float(verdict):.1e}", flush=True)


def compare_with_plugin(
    name: str, case: Case, plugin: Any, fused: Outputs, unfused: Outputs, logits: bool = False
) -> None:
    """A framework's code with its plugin, which is installed, against the same or other code without.

    With the plugin the head must not be called, unless the code needs `logits`.
    """

    def without(model: nn.Module) -> dict[str, Tensor]:
        plugin.uninstall()
        found = unfused(model)
        plugin.install()
        return found

    def with_plugin(model: nn.Module) -> dict[str, Tensor]:
        weight_of_head = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
        own = layers.linear_with_grad_accumulation_and_async_allreduce
        with mock.patch.object(layers, own.__name__, side_effect=own) as linear:
            found = fused(model)
        passed = [value for call in linear.call_args_list for value in (*call.args, *call.kwargs.values())]
        calls = sum(value is weight_of_head for value in passed)
        assert bool(calls) == logits, f"{name}: the head was called {calls} times"
        return found

    compare(name, case, with_plugin, without)


def _results(case: Case, outputs: Outputs, only: Collection[str] | None = None) -> dict[str, Tensor]:
    model = case.build()
    found = {name: values for name, values in outputs(model).items() if only is None or name in only}
    generator = torch.Generator().manual_seed(1)
    upstream = {name: torch.randn(values.shape, generator=generator) for name, values in sorted(found.items())}
    sum((found[name] * upstream[name]).sum() for name in found).backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: values.detach() for name, values in found.items()} | gradients


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")

"""Time, extra peak memory and error of one head; and the cuBLAS products it is held against."""

import contextlib
import functools
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmark.ours import MIB, Ours, gradients_of
from benchmark.providers import Head
from benchmark.shapes import Inputs

SETTLE_MS = 60.0  # behind a pause, or work that takes less power, a GPU holds clocks for 50 ms that it does not keep


def run_step(head: Head, inputs: Inputs, mode: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One call as `mode` describes it: the outputs, and the gradients of hidden and weight (none for `fwd`)."""
    if isinstance(head, Ours):
        return head.step(inputs, mode)
    with torch.set_grad_enabled(mode != "fwd"):
        outputs = head(inputs.hidden, inputs.weight, inputs.labels, mode)
    return outputs, gradients_of(outputs, inputs, mode)


def free_memory(device: torch.device) -> None:
    """Gives back what the last provider left behind: compiled code, garbage, cached blocks."""
    torch.compiler.reset()  # also keeps torch.compile from reaching its limit of recompilations over many shapes
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def time_ms(call: Callable[[], object], device: torch.device, repeats: int, settle: int = 0) -> list[float]:
    """Times of single calls, in ms, after a warm-up that the caller did.

    On a GPU all calls are enqueued back to back between device events, so that launching one runs under the other,
    behind as many as it takes to `settle` to the clocks of this call.
    """
    if device.type != "cuda":
        return [_once_ms(call, device) for _ in range(repeats)]
    for _ in range(settle):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def repeats_within(budget_ms: float, once_ms: float) -> int:
    """How many calls of `once_ms` fit in `budget_ms`, at least 1 and at most 50."""
    return min(50, max(1, round(budget_ms / once_ms)))


def calls_of_a_turn(budget_ms: float, once_ms: float) -> dict[str, int]:
    """How many calls of `once_ms` are timed in a turn, and how many run in front of them."""
    return {"repeats": repeats_within(budget_ms, once_ms), "settle": repeats_within(SETTLE_MS, once_ms)}


def _once_ms(call: Callable[[], object], device: torch.device) -> float:
    """From the start of a call on an idle device until the device is done."""
    _synchronize(device)
    start = time.perf_counter()
    results = call()
    _synchronize(device)
    done = time.perf_counter()
    del results
    return (done - start) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Peak of allocated memory during the call over what was allocated before, results included; None on a CPU.

    Measured once more where some of what was there before is gone behind it: freed meanwhile, it hides as much of the
    call's own.
    """
    if device.type != "cuda":
        call()
        return None
    for _ in range(5):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del results
        if torch.cuda.memory_allocated(device) >= before:
            return peak / MIB
    raise RuntimeError("the call frees memory that was allocated before it, each time")


@dataclass
class Timed:
    """The record of one call: first its memory, then times of as many rounds as are asked for.

    context  what each of these runs in, entered anew
    after    gets the record, and returns what is measured behind the rounds
    """

    call: Callable[[], object]
    device: torch.device
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    after: Callable[[dict], dict] = lambda record: {}
    times_ms: list[float] = field(default_factory=list)
    _calls: dict[str, int] | None = None  # of a round

    def warm_up(self) -> dict:
        """Extra peak memory of the second call with the results in it; the first compiles."""
        with self.context():
            self.call()
            return {"peak_mib": peak_mib(self.call, self.device)}

    def round(self, *, budget_ms: float = 0.0, **calls: int) -> dict:
        """Times of all rounds up to this one.

        Ranks that communicate in the call make as many calls as the slowest fits in the budget.
        """
        with self.context():
            if not calls and self._calls is None:
                once = {"ms": _once_ms(self.call, self.device)}
                once = slowest_rank(once) if dist.is_initialized() else once
                self._calls = calls_of_a_turn(budget_ms, once["ms"])
            self._calls = calls or self._calls
            self.times_ms += time_ms(self.call, self.device, **self._calls)
        times = {"time_ms": median(self.times_ms), "fastest_ms": min(self.times_ms), "slowest_ms": max(self.times_ms)}
        return times | {"repeats": len(self.times_ms)}

    def finish(self, record: dict) -> dict:
        """What is measured behind the rounds."""
        with self.context():
            return self.after(record)


def turn(
    record: dict, head: Head, inputs: Inputs, mode: str, after: Callable[[dict], dict] = lambda record: {}
) -> tuple[dict, Timed]:
    """A head's step for `Results.take_turns`, of the slowest rank of several."""
    step = functools.partial(run_step, head, inputs, mode)
    after = after if inputs.tp_group is None else slowest_rank
    timed = Timed(step, inputs.hidden.device, after=after)
    return record | {"gradients_mib": gradients_mib(inputs, mode)}, timed


def slowest_rank(record: dict, group: dist.ProcessGroup | None = None) -> dict:
    """The record with every float in it replaced by the largest of the group's ranks: times, memory, errors."""
    names = [name for name, value in record.items() if isinstance(value, float)]
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, torch.tensor([record[name] for name in names], dtype=torch.float64), group=group)
    return record | dict(zip(names, torch.stack(gathered).amax(0).tolist(), strict=True))


def gradients_mib(inputs: Inputs, mode: str) -> float:
    """What the gradients of a mode occupy: the part of its peak memory that no head can spare."""
    return 0.0 if mode == "fwd" else (inputs.hidden.nbytes + inputs.weight.nbytes) / MIB


@torch.no_grad()
def measure_products(hidden: Tensor, weight: Tensor, *, budget_ms: float = 0.0, **calls: int) -> dict:
    """Times of the three plain products by torch.mm: logits, hidden's gradient, weight's gradient."""
    device = hidden.device
    grad_logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=device).normal_()
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    products = {
        "grad_hidden_ms": lambda: torch.mm(grad_logits, weight, out=grad_hidden),
        "grad_weight_ms": lambda: torch.mm(grad_logits.T, hidden, out=grad_weight),
        "logits_ms": lambda: torch.mm(hidden, weight.T, out=grad_logits),  # last: it overwrites grad_logits
    }
    record: dict = {}
    for name, product in products.items():
        product()
        record[name] = time_ms(product, device, **(calls or calls_of_a_turn(budget_ms, _once_ms(product, device))))
    return record


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||"""
    return ((actual.to(expected.dtype) - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def oracle(inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients of the modes by plain autograd over whole logits in fp64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (inputs.hidden, inputs.weight))
    log_softmax = F.log_softmax(hidden @ weight.T, -1)
    logprobs = log_softmax.gather(-1, inputs.labels[:, None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    expected = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "loss": -logprobs.detach().mean()}
    of_logprobs = inputs.grad_logprobs.double() @ logprobs
    of_modes = {"logprob": of_logprobs, "rl": of_logprobs + inputs.grad_entropy.double() @ entropy}
    for mode, scalar in (of_modes | {"sft": -logprobs.mean()}).items():
        gradients = torch.autograd.grad(scalar, (hidden, weight), retain_graph=True)
        expected |= {f"grad_hidden.{mode}": gradients[0], f"grad_weight.{mode}": gradients[1]}
    return expected


def measure_error(head: Head, inputs: Inputs, mode: str, expected: dict[str, Tensor]) -> dict:
    """Largest error of the outputs, and relative error ||out - ref|| / ||ref|| of the gradients, against `oracle`."""
    outputs, gradients = run_step(head, inputs, mode)
    names, record = ("loss",) if mode == "sft" else ("logprobs", "entropy"), {}
    for name, output in zip(names, outputs, strict=False):
        record[f"{name}_max_error"] = (output.double() - expected[name]).abs().max().item()
    for name, gradient in zip(("grad_hidden", "grad_weight"), gradients, strict=False):
        record[f"{name}_relative_error"] = relative_error(gradient, expected[f"{name}.{mode}"])
    return record

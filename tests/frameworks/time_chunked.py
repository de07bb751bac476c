"""SkyRL's and slime's chunked logprobs beside what their plugins run, for one head: time, peak memory and errors.

    torchrun --nproc-per-node 2 tests/frameworks/time_chunked.py SKYRL SLIME      # folders that have skyrl and slime

Forward and backward of logprobs under sequence parallelism. "skyrl, logits" and "slime" chunk what follows the logits,
in bf16 and in fp32; "skyrl, fused" is `fused_lm_head_logprob`, whose chunks are of the logits, too. With `--masked`,
answers are the last tokens: slime leaves the others out behind the logits, and SkyRL's upstream gradient is 0 there.
"""

import argparse
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from comparing import megatron_runtime
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from stand_ins import cuda_without_gpu, mocks, packages_without_their_init
from torch import Tensor

import megatron_lce
from benchmark import measure, publish
from benchmark.providers import logits_of
from benchmark.results import Results
from benchmark.shapes import Inputs, Shape, make_inputs, parse_shape, rows_of_rank
from scripts.arguments import HelpFormatter

TEMPERATURE = 0.8
ALLOWED = 1.5  # times the largest error of a framework's own ways in the same dtype


class Problem(NamedTuple):
    inputs: Inputs  # of this rank
    first: int  # of the rows whose logprobs are trained
    chunk: int

    @property
    def shard(self) -> dict[str, int]:
        size = len(self.inputs.weight)
        start = size * self.inputs.tp_group.rank()
        return {"vocab_start_index": start, "vocab_end_index": start + size}


Way = Callable[[Problem], Tensor]


def import_skyrl(folder: Path) -> Any:
    packages_without_their_init(folder, "skyrl.backends.skyrl_train.distributed.megatron")
    return importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.model_utils")


def import_slime(folder: Path) -> Any:
    packages_without_their_init(folder, "slime.utils")
    mocks("slime.utils.distributed_utils")
    return importlib.import_module("slime.utils.ppo_utils")


def ways_of(skyrl: Any, slime: Any) -> dict[str, Way]:
    """Logprobs of the rows from `first` on but the last, which SkyRL leaves out."""

    def skyrl_logits(problem: Problem) -> Tensor:
        inputs = problem.inputs
        logits = logits_of(inputs.hidden, inputs.weight, inputs.tp_group).div_(TEMPERATURE)[None]
        target, given = inputs.labels.roll(1)[None], {"tp_group": inputs.tp_group, "chunk_size": problem.chunk}
        return skyrl.from_parallel_logits_to_logprobs(logits, target, **problem.shard, **given)[0, problem.first :]

    def skyrl_fused(problem: Problem, backend: str) -> Tensor:
        inputs = problem.inputs
        hidden = gather_from_sequence_parallel_region(inputs.hidden, group=inputs.tp_group)[None]
        given = {"tp_group": inputs.tp_group, "chunk_size": problem.chunk, "fused_backend": backend, **problem.shard}
        call = skyrl.from_parallel_hidden_to_logprobs
        found = call(hidden, inputs.weight, inputs.labels.roll(1)[None], temperature=TEMPERATURE, **given)
        return found[0, problem.first :]

    def slime_logits(problem: Problem) -> Tensor:
        inputs, rows = problem.inputs, slice(problem.first, -1)
        logits = logits_of(inputs.hidden, inputs.weight, inputs.tp_group).float()[rows].div(TEMPERATURE)
        given = {"chunk_size": problem.chunk}
        return slime.calculate_log_probs_and_entropy(logits, inputs.labels[rows], inputs.tp_group, **given)[0].view(-1)

    def slime_plugin(problem: Problem) -> Tensor:
        """Its plugin's call on the captured head."""
        inputs, labels = problem.inputs, problem.inputs.labels.clone()
        labels[: problem.first], labels[-1] = -100, -100
        given = {"tp_group": inputs.tp_group, "sequence_parallel": True, "temperature": TEMPERATURE}
        given |= {"entropy": False, "skip_ignored": len(labels) - problem.first - 1}
        out = megatron_lce.linear_cross_entropy(inputs.hidden, inputs.weight, labels, **given)
        return out.logprobs[problem.first : -1]

    return {
        "skyrl, logits": skyrl_logits,
        "skyrl, fused": functools.partial(skyrl_fused, backend="torch"),
        "skyrl, fused, verl's kernel": functools.partial(skyrl_fused, backend="triton"),
        "skyrl, plugin": functools.partial(skyrl_fused, backend="torch"),
        "slime": slime_logits,
        "slime, plugin": slime_plugin,
    }


def step(way: Way, problem: Problem) -> tuple[Tensor, ...]:
    """Logprobs and this rank's gradients of hidden states and weight."""
    inputs = problem.inputs
    logprobs = way(problem)
    upstream = inputs.grad_logprobs[problem.first : -1]
    return logprobs.detach(), *torch.autograd.grad(logprobs, (inputs.hidden, inputs.weight), upstream)


@contextlib.contextmanager
def installed(plugin: Any) -> Any:
    plugin.install()
    try:
        yield
    finally:
        plugin.uninstall()


def compare(way: Way, whole: Inputs, problem: Problem) -> dict:
    """With fp64, of the slowest rank."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (whole.hidden, whole.weight))
    rows = slice(problem.first, -1)
    log_softmax = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    logprobs = log_softmax.gather(-1, whole.labels[:, None])[rows, 0]
    exact = torch.autograd.grad(logprobs, (hidden, weight), whole.grad_logprobs[rows].double())
    expected = logprobs, *(rows_of_rank(x, problem.inputs.tp_group) for x in exact)
    names = "logprobs_relative_error", "grad_hidden_relative_error", "grad_weight_relative_error"
    errors = zip(names, map(measure.relative_error, step(way, problem), expected), strict=True)
    return measure.slowest_rank(dict(errors))


def work(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether ours are as near to fp64 as the frameworks' own. Everything built here is gone when it returns."""
    path = args.output if dist.get_rank() == 0 else None
    settings = {"program": "tests/frameworks/time_chunked.py", "command": sys.argv[1:], "ranks": args.tp}
    results = Results(device, torch.bfloat16, path, settings, rounds=args.rounds, quiet=path is None)
    ways = ways_of(import_skyrl(args.skyrl), import_slime(args.slime))
    plugin = importlib.import_module("megatron_lce.plugins.skyrl")
    plugin.uninstall()
    contexts = {"skyrl, plugin": functools.partial(installed, plugin)}
    if device.type != "cuda":
        del ways["skyrl, fused, verl's kernel"]

    def problem_of(shape: Shape, masked: float) -> tuple[Inputs, Problem]:
        whole = make_inputs(shape, torch.bfloat16, device)
        return whole, Problem(whole.of_rank(dist.group.WORLD), round(masked * shape.tokens), args.chunk)

    record = {"tp": args.tp, "chunk": args.chunk}
    for name, way in ways.items():
        whole, problem = problem_of(args.error_shape, 0.6)
        with contexts.get(name, contextlib.nullcontext)():
            about = record | {"shape": args.error_shape.name, "masked": 0.6, "variant": name}
            results.attempt("chunked_errors", about, functools.partial(compare, way, whole, problem))
    for masked in args.masked:
        whole, problem = problem_of(args.shape, masked)
        del whole
        measure.free_memory(device)
        turns = []
        for name, way in ways.items():
            about = record | {"shape": args.shape.name, "masked": masked, "variant": name}
            about["gradients_mib"] = measure.gradients_mib(problem.inputs, "rl")
            call, context = functools.partial(step, way, problem), contexts.get(name, contextlib.nullcontext)
            turns.append((about, measure.Timed(call, device, context, measure.slowest_rank)))
        results.take_turns("chunked", turns, dist.barrier, budget_ms=args.budget_ms)
    if path:
        print(*(publish.as_table(results.section(name)) for name in ("chunked_errors", "chunked")), sep="\n")
    errors = {x["variant"]: x["grad_weight_relative_error"] for x in results.section("chunked_errors")}
    allowed = ALLOWED * max(error for name, error in errors.items() if "plugin" not in name)
    return all(error <= allowed for error in errors.values())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    add = parser.add_argument
    add("skyrl", type=Path, help="Folder of SkyRL's package.")
    add("slime", type=Path, help="Folder of slime's package.")
    add("--shape", type=parse_shape, default=parse_shape("65536x4096x151936"), help="The whole head's.")
    add("--error-shape", type=parse_shape, default=parse_shape("2048x1024x32768"), help="Compared with fp64.")
    add("--masked", type=float, nargs="+", default=[0.0, 0.6], help="Shares of the tokens in front of the answers.")
    add("--chunk", type=int, default=1024, help="Tokens of a chunk.")
    add("--rounds", type=int, default=4, help="How often variants take turns.")
    add("--budget-ms", type=float, default=600.0, help="Time of a variant's calls in a turn.")
    add("--device", choices=("cuda", "cpu"), help="Device of all ranks; None: cuda where every rank has a GPU.")
    add("--output", type=Path, default=Path("chunked.json"), help="JSON file to write.")
    args = parser.parse_args()
    args.tp = int(os.environ["WORLD_SIZE"])
    return args


def main() -> bool:
    """Whether something was wrong."""
    args = parse_arguments()
    device = megatron_runtime.initialize(args.tp, device=args.device)
    with cuda_without_gpu() if device.type == "cpu" else contextlib.nullcontext():
        right = work(args, device)
    megatron_runtime.teardown()
    return not right


if __name__ == "__main__":
    sys.exit(main())

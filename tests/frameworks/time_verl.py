"""verl's own update and log-prob pass, by its TrainingWorker: with logits, with its kernel, and with the plugin.

    torchrun --nproc-per-node 2 tests/frameworks/time_verl.py FOLDER      # FOLDER/verl

An update is `train_batch`: several microbatches of packed sequences in Megatron's schedule, verl's PPO loss, and the
optimizer's step, at a learning rate of 0; `gradients` is an update without that step. The log-prob pass is
`infer_batch`. `--masked` is the share of prompts; an entropy coefficient of 0 leaves the entropy out. The plugin is
installed before a variant's turn begins.

Each update's gradients are compared with those of verl's engine in fp32, on the same weights; the exit status is 1
where ours are farther off than 1.5 times the engine's own in bf16 (`over_engine_error`).
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import verl_worker
from comparing import megatron_runtime
from stand_ins import cuda_without_gpu
from torch import Tensor, nn

from benchmark import measure, publish
from benchmark.megatron_step import build, build_exact, parameters
from benchmark.results import Results
from megatron_lce import CapturedHead
from scripts.arguments import HelpFormatter

ALLOWED = 1.5
LOGPROBS, UPDATE, GRADIENTS = "logprobs", "update", "gradients"


class Variant(NamedTuple):
    """What computes the head: verl's option, the plugin, and the plugin's `logits_cache_bytes`."""

    fused: bool = False
    plugin: bool = False
    cache: int | None = None


VARIANTS = {
    "engine": Variant(),
    "kernel": Variant(fused=True),
    "plugin": Variant(plugin=True),
    "plugin, no cache": Variant(plugin=True, cache=0),
    "plugin in fused forward": Variant(fused=True, plugin=True),
}


class Run:
    """A worker of verl, its batch, and one choice of masked tokens and entropy."""

    def __init__(self, verl: SimpleNamespace, args: argparse.Namespace, model: nn.Module, device: torch.device) -> None:
        self.verl, self.args, self.model, self.device = verl, args, model, device
        self.plugin = importlib.import_module("megatron_lce.plugins.verl")
        self.plugin.uninstall()
        sizes = args.hidden, args.layers, args.heads, args.vocab
        sequences = args.tokens // args.sequence_length
        self.worker = verl_worker.build_worker(verl, model, verl_worker.of_model(*sizes), sequences)

    def choose(self, masked: float, entropy_coeff: float) -> None:
        """A batch whose old logprobs are a tenth off, so that some ratios are clipped; the same on every rank."""
        args, self.entropy = self.args, entropy_coeff > 0
        generator = torch.Generator().manual_seed(0)
        shape = args.microbatches * args.tokens // args.sequence_length, args.sequence_length
        tokens = torch.randint(args.vocab, shape, generator=generator).to(self.device)
        prompt = max(1, round(masked * args.sequence_length))
        verl_worker.set_loss(self.verl, self.worker, entropy_coeff)
        self.batch = verl_worker.make_batch(self.verl, tokens, prompt)
        advantages, noise = torch.randn(2, shape[0], shape[1] - prompt, generator=generator).to(self.device)
        old = torch.zeros(shape, device=self.device)
        with self.in_force(VARIANTS["engine"]):
            found = self.call(LOGPROBS)
        if found:
            old.copy_(found["log_probs"].view(shape))
        dist.broadcast(old, 0)
        self.batch["old_log_probs"] = verl_worker.jagged(old[:, prompt - 1 : -1] + 0.1 * noise)
        self.batch["advantages"] = verl_worker.jagged(advantages)

    @contextlib.contextmanager
    def in_force(self, variant: Variant) -> Iterator[None]:
        patch, cache = importlib.import_module("verl.models.mcore.model_forward_fused"), variant.cache
        with contextlib.ExitStack() as opened:
            if variant.plugin:
                self.plugin.install()
                opened.callback(self.plugin.uninstall)
            if variant.fused:
                patch.patch_fused_forward(self.model)
                opened.callback(patch.unpatch_fused_forward, self.model)
            config = self.worker.engine.engine_config
            opened.enter_context(mock.patch.object(config, "use_fused_kernels", variant.fused))
            if cache is not None:
                cached = functools.partialmethod(CapturedHead.linear_cross_entropy, logits_cache_bytes=cache)
                opened.enter_context(mock.patch.object(CapturedHead, "linear_cross_entropy", cached))
            yield

    def call(self, what: str) -> dict[str, Any]:
        if what == GRADIENTS:
            return self.update_without_step(lambda: 0.0)
        way = verl_worker.update if what == UPDATE else verl_worker.log_probs
        return way(self.verl, self.worker, self.batch, self.entropy)

    def update_without_step(self, instead: Callable[[], float]) -> dict[str, Any]:
        with mock.patch.object(self.worker.engine, "optimizer_step", instead):
            return self.call(UPDATE)

    def gradients(self) -> dict[str, Tensor]:
        """Of an update, read where its optimizer would step."""
        found: dict[str, Tensor] = {}

        def read() -> float:
            found.update({name: p.main_grad.clone() for name, p in parameters(self.worker.engine.module[0]).items()})
            return 0.0

        self.update_without_step(read)
        return found

    def exact(self) -> dict[str, Tensor]:
        """Gradients of the engine in fp32."""
        exact = build_exact(self.args, self.model, self.device)
        for name in ("finalize_model_grads_func", "grad_scale_func"):
            setattr(exact.config, name, getattr(self.model.config, name))
        with mock.patch.object(self.worker.engine, "module", [exact]), self.in_force(VARIANTS["engine"]):
            return self.gradients()


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: measure.relative_error(found[name], value) for name, value in exact.items()}


def after_update(run: Run, exact: dict[str, Tensor], of_engine: dict[str, float], record: dict) -> dict:
    found = relative_errors(run.gradients(), exact)
    metrics = [{name: x for name, x in run.call(UPDATE).items() if name in ("loss", "grad_norm")}]
    dist.broadcast_object_list(metrics, 0)
    error = max(found.values())
    over = max(found[name] / of_engine[name] for name in found)
    return measure.slowest_rank(record | metrics[0] | {"gradient_relative_error": error, "over_engine_error": over})


def turns_of(run: Run, problem: dict, results: Results) -> list[tuple[dict, measure.Timed]]:
    exact = run.exact()
    measure.free_memory(run.device)
    with run.in_force(VARIANTS["engine"]):
        of_engine = relative_errors(run.gradients(), exact)
    turns = []
    for what, (name, variant) in itertools.product(run.args.passes, VARIANTS.items()):
        record = problem | {"pass": what, "variant": name}
        if variant.fused and not variant.plugin and run.device.type != "cuda":
            results.unsupported("verl", record, "verl's kernel runs on GPUs only")
        elif what != LOGPROBS or variant.cache is None:  # a pass without a gradient keeps no logits
            after: Callable[[dict], dict] = functools.partial(after_update, run, exact, of_engine)
            call, in_force = functools.partial(run.call, what), functools.partial(run.in_force, variant)
            timed = measure.Timed(call, run.device, in_force, measure.slowest_rank if what == LOGPROBS else after)
            turns.append((record, timed))
    return turns


def work(args: argparse.Namespace, verl: SimpleNamespace, device: torch.device) -> bool:
    """Whether ours are as near to fp32 as verl's engine. Everything built here is gone when it returns."""
    path = args.output if dist.get_rank() == 0 else None
    settings = {"program": "tests/frameworks/time_verl.py", "command": sys.argv[1:], "ranks": dist.get_world_size()}
    results = Results(device, torch.bfloat16, path, settings, rounds=args.rounds, quiet=path is None)
    run = Run(verl, args, build(args, torch.bfloat16, device), device)
    names = "tp", "tokens", "microbatches", "hidden", "vocab", "layers"
    sizes = {name: getattr(args, name) for name in names}
    for masked, coefficient in itertools.product(args.masked, args.entropy_coeffs):
        run.choose(masked, coefficient)
        turns = turns_of(run, sizes | {"masked": masked, "entropy_coeff": coefficient}, results)
        results.take_turns("verl", turns, dist.barrier, budget_ms=args.budget_ms)
    if path:
        print(publish.as_table(results.section("verl")))
    ours = [x for x in results.section("verl") if x["pass"] != LOGPROBS and x["variant"].startswith("plugin")]
    return all(x["status"] == "ok" and x["over_engine_error"] <= ALLOWED for x in ours)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="Folder of verl's package.")
    passes = {"choices": (UPDATE, GRADIENTS, LOGPROBS), "default": [UPDATE, LOGPROBS]}
    add("--passes", nargs="+", help="What is timed.", **passes)
    add("--masked", type=float, nargs="+", default=[0.0, 0.6], help="Shares of prompts, which the loss leaves out.")
    add("--entropy-coeffs", type=float, nargs="+", default=[0.0, 0.001], help="Of the loss; 0: no entropy at all.")
    add("--tokens", type=int, default=16384, help="Tokens of a microbatch.")
    add("--microbatches", type=int, default=2, help="Microbatches of an update.")
    add("--sequence-length", type=int, default=2048, help="Tokens of a sequence.")
    add("--layers", type=int, default=4, help="Transformer layers.")
    add("--hidden", type=int, default=4096, help="Hidden size.")
    add("--heads", type=int, default=32, help="Attention heads.")
    add("--vocab", type=int, default=151936, help="Vocabulary of all ranks together.")
    add("--rounds", type=int, default=4, help="How often variants take turns.")
    add("--budget-ms", type=float, default=600.0, help="Time of a variant's calls in a turn.")
    add("--device", choices=("cuda", "cpu"), help="Device of all ranks; None: cuda where every rank has a GPU.")
    add("--output", type=Path, default=Path("verl.json"), help="JSON file to write.")
    args = parser.parse_args()
    args.tp = int(os.environ["WORLD_SIZE"])
    return args


def main() -> bool:
    """Whether something was wrong."""
    args = parse_arguments()
    verl = verl_worker.import_verl(args.folder)
    device = megatron_runtime.initialize(args.tp, device=args.device)
    with cuda_without_gpu() if device.type == "cpu" else contextlib.nullcontext():
        right = work(args, verl, device)
    megatron_runtime.teardown()
    return not right


if __name__ == "__main__":
    sys.exit(main())

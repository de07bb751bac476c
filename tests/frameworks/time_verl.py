"""verl's forward and backward with logits, with verl's own fused kernel, and with ours: time, peak memory and errors.

    torchrun --nproc-per-node 2 tests/frameworks/time_verl.py FOLDER      # FOLDER/verl

"unfused" is verl's forward with logits alone, "verl's engine" its default, with what the engine does to logits, "verl's
kernel" its use_fused_kernels=True. Ours is the plugin: in verl's fused forward, and in the engine, which leaves out the
tokens that its loss mask leaves out (`--masked`, scattered). The others compute them; their gradients are 0 there.

One layer under DDP with fp32 gradients, sequence parallel: nearly all of it is the head. Logprobs, entropy and every
parameter's gradient are compared with verl's unfused path in fp32, on the same weights; the exit status is 1 where ours
are farther off than those of the unfused path in bf16 (`over_unfused_error`).
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from comparing import TEMPERATURE, megatron_runtime
from run_verl import counted, fused, import_verl, unfused
from run_verl_engine import PAD_MODE, Batch, engine
from torch import Tensor, nn

from benchmark import measure, publish
from benchmark.megatron_step import build, build_exact
from benchmark.results import Results
from scripts.arguments import HelpFormatter

ALLOWED = 1.5  # times the unfused path's own error
Forward = Callable[[SimpleNamespace, nn.Module, Tensor], dict[str, Tensor]]


class Step(measure.Timed):
    """One way's forward and backward, from an upstream gradient of its own for every token's logprob and entropy."""

    def __init__(
        self, verl: SimpleNamespace, forward: Forward, plugin: bool, tokens: Tensor, counts: Tensor, model: nn.Module
    ) -> None:
        super().__init__(self.take, counts.device)
        self.verl, self.forward, self.tokens, self.counts, self.model = verl, forward, tokens, counts, model
        self.plugin = plugin
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(2, counts.numel(), generator=generator).to(counts.device) * counts
        self.upstream = dict(zip(("log_probs", "entropy"), upstream, strict=True))

    def take(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Adds to the parameters' `main_grad`; logprobs and entropy of the tokens that count."""
        (self.verl.plugin.install if self.plugin else self.verl.plugin.uninstall)()
        outputs = self.forward(self.verl, model or self.model, self.tokens)
        outputs = {name: outputs[name].values() for name in self.upstream}
        torch.autograd.backward(list(outputs.values()), list(self.upstream.values()))
        return {name: values.detach() for name, values in outputs.items()}

    def tensors(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Outputs and every parameter's gradient, of one step."""
        model = model or self.model
        model.zero_grad_buffer()
        outputs = {name: values[self.counts] for name, values in self.take(model).items()}
        return outputs | {name.rpartition("module.")[2]: p.main_grad.clone() for name, p in model.named_parameters()}


def step_of_engine(verl: SimpleNamespace, folder: Path, mask: Tensor) -> Forward:
    """The engine's own forward step, over tokens of which those count whose mask is not 0."""
    own = engine(folder, verl, mtp=False)

    def forward(verl: SimpleNamespace, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
        temperature = torch.full((tokens.shape[0],), TEMPERATURE, device=mask.device)
        loss_mask = torch.nested.nested_tensor_from_jagged(mask, tokens.offsets())
        settings = {"temperature": temperature, "calculate_entropy": True, "pad_mode": PAD_MODE.NO_PADDING}
        batch = Batch(input_ids=tokens, loss_mask=loss_mask, **settings)
        return own.forward_step(iter([batch]), model, None, lambda **_: None)[0]

    return forward


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((actual[name] - x).norm() / x.norm()) for name, x in expected.items()}


def errors(step: Step, exact: dict[str, Tensor], of_unfused: dict[str, float]) -> dict:
    found = relative_errors(step.tensors(), exact)
    return {
        "logprobs_relative_error": found["log_probs"],
        "entropy_relative_error": found["entropy"],
        "gradient_relative_error": max(found[name] for name in found.keys() - step.upstream),
        "over_unfused_error": max(found[name] / of_unfused[name] for name in found),
    }


def work(args: argparse.Namespace, device: torch.device) -> bool:
    """Whether ours are as near to fp32 as verl's unfused path. Everything built here is gone when it returns."""
    path = args.output if dist.get_rank() == 0 else None
    results = Results(device, torch.bfloat16, path, {"command": sys.argv[1:], "ranks": dist.get_world_size()})
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(args.vocab, (args.tokens // args.sequence_length, args.sequence_length), generator=generator)
    tokens = torch.nested.nested_tensor(list(rows.to(device)), layout=torch.jagged)
    mask = (torch.randperm(args.tokens, generator=generator) >= args.masked * args.tokens).to(device, torch.int64)
    counts = (mask.roll(-1) != 0) & counted(tokens)
    model = build(args, torch.bfloat16, device)
    verl = import_verl(args.folder, "after")
    ways = {"unfused": (unfused, False), "verl's kernel": (fused, False), "ours": (fused, True)}
    in_engine = step_of_engine(verl, args.folder, mask)
    ways |= {"verl's engine": (in_engine, False), "ours in the engine": (in_engine, True)}
    steps = {way: Step(verl, *ways[way], tokens, counts, model) for way in ways}

    exact = steps["unfused"].tensors(build_exact(args, model, device))
    of_unfused = relative_errors(steps["unfused"].tensors(), exact)
    measure.free_memory(device)

    shape = {"tp": args.tp, "tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab, "layers": args.layers}
    shape["masked"] = args.masked
    turns = []
    for way, step in steps.items():
        step.after = lambda record, step=step: measure.slowest_rank(record | errors(step, exact, of_unfused))
        if way == "verl's kernel" and device.type != "cuda":
            results.unsupported("verl", shape | {"variant": way}, "verl's kernel runs on GPUs only")
        else:
            turns.append((shape | {"variant": way}, step))
    results.take_turns("verl", turns, dist.barrier, repeats=1)
    if path:
        title = "verl, forward and backward: slowest rank, peak memory over the resting state, errors against fp32"
        print(title, publish.as_table(results.section("verl")), sep="\n")
    ours = [record for record, _ in turns if record["variant"].startswith("ours")]
    return all(record["status"] == "ok" and record["over_unfused_error"] <= ALLOWED for record in ours)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="Folder of verl's package.")
    add("--masked", type=float, default=0.0, help="Part of the tokens that the loss leaves out.")
    add("--tokens", type=int, default=8192, help="Tokens of a microbatch.")
    add("--sequence-length", type=int, default=1024, help="Tokens of a sequence.")
    add("--layers", type=int, default=1, help="Transformer layers.")
    add("--hidden", type=int, default=4096, help="Hidden size.")
    add("--heads", type=int, default=32, help="Attention heads.")
    add("--vocab", type=int, default=151936, help="Vocabulary of all ranks together.")
    add("--device", choices=("cuda", "cpu"), help="Device of all ranks; None: cuda where every rank has a GPU.")
    add("--output", type=Path, default=Path("time_verl.json"), help="JSON file to write.")
    args = parser.parse_args()
    args.tp = int(os.environ["WORLD_SIZE"])
    return args


def main() -> None:
    args = parse_arguments()
    device = megatron_runtime.initialize(args.tp, device=args.device)
    right = work(args, device)
    megatron_runtime.teardown()
    sys.exit(not right)


if __name__ == "__main__":
    main()

"""The demonstration behind `make demo`: a Megatron GPT trained at TP=2 with the fused head on, beside the same run off.

    python -m scripts.demo

Supervised fine-tuning twice from one seed in fp32, then GRPO with the fused head. Prints a table; writes report.json,
sft.png and grpo.png into --out. Exits with 1 when the two runs' losses part by more than 1e-4 at any step, or when
GRPO's reward does not rise.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scripts import pictures, sft_data
from scripts.arguments import HelpFormatter

ALLOWED_DIFFERENCE = 1e-4
REQUIRED_RISE = 0.1  # of the mean reward, from the first to the last tenth of the steps
RANKS = 2
VOCAB_SIZE = 16384
ROW_LENGTH = 4096


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="Folder for reports, pictures and data.")
    parser.add_argument("--sft-steps", type=int, default=30, help="Supervised steps of each of the two runs.")
    parser.add_argument("--grpo-steps", type=int, default=80, help="GRPO steps.")
    return parser


def train(program: str, out: Path, report: str, *options: str) -> dict[str, Any]:
    """Runs a training program on two ranks with torchrun and returns the report it wrote."""
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", f"scripts.{program}", "--tp", str(RANKS), "--sequence-parallel", "--dtype", "fp32"]
    command += ["--device", device, "--out", str(out.resolve()), "--report", report, *options]
    environment = {"OMP_NUM_THREADS": threads, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[1])
    return json.loads((out / report).read_text())


def largest_difference(off: dict[str, Any], on: dict[str, Any]) -> float:
    """Over every step; NaN where a loss is, which Python's own max would pass over."""
    losses = torch.tensor([off["losses"], on["losses"]], dtype=torch.float64)
    return float((losses[0] - losses[1]).abs().max())


def reward_ends(steps: list[dict[str, float]], measure: str = "reward") -> tuple[float, float]:
    """Means of the first and the last tenth of the steps."""
    tenth = max(1, len(steps) // 10)
    values = [step[measure] for step in steps]
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def sft_table(off: dict[str, Any], on: dict[str, Any]) -> Table:
    table = Table(title=f"SFT: TP={RANKS}, fp32, {ROW_LENGTH} tokens a step, vocabulary {VOCAB_SIZE}")
    for column in ("", "flag off", "flag on", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    steps = len(off["losses"])
    for step in sorted({1, 2, *(round(steps * share / 4) for share in (1, 2, 3, 4))}):
        a, b = off["losses"][step - 1], on["losses"][step - 1]
        table.add_row(f"loss at step {step}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    table.add_section()
    table.add_row("largest of all steps", "", "", f"{largest_difference(off, on):.1e}")
    table.add_row("tokens that the head computes", *(f"{run['share_of_rows_computed']:.0%}" for run in (off, on)), "")
    table.add_row("ms per step", *(f"{run['time_per_step_ms']:.0f}" for run in (off, on)), "")
    for rank, (a, b) in enumerate(zip(off["ranks"], on["ranks"], strict=True)):
        saved = a["peak_mib"] - b["peak_mib"]
        table.add_row(f"peak MiB, rank {rank}", f"{a['peak_mib']:.0f}", f"{b['peak_mib']:.0f}", f"{saved:.0f}")
    before = (f"{max(rank['peak_before_training_mib'] for rank in run['ranks']):.0f}" for run in (off, on))
    table.add_row("  of it before training", *before, "")
    table.caption = f"memory: {off['memory_is']}\ntime: {off['time_per_step_is']}"
    return table


def grpo_table(grpo: dict[str, Any]) -> Table:
    steps = grpo["steps"]
    table = Table(title=f"GRPO with the flag on: sorting {grpo['config']['digits']} digits, {len(steps)} steps")
    for column in ("", "first tenth", "last tenth"):
        table.add_column(column, justify="left" if not column else "right")
    names = {
        "reward": "mean reward",
        "all_right": "answers wholly right",
        "entropy": "entropy, nats per token",
        "kl": "KL to the reference, nats per token",
    }
    for measure, name in names.items():
        table.add_row(name, *(f"{value:.3f}" for value in reward_ends(steps, measure)))
    table.add_section()
    gap = max(step["trainer_sampler_largest_difference"] for step in steps)
    table.add_row("largest |trainer - sampler| logprob", "", f"{gap:.1e}")
    shares = reward_ends(steps, "share_of_rows_computed")
    table.add_row("tokens that the head computes", *(f"{share:.0%}" for share in shares))
    table.add_row("ms per step", "", f"{grpo['time_per_step_ms']:.0f}")
    table.add_row("peak MiB of a rank", "", f"{max(rank['peak_mib'] for rank in grpo['ranks']):.0f}")
    return table


def main() -> int:
    args = build_parser().parse_args()
    started = time.perf_counter()
    console = Console()
    console.print("Tokenizer and examples from the standard library; then two SFT runs and GRPO, some minutes ...")
    sft_data.prepare(args.out, VOCAB_SIZE)
    sft_options = ["--vocab-size", str(VOCAB_SIZE), "--row-length", str(ROW_LENGTH), "--steps", str(args.sft_steps)]
    off = train("train_sft", args.out, "sft_off.json", *sft_options, "--no-use-fused-linear-ce")
    on = train("train_sft", args.out, "sft_on.json", *sft_options, "--use-fused-linear-ce", "--workspace-mib", "16")
    grpo = train("train_grpo", args.out, "grpo.json", "--steps", str(args.grpo_steps))

    pictures.draw_sft(args.out / "sft.png", off["losses"], on["losses"], ALLOWED_DIFFERENCE)
    pictures.draw_grpo(args.out / "grpo.png", grpo["steps"])
    difference = largest_difference(off, on)
    first, last = reward_ends(grpo["steps"])
    failures = []
    if not on["fused"]["enabled"]:
        failures.append(f"the fused head was not enabled: {on['fused']['reasons']}")
    if not difference < ALLOWED_DIFFERENCE:
        failures.append(f"the losses differ by {difference:.1e}, allowed is {ALLOWED_DIFFERENCE:.0e}")
    if not last - first >= REQUIRED_RISE:
        failures.append(f"the reward went from {first:.3f} to {last:.3f}, a rise of {REQUIRED_RISE} is required")
    seconds = time.perf_counter() - started
    summary = {"largest_loss_difference": difference, "reward_first_tenth": first, "reward_last_tenth": last}
    report = {"seconds": seconds, "failures": failures, **summary, "sft_off": off, "sft_on": on, "grpo": grpo}
    (args.out / "report.json").write_text(json.dumps(report, indent=1))

    console.print(sft_table(off, on))
    console.print(grpo_table(grpo))
    files = f"Report: {args.out}/report.json. Pictures: {args.out}/sft.png, {args.out}/grpo.png."
    console.print(f"{files} It took {seconds:.0f} s.", soft_wrap=True)
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

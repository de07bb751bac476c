"""The demonstration behind `make demo`: Megatron GPTs trained at TP=2, with the flag off and on.

    python -m scripts.demo

Supervised fine-tuning and GRPO, each twice from one seed in fp32. Prints tables; writes report.json, sft.png and
grpo.png into --out. Without two GPUs it runs on the CPU, and shows correctness and memory, not speed. Exits with 1 if
the SFT losses differ by more than 1e-4 at any step, if GRPO's importance ratio is not 1 at the first update, or if its
reward does not rise.
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

ALLOWED_DIFFERENCE = 1e-4  # of losses, and of the first update's importance ratio from 1
REQUIRED_RISE = 0.1  # of the mean reward, from the first to the last tenth of the steps
RANKS = 2
VOCAB_SIZE = 24576  # so that the head is most of a step's memory, as with large vocabularies
ROW_LENGTH = 4096


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="Folder for reports, pictures and data.")
    parser.add_argument("--sft-steps", type=int, default=16, help="Supervised steps of each of the two runs.")
    parser.add_argument("--grpo-steps", type=int, default=60, help="GRPO steps of each of the two runs.")
    return parser


def device() -> str:
    return "cuda" if torch.cuda.device_count() >= RANKS else "cpu"


def train(program: str, out: Path, report: str, *options: str) -> dict[str, Any]:
    """Runs a training program on two ranks with torchrun and returns the report it wrote."""
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", f"scripts.{program}", "--tp", str(RANKS), "--sequence-parallel", "--dtype", "fp32"]
    command += ["--device", device(), "--out", str(out.resolve()), "--report", report, *options]
    # glibc gives freed tensors back at once, so that the resident set is what a step holds.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": threads, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment |= os.environ
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


def over_rest(rank: dict[str, float]) -> float:
    """A step's peak over what a rank holds before training, in MiB."""
    return rank["peak_mib"] - rank["peak_before_training_mib"]


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    return table


def sft_table(off: dict[str, Any], on: dict[str, Any]) -> Table:
    title = f"SFT: TP={RANKS}, fp32, {ROW_LENGTH} tokens a step, vocabulary {VOCAB_SIZE:,}"
    table, steps = new_table(title, "flag off", "flag on"), len(off["losses"])
    for step in sorted({1, max(1, steps // 2), steps}):
        table.add_row(f"loss at step {step}", *(f"{run['losses'][step - 1]:.6f}" for run in (off, on)))
    table.add_row(f"largest difference in {steps} steps", "", f"{largest_difference(off, on):.0e}")
    table.add_section()
    table.add_row("share of tokens in the head", *(f"{run['share_of_rows_computed']:.0%}" for run in (off, on)))
    table.add_row("ms per step", *(f"{run['time_per_step_ms'] or float('nan'):.0f}" for run in (off, on)))
    for rank, of_rank in enumerate(zip(off["ranks"], on["ranks"], strict=True)):
        table.add_row(f"a step's peak over rest, rank {rank}", *(f"{over_rest(run):,.0f} MiB" for run in of_rank))
    table.caption = (
        "Flag off: Megatron's logits; on: enable_fused_linear_ce. Same weights, same data.\n"
        f"Losses may differ by rounding, at most {ALLOWED_DIFFERENCE:.0e}.\n"
        f"Peak: {off['memory_is']}; rest: the same before training."
    )
    return table


def grpo_table(off: dict[str, Any], on: dict[str, Any]) -> Table:
    title = f"GRPO: TP={RANKS}, fp32, sorting {on['config']['digits']} digits, {len(on['steps'])} steps"
    table = new_table(title, "flag off", "flag on")
    names = {
        "reward": "mean reward",
        "all_right": "answers entirely right",
        "entropy": "entropy, nats",
        "kl": "KL to the reference, nats",
    }
    for measure, name in names.items():
        ends = (reward_ends(run["steps"], measure) for run in (off, on))
        table.add_row(f"{name}, start and end", *(f"{first:.3f}  {last:.3f}" for first, last in ends))
    table.add_section()
    table.add_row("importance ratio, first update", *(f"{first_ratio(run):.4f}" for run in (off, on)))
    gaps = (max(step["trainer_sampler_largest_difference"] for step in run["steps"]) for run in (off, on))
    table.add_row("largest |trainer - sampler| logprob", *(f"{gap:.0e}" for gap in gaps))
    shares = (reward_ends(run["steps"], "share_of_rows_computed")[1] for run in (off, on))
    table.add_row("share of tokens in the head", *(f"{share:.0%}" for share in shares))
    table.add_row("ms per step", *(f"{run['time_per_step_ms'] or float('nan'):.0f}" for run in (off, on)))
    table.caption = (
        "Flag off: Megatron's logits; on: capture_lm_head. Start and end: means of the first and the last tenth of the "
        "steps. Both runs start with the same numbers. Then rounding differs, so that other answers are sampled."
    )
    return table


def first_ratio(grpo: dict[str, Any]) -> float:
    """The mean importance ratio at a step's first update that is farthest from 1."""
    return max((step["first_ratio"] for step in grpo["steps"]), key=lambda ratio: abs(ratio - 1))


def failures_of(runs: dict[str, dict[str, Any]]) -> list[str]:
    """What must not be."""
    difference, grpo = largest_difference(runs["sft_off"], runs["sft_on"]), runs["grpo_on"]
    (first, last), ratio, fused = reward_ends(grpo["steps"]), first_ratio(grpo), runs["sft_on"]["fused"]
    checks = {
        f"the fused head was not enabled: {fused['reasons']}": fused["enabled"],
        f"the losses differ by {difference:.1e}, allowed is {ALLOWED_DIFFERENCE:.0e}": difference < ALLOWED_DIFFERENCE,
        f"the importance ratio is {ratio:.6f} at a first update": abs(ratio - 1) < ALLOWED_DIFFERENCE,
        f"the reward went from {first:.3f} to {last:.3f}, a rise of {REQUIRED_RISE} is required": (
            last - first >= REQUIRED_RISE
        ),
    }
    return [failure for failure, passed in checks.items() if not passed]


def main() -> int:
    args = build_parser().parse_args()
    started, console = time.perf_counter(), Console()
    where = "CPU demo: it shows correctness and memory, not speed." if device() == "cpu" else "Two GPUs."
    console.print(f"{where} Two SFT and two GRPO runs follow, three minutes on two cores ...")
    sft_data.prepare(args.out, VOCAB_SIZE)
    sft_options = ["--vocab-size", str(VOCAB_SIZE), "--row-length", str(ROW_LENGTH), "--steps", str(args.sft_steps)]
    options = {"sft": [*sft_options, "--workspace-mib", "16"], "grpo": ["--steps", str(args.grpo_steps)]}
    runs = {
        f"{program}_{flag}": train(f"train_{program}", args.out, f"{program}_{flag}.json", *options[program], form)
        for program in ("sft", "grpo")
        for flag, form in (("off", "--no-use-fused-linear-ce"), ("on", "--use-fused-linear-ce"))
    }
    off, on = runs["sft_off"], runs["sft_on"]
    peaks = tuple(max(map(over_rest, run["ranks"])) for run in (off, on))
    pictures.draw_sft(args.out / "sft.png", off["losses"], on["losses"], ALLOWED_DIFFERENCE, peaks)
    pictures.draw_grpo(args.out / "grpo.png", runs["grpo_off"]["steps"], runs["grpo_on"]["steps"])
    failures, seconds = failures_of(runs), time.perf_counter() - started
    first, last = reward_ends(runs["grpo_on"]["steps"])
    summary = {"largest_loss_difference": largest_difference(off, on), "first_ratio": first_ratio(runs["grpo_on"])}
    summary |= {"reward_first_tenth": first, "reward_last_tenth": last}
    (args.out / "report.json").write_text(
        json.dumps({"seconds": seconds, "failures": failures, **summary, **runs}, indent=1)
    )

    console.print(sft_table(off, on))
    console.print(grpo_table(runs["grpo_off"], runs["grpo_on"]))
    files = f"Report: {args.out}/report.json. Pictures: {args.out}/sft.png, {args.out}/grpo.png."
    console.print(f"{files} It took {seconds:.0f} s.", soft_wrap=True)
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the training programs share: the loop around Megatron's schedule, and the report."""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_te_version
from tqdm import tqdm

from scripts import megatron_runtime, sft_data

WARM_UP_STEPS = 3  # left out of the time per step: first allocations, first kernels, first collectives
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(work: Callable[[argparse.Namespace, torch.device], None], args: argparse.Namespace) -> None:
    """Starts Megatron, does `work` and ends Megatron once everything `work` built is gone."""
    device = megatron_runtime.initialize(args.tp, seed=args.seed, device=args.device)
    args.device = device.type
    args.dtype = args.dtype or ("bf16" if device.type == "cuda" else "fp32")
    args.out.mkdir(parents=True, exist_ok=True)
    work(args, device)
    megatron_runtime.teardown()


def dtype(args: argparse.Namespace) -> torch.dtype:
    return _DTYPES[args.dtype]


def gpt_options(args: argparse.Namespace, **further: Any) -> megatron_runtime.GptOptions:
    """The model the arguments describe. Losses are summed and divided by the number of tokens of all ranks."""
    return megatron_runtime.GptOptions(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_heads=args.num_heads,
        tied=args.tied,
        sequence_parallel=args.sequence_parallel,
        dtype=dtype(args),
        seed=args.seed,
        config={"calculate_per_token_loss": True},
        **further,
    )


def padded_vocab_size(given: int | None, vocab_size: int) -> int:
    """The model's vocabulary: what --padded-vocab-size says, or that of the tokens."""
    if given is not None and given < vocab_size:
        raise ValueError(
            f"--padded-vocab-size must be at least {vocab_size}, the vocabulary of the tokens, got {given}"
        )
    return given or vocab_size


def train_step(model: torch.nn.Module, optimizer: Any, forward_step: Callable, batches: Iterator, count: int) -> list:
    """One optimizer step over `count` microbatches by Megatron's schedule; the loss functions' reports."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=count,
        # Shapes matter to pipeline stages alone, of which there is one here.
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    return reports


def data_parallel_mean(total: torch.Tensor, count: torch.Tensor) -> float:
    """sum(total) / sum(count) over the data-parallel ranks; 0 where the count is 0."""
    both = torch.stack([total.detach().double(), count.detach().double()])
    torch.distributed.all_reduce(both, group=parallel_state.get_data_parallel_group())
    return float(both[0] / both[1].clamp(min=1))


class StepTimer:
    """Wall time of each step, with the device's work finished at both ends."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times_ms: list[float] = []

    def __enter__(self) -> None:
        self._synchronize()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        self.times_ms.append((time.perf_counter() - self._start) * 1e3)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_ms(self) -> float | None:
        """Median over the steps after the warm-up; None where there are none."""
        times = self.times_ms[WARM_UP_STEPS:]
        return statistics.median(times) if times else None


def progress(steps: int, title: str) -> tqdm:
    """A progress bar on stderr of rank 0; silent on the others."""
    return tqdm(
        range(steps),
        desc=title,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 5,  # a log file keeps every refresh
        disable=torch.distributed.get_rank() != 0,
    )


def peak_mib(device: torch.device) -> float:
    """Peak memory of this rank so far in MiB: allocated on a GPU; on a CPU the whole process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def load_examples(args: argparse.Namespace) -> tuple[list[sft_data.Example], int]:
    """The shuffled examples, prepared by rank 0 for all, and the padding token."""
    if torch.distributed.get_rank() == 0:
        sft_data.prepare(args.out, args.vocab_size)
    torch.distributed.barrier()
    return sft_data.load_examples(sft_data.prepare(args.out, args.vocab_size), args.seed, args.row_length)


def write_report(
    path: Path, args: argparse.Namespace, device: torch.device, timer: StepTimer, peak_before_mib: float, **content: Any
) -> None:
    """Gathers the ranks' memory, writes the JSON report from rank 0 and says where it is. Every rank calls it."""
    ranks: list = [None] * torch.distributed.get_world_size()
    memory = {"peak_mib": peak_mib(device), "peak_before_training_mib": peak_before_mib}
    torch.distributed.all_gather_object(ranks, {"rank": torch.distributed.get_rank(), **memory})
    if torch.distributed.get_rank() != 0:
        return
    report = {
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "versions": versions(device),
        "memory_is": "allocated on the GPU" if device.type == "cuda" else "resident set of the whole process",
        "ranks": ranks,
        "time_per_step_ms": timer.median_ms(),
        "time_per_step_is": f"median after {WARM_UP_STEPS} steps",
        "times_ms": timer.times_ms,
        **content,
    }
    path.write_text(json.dumps(report, indent=1))
    print(summary(path, report))


def summary(path: Path, report: dict[str, Any]) -> str:
    """A program's last line: its report, whether the head was fused, and the peak."""
    flag = report["config"]["use_fused_linear_ce"]
    fused = report.get("fused", {"enabled": flag, "reasons": []})
    head = "fused" if fused["enabled"] else f"not fused ({'; '.join(fused['reasons'])})" if flag else "Megatron's"
    peak = max(rank["peak_mib"] for rank in report["ranks"])
    layers = ""
    if report["config"].get("transformer_impl") == "transformer_engine":
        layers = f" Layers: TransformerEngine {report['versions']['transformer-engine']}."
    return f"Report: {path}.{layers} Head: {head}. Peak of a rank: {peak:,.0f} MiB, {report['memory_is']}."


def versions(device: torch.device) -> dict[str, str]:
    """What the run ran on."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
    }
    return versions | ({"transformer-engine": str(get_te_version())} if HAVE_TE else {})

"""verl's fused forward and its backward with verl's own kernel and with ours: time and peak memory on GPUs.

    torchrun --nproc-per-node 2 frameworks_tests/time_verl.py OWN FUSED      # OWN/verl: as it is, FUSED/verl: adopted

One layer, H 4096, a vocabulary of 151,936 in bf16, 8,192 tokens, sequence parallel: nearly all of it is the head.
"""

import os
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from comparing import megatron_runtime
from run_verl import fused, import_verl
from torch import Tensor

SEQUENCES, LENGTH, HIDDEN, VOCABULARY = 8, 1024, 4096, 151936
WARM_UPS, ROUNDS = 3, 7


def step(verl: SimpleNamespace, model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """Forward with logprobs and entropy, backward from both; the logprobs' mean, and the milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = fused(verl, model, tokens)
    logprobs, entropy = result["log_probs"].values(), result["entropy"].values()
    (-logprobs.mean() - 0.01 * entropy.mean()).backward()
    end.record()
    end.synchronize()
    model.zero_grad()
    return logprobs.detach().mean(), start.elapsed_time(end)


def measure(name: str, folder: str, device: torch.device) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == "verl"]:
        del sys.modules[module]
    verl = import_verl(Path(folder))
    options = megatron_runtime.GptOptions(
        num_layers=1,
        hidden_size=HIDDEN,
        num_heads=32,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        sequence_parallel=dist.get_world_size() > 1,
        dtype=torch.bfloat16,
    )
    model = megatron_runtime.build_gpt(options, device=device)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (LENGTH,), generator=generator).to(device) for _ in range(SEQUENCES)]
    tokens = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for _ in range(WARM_UPS):
        step(verl, model, tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    means, times = zip(*(step(verl, model, tokens) for _ in range(ROUNDS)), strict=True)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    if dist.get_rank() == 0:
        print(
            f"{name}: {statistics.median(times):.1f} ms, {peak:.0f} MiB over rest, mean logprob {float(means[0]):.5f}"
        )


def main() -> None:
    device = megatron_runtime.initialize(int(os.environ["WORLD_SIZE"]), device="cuda")
    for name, folder in zip(("verl's own kernel", "ours"), sys.argv[1:], strict=True):
        measure(name, folder, device)
    megatron_runtime.teardown()


if __name__ == "__main__":
    main()

"""Megatron models under Megatron-FSDP and torch's FSDP2 on GPUs, the fused head on and off.

    torchrun --nproc-per-node 4 torchrun_tests/run_megatron_fsdp.py [--tp 2]

Megatron-FSDP needs GPUs. `run_megatron.py` runs FSDP2 as well, on CPUs too, and with tensor parallelism.
"""

import dataclasses
import functools
import sys
import warnings

import harness
import megatron_cases as cases
import torch
from harness import compare_all
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer import TransformerLayer
from megatron_fsdp import ALONE, FSDP2_CASES, OutputLayer, check_flag, check_fsdp, check_fsdp_errors
from torch import Tensor, nn

from megatron_lce import capture_lm_head
from megatron_lce.megatron.reasons import find_language_model
from scripts import megatron_runtime
from scripts.arguments import OPTIONS

OTHER_STRATEGIES = ("no_shard", "optim", "optim_grads")
OTHERS = [
    dataclasses.replace(ALONE, tied=True),
    dataclasses.replace(ALONE, masked=True),
    dataclasses.replace(ALONE, known=True),
    dataclasses.replace(ALONE, masked=True, known=True),
    cases.in_16_bit(ALONE),
    cases.in_16_bit(dataclasses.replace(ALONE, masked=True, known=True)),
]


def in_megatron_fsdp(model: nn.Module, strategy: str, unit_head: bool) -> FullyShardedDataParallel:
    """`unit_head`: the output layer is a unit, whose weight is freed after its call; else it stays whole for a step."""
    units = None
    if unit_head:
        find_language_model(model).output_layer.__class__ = OutputLayer
        units = [TransformerLayer, OutputLayer]
    overlap = strategy in ("optim_grads", "optim_grads_params")
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        grad_reduce_in_fp32=True,
    )
    wrapped = FullyShardedDataParallel(model.config, settings, model, fsdp_unit_modules=units)
    wrapped.config.finalize_model_grads_func = finalize_model_grads
    wrapped.config.no_sync_func = wrapped.no_sync
    return wrapped


def step(model: FullyShardedDataParallel, case: cases.Case, batches: list[dict[str, Tensor]]) -> tuple[dict, dict]:
    """Megatron's schedule over the microbatches: (losses, this rank's shards of the gradients, in fp32)."""
    losses = cases.train_step([model], functools.partial(cases.forward_step, masked=case.masked), batches)
    gradients = {
        name.replace("module.", ""): parameter.grad.to_local().float().clone()
        for name, parameter in model.param_and_grad_buffer.optimizer_named_parameters
        if parameter.grad is not None
    }
    return losses, gradients


def check_megatron_fsdp(
    strategy: str, unit_head: bool, case: cases.Case, device: torch.device, report: harness.Report
) -> None:
    """The flag on against off, in two steps; and off again."""
    name = f"Megatron-FSDP {strategy}{', head a unit' * unit_head}, {case.name}"
    batches = cases.microbatches(case, device)
    model = megatron_runtime.build_gpt(cases.gpt_options(case), device=device)
    model = in_megatron_fsdp(model, strategy, unit_head)
    native = step(model, case, batches)
    exact = None
    if case.dtype != torch.float32:
        exact_case = cases.in_fp32(case)
        exact_model = megatron_runtime.build_gpt(cases.gpt_options(exact_case), device=device)
        rounded = megatron_runtime.build_gpt(cases.gpt_options(case), device=device)
        cases.copy_weights([rounded], [exact_model])
        _, exact = step(in_megatron_fsdp(exact_model, strategy, unit_head), exact_case, batches)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fused linear cross-entropy")  # of a loss that is not fused
        check_flag(name, model, case, native, exact, lambda: step(model, case, batches), report)
    message = harness.message_of(capture_lm_head(model).__enter__)
    report.check(f"{name}: a capture is refused", "the head's weight is managed by FSDP" in message, message)
    _, again = step(model, case, batches)
    compare_all(report, f"{name}: removed, gradients", again, native[1])


def check_strategies(
    tensor_parallel: int, sequence_parallel: bool, device: torch.device, report: harness.Report
) -> None:
    """The strategy that shards parameters in every case, the others in one."""
    alone, *others = (
        dataclasses.replace(case, tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel)
        for case in (ALONE, *OTHERS)
    )
    for strategy in OTHER_STRATEGIES:
        check_megatron_fsdp(strategy, False, alone, device, report)
    for case in (alone, *others):
        for unit_head in (False, True):
            if not (case.tied and unit_head):  # the embedding has the head's weight then
                check_megatron_fsdp("optim_grads_params", unit_head, case, device, report)


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--tp", type=int, default=1, help=f"{OPTIONS['tp'][2]} Beyond 1 only Megatron-FSDP is run.")
    arguments = parser.parse_args()
    report = harness.Report()
    device = megatron_runtime.initialize(arguments.tp, device=arguments.device)
    for sequence_parallel in (False, True) if arguments.tp > 1 else (False,):
        check_strategies(arguments.tp, sequence_parallel, device, report)
    if arguments.tp == 1:
        for sharding, case in FSDP2_CASES:
            check_fsdp(sharding, case, device, report)
        check_fsdp_errors(ALONE, device, report)
    failed = report.conclude()
    megatron_runtime.teardown()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

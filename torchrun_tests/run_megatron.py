"""Megatron models at TP=2 and 4, the fused head on and off: losses, logits and every parameter's gradient.

    torchrun --nproc-per-node 4 torchrun_tests/run_megatron.py --device cpu [--combinations all] [--checks fsdp]

On 4 ranks, cases at TP=2 without pipeline parallelism have two data-parallel replicas; on 2 ranks, cases that need 4
are left out. One rank runs what is left without tensor, sequence and pipeline parallelism.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable

import harness
import megatron_cases as cases
import megatron_te
import megatron_topologies as topologies
import torch
from megatron.core import parallel_state, process_groups_config
from megatron.core.transformer import TransformerConfig
from megatron_fsdp import ALONE, FSDP2_CASES, HEAD, MEGATRONS, MODEL, check_fsdp, check_fsdp_errors
from megatron_heads import (
    check_arguments_of_one_rank,
    check_compat,
    check_later_steps,
    check_logits,
    check_mtp_capture,
    check_own_groups,
    check_reasons_of_one_rank,
)
from megatron_training import (
    LOSS_OF_HEAD,
    check_16_bit,
    check_captured_training,
    check_loss_scaler,
    check_loss_terms,
    check_other_models,
    check_own_flag,
    check_training,
    check_weighted_loss,
)

from scripts import megatron_runtime
from scripts.arguments import TRANSFORMER_IMPLS
from scripts.megatron_layers import uses_transformer_engine

FURTHER_CASES = [
    cases.Case(tied=True, pipeline=True, virtual_pipeline=True),
    cases.Case(sequence_parallel=True, main_grad=True, overlap=True),
    cases.Case(sequence_parallel=True, mtp=True, masked=True),
    cases.Case(tied=True, sequence_parallel=True, main_grad=True, masked=True),
    cases.Case(known=True),
    cases.Case(tied=True, sequence_parallel=True, masked=True, known=True),
    cases.Case(sequence_parallel=True, mtp=True, masked=True, known=True),
    cases.Case(tied=True, mtp=True, main_grad=True, overlap=True, known=True),
    cases.Case(tied=True, pipeline=True, virtual_pipeline=True, known=True),
    cases.Case(sequence_parallel=True, pipeline=True, main_grad=True, masked=True, known=True),
    cases.Case(tensor_parallel=4, masked=True, known=True),
    cases.Case(tensor_parallel=4, tied=True, sequence_parallel=True, known=True),
    cases.Case(tensor_parallel=8, masked=True),
    cases.Case(tensor_parallel=8, tied=True, sequence_parallel=True, masked=True, known=True),
]
IN_BF16 = [
    cases.Case(),
    cases.Case(tied=True, mtp=True, pipeline=True, main_grad=True),
]
EVERY_WAY = cases.in_16_bit(cases.Case(sequence_parallel=True))
IN_FP16 = [
    cases.Case(sequence_parallel=True),
    cases.Case(sequence_parallel=True, known=True),
    cases.Case(tied=True, mtp=True, main_grad=True, overlap=True, masked=True, known=True),
]
LOSS_TERMS = cases.Case(sequence_parallel=True, mtp=True, masked=True, known=True)
OTHER_MODEL_CASES = [cases.Case(), cases.Case(tied=True, sequence_parallel=True)]
OWN_GROUPS = [cases.Case(tensor_parallel=1), cases.Case(tied=True)]
if not hasattr(process_groups_config, "ProcessGroupCollection"):  # before 0.15
    OWN_GROUPS = []
MUP = (("use_mup", True), ("mup_base_hidden_size", 16))
SETTINGS = TransformerConfig.__dataclass_fields__
OWN_FLAG_CASES = [cases.Case(mtp=True), cases.Case(tied=True, sequence_parallel=True)] if LOSS_OF_HEAD else []
if "use_mup" in SETTINGS and not LOSS_OF_HEAD:  # from 0.17; the dev branch multiplies its factor by None, given labels
    FURTHER_CASES.append(cases.Case(mtp=True, config=MUP))
if "mtp_detach_heads" in SETTINGS:  # from 0.19
    FURTHER_CASES.append(cases.Case(mtp=True, main_grad=True, config=(("mtp_detach_heads", True),)))
if importlib.util.find_spec("megatron.core.models.hybrid") is not None:  # from 0.18, the first with MTP
    OTHER_MODEL_CASES.append(cases.Case(tied=True, mtp=True))
FSDP_CASES = [
    *FSDP2_CASES,
    (HEAD, cases.Case(sequence_parallel=True, masked=True, known=True)),
    (MODEL, cases.Case(tied=True)),
    (MEGATRONS, cases.Case(sequence_parallel=True)),
]
CAPTURED_CASES = [
    cases.Case(mtp=True, main_grad=True),
    cases.Case(tied=True, sequence_parallel=True, pipeline=True, virtual_pipeline=True),
]
MTP_CAPTURE_CASES = [
    cases.Case(mtp=True, sequence_parallel=True),
    cases.Case(mtp=True, tied=True, main_grad=True),
]
if "mtp_detach_heads" in SETTINGS:
    MTP_CAPTURE_CASES.append(cases.Case(mtp=True, sequence_parallel=True, config=(("mtp_detach_heads", True),)))


def checks(combinations: str, ranks: int) -> list[tuple[Callable, cases.Case]]:
    training, in_bf16 = cases.pairwise_combinations(), IN_BF16
    # Over two data-parallel ranks: on two ranks the cases without tensor parallelism, on four the others.
    of_fsdp = [(sharding, case) for sharding, case in FSDP_CASES if 2 * case.ranks == max(ranks, 2)]
    if combinations == "all":
        training, of_fsdp = cases.all_combinations(), FSDP_CASES
        in_bf16 = training
    plain = [cases.Case(), cases.Case(tied=True, sequence_parallel=True)]
    groups = (
        (check_training, training + FURTHER_CASES),
        (check_own_flag, OWN_FLAG_CASES),
        (check_captured_training, CAPTURED_CASES),
        (check_other_models, OTHER_MODEL_CASES),
        (check_16_bit, [cases.in_16_bit(case) for case in in_bf16]),
        (functools.partial(topologies.check_topology, topologies.Topology(EVERY_WAY)), [EVERY_WAY]),
        (check_loss_scaler, [cases.in_16_bit(case, torch.float16) for case in IN_FP16]),
        (check_loss_terms, [plain[1], LOSS_TERMS]),
        (check_weighted_loss, [cases.Case(known=True), cases.Case(sequence_parallel=True, known=True)]),
        (check_mtp_capture, MTP_CAPTURE_CASES),
        (check_logits, plain),
        (check_compat, [cases.Case()]),
        (check_reasons_of_one_rank, [cases.Case(), cases.Case(pipeline=True)]),
        (check_arguments_of_one_rank, plain),
        (check_later_steps, [cases.Case(known=True), LOSS_TERMS]),
        *((functools.partial(check_fsdp, sharding), [case]) for sharding, case in of_fsdp),
        (check_fsdp_errors, [case for sharding, case in of_fsdp if case == ALONE]),
        (check_own_groups, OWN_GROUPS[: ranks - 1]),
    )
    return [(check, case) for check, chosen in groups for case in chosen]


def name_of(check: Callable) -> str:
    return getattr(check, "func", check).__name__


def on_one_rank(case: cases.Case) -> cases.Case:
    return dataclasses.replace(case, tensor_parallel=1, sequence_parallel=False, pipeline=False, virtual_pipeline=False)


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument(
        "--combinations",
        choices=("pairwise", "all"),
        default="pairwise",
        help="Of the settings: every pair once, or all; all of the other cases, too.",
    )
    parser.add_argument(
        "--transformer-impl",
        choices=TRANSFORMER_IMPLS,
        default="local",
        help="Layers: local, or Megatron's over TransformerEngine, in bf16 and fp8 on GPUs.",
    )
    parser.add_argument(
        "--checks", default="", help="Only those with this in the name of check or case, such as fsdp, topology, CP=2."
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = harness.Report()
    ranks = int(os.environ["WORLD_SIZE"])
    over_te = arguments.transformer_impl == "transformer_engine"
    of_te = [*megatron_te.checks(), *topologies.checks(ranks)] if over_te else []
    found = of_te or checks(arguments.combinations, ranks)
    runnable = [(check, case) for check, case in found if case.ranks <= max(ranks, 2)]
    runnable = [pair for pair in runnable if arguments.checks in f"{name_of(pair[0])} {pair[1].name}"]
    if ranks == 1:
        runnable = list(dict.fromkeys((check, on_one_rank(case)) for check, case in runnable))
    uses_transformer_engine(arguments.transformer_impl)  # raises if it is not installed
    device = megatron_runtime.initialize(min(ranks, 2), device=arguments.device)
    # Layout by layout, few changes: Megatron never destroys its process groups, and each one's gloo threads stay.
    for layout in sorted({case.layout for _, case in runnable}, key=str):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**dict(layout))
        for check, case in runnable:
            if case.layout == layout:
                check(case, device, report)
    failed = report.conclude()
    megatron_runtime.teardown()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

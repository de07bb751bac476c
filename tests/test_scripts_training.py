"""The training programs at TP=2 with the flag on and off; started on ranks, this file takes one data-parallel step."""

import json
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("rich")

from megatron.core import parallel_state

from scripts import megatron_runtime, sft_data, train_sft, training
from tests.ranks import run_ranks

VOCAB_SIZE = 512
pytestmark = pytest.mark.torchrun


def prepare_few_examples(folder: Path) -> None:
    """Every 25th file of the standard library, where the programs find it and take it for the whole of it."""
    some = sft_data.stdlib_sources()[::25]
    with mock.patch.object(sft_data, "stdlib_sources", return_value=some):
        sft_data.prepare(folder, VOCAB_SIZE)


def both(program: str, out: Path, *options: str) -> list[dict]:
    """Reports of the program with the flag off and on."""
    reports = []
    for flag in ("no-use", "use"):
        name = f"{flag}.json"
        options_of_run = ("--tp", "2", "--device", "cpu", f"--{flag}-fused-linear-ce", "--out", str(out))
        run_ranks(2, f"scripts.{program}", *options_of_run, "--report", name, *options)
        reports.append(json.loads((out / name).read_text()))
    return reports


def test_sft_is_the_same_with_the_flag_on(tmp_path):
    prepare_few_examples(tmp_path)
    # Every Python's standard library is another text: steps so large that the loss falls on any of them.
    options = f"--sequence-parallel --steps 6 --lr 3e-3 --vocab-size {VOCAB_SIZE} --row-length 256 --hidden-size 64"
    off, on = both("train_sft", tmp_path, *options.split(), "--num-microbatches", "2")
    assert (off["fused"]["enabled"], on["fused"]["enabled"]) == (False, True)
    assert on["losses"] == pytest.approx(off["losses"], abs=1e-5)
    assert on["losses"][-1] < on["losses"][0] - 0.1
    assert 0.2 < on["share_of_rows_computed"] < 0.9 < off["share_of_rows_computed"] == 1.0
    assert on["time_per_step_ms"] > 0
    assert [rank["peak_mib"] > 100 for rank in on["ranks"]] == [True, True]


def test_grpo_is_the_same_with_the_flag_on(tmp_path):
    options = ("--steps", "2", "--warm-up-steps", "5", "--prompts", "4", "--samples", "4", "--digits", "3", "--tied")
    off, on = both("train_grpo", tmp_path, *options, "--updates", "2", "--num-microbatches", "2")
    assert on["warm_up_losses"] == pytest.approx(off["warm_up_losses"], abs=1e-5)
    for with_flag, without in zip(on["steps"], off["steps"], strict=True):
        for measure in ("reward", "loss", "entropy", "kl"):
            assert with_flag[measure] == pytest.approx(without[measure], abs=1e-4), measure
        assert with_flag["trainer_sampler_largest_difference"] < 1e-4
        assert with_flag["first_ratio"] == pytest.approx(1.0, abs=1e-6)
        assert without["first_ratio"] == pytest.approx(1.0, abs=1e-6)


def test_the_mean_is_over_all_tokens_of_all_data_parallel_ranks(tmp_path):
    """Two ranks with a microbatch each do what one rank does with both, though the masks hold 1 token and 9."""
    weights = []
    for ranks in (1, 2):
        path = tmp_path / f"{ranks}.pt"
        run_ranks(ranks, __file__, path)
        weights.append(torch.load(path))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def _one_step(device: torch.device, path: str) -> None:
    options = megatron_runtime.GptOptions(num_layers=1, vocab_size=32, config={"calculate_per_token_loss": True})
    model = megatron_runtime.build_gpt(options, device=device, ddp=True)
    # With this epsilon a gradient's size counts.
    optimizer = megatron_runtime.build_optimizer([model], clip_grad=0.0, adam_eps=1.0)
    rows = [sft_data.pack([sft_data.Example(list(range(1, 12)), prompt)], 0, 12) for prompt in (10, 2)]
    mine = rows[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    training.train_step(model, optimizer, partial(train_sft.forward_step, device=device), iter(mine), len(mine))
    if torch.distributed.get_rank() == 0:
        torch.save({name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, path)


def test_distillation_is_the_same_with_the_flag_on(tmp_path):
    prepare_few_examples(tmp_path)
    options = "--beta 0.3 --temperature 2 --sequence-parallel --teacher-steps 4 --steps 6 --held-out-rows 2"
    sizes = f"--vocab-size {VOCAB_SIZE} --row-length 256 --hidden-size 64 --student-hidden-size 32"
    off, on = both("train_distill", tmp_path, *options.split(), *sizes.split())
    assert on["teacher_losses"] == pytest.approx(off["teacher_losses"], abs=1e-5)
    assert on["losses"] == pytest.approx(off["losses"], abs=1e-5)
    assert on["losses"][-1] < 0.9 * on["losses"][0]
    assert on["student_cross_entropies"][-1][1] < on["student_cross_entropies"][0][1]
    # A top-k of the whole vocabulary is the vocabulary.
    topk = ("--topk", str(VOCAB_SIZE), "--tail", "drop", "--report", "topk.json", "--out", str(tmp_path))
    run_ranks(2, "scripts.train_distill", "--tp", 2, "--device", "cpu", *topk, *options.split(), *sizes.split())
    assert json.loads((tmp_path / "topk.json").read_text())["losses"] == pytest.approx(on["losses"], abs=1e-5)
    assert (tmp_path / "use.png").stat().st_size > 10_000


def run(program, folder, options):
    prepare_few_examples(folder)
    sizes = f"--tp 2 --sequence-parallel --device cpu --vocab-size {VOCAB_SIZE} --row-length 256 --hidden-size 64"
    run_ranks(2, f"scripts.{program}", *sizes.split(), "--out", folder, "--report", "report.json", *options.split())
    return json.loads((folder / "report.json").read_text())


def test_the_student_learns_from_what_it_sampled(tmp_path):
    options = "--on-policy --beta 1 --teacher-steps 6 --steps 8 --held-out-rows 1 --prompts 4 --lr 1e-2"
    report = run("train_distill", tmp_path, options + " --prompt-length 8 --sampled-tokens 8 --student-hidden-size 32")
    losses = report["losses"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_mtp_heads_learn_from_each_loss(tmp_path):
    report = run("train_mtp", tmp_path, "--teacher-steps 40 --teacher-lr 1e-2 --steps 10 --held-out-rows 2")
    assert report["acceptance"].keys() == {"cross-entropy", "LK", "total variation"}
    for name, curve in report["acceptance"].items():
        assert [steps for steps, _ in curve] == [*range(10), 10]
        assert all(0 < rate < 1 for _, rates in curve for rate in rates)
        assert min(curve[-1][1]) > max(curve[0][1]), name
    assert (tmp_path / "report.png").stat().st_size > 10_000


if __name__ == "__main__":
    _one_step(megatron_runtime.initialize(device="cpu"), sys.argv[1])
    megatron_runtime.teardown()

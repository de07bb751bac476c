"""The distillation program at TP=2 with `linear_jsd` and with materialised logits."""

import json

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("rich")

from tests.ranks import run_ranks
from tests.test_scripts_training import VOCAB_SIZE, both, prepare_few_examples

pytestmark = pytest.mark.torchrun


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

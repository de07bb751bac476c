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

"""Benchmarks of the flag on a CPU at a tiny size: training runs that differ by nothing but their way."""

import random

import pytest

from benchmark import pictures, results, run, training_text
from tests.ranks import run_ranks


def words(tmp_path):
    """A file of 4,020 tokens of few words, in documents of 500 bytes and more."""
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = random.Random(0)
    for index in range(20):
        text = " ".join(generator.choice(["a", "fused", "head", "takes", "no", "logits"]) for _ in range(200))
        (folder / f"{index}.md").write_text(text)
    (folder / "again.md").write_text((folder / "0.md").read_text())
    path = tmp_path / "tokens.bin"
    return path, training_text.prepare(path, [folder], 300, 5000)


@pytest.mark.torchrun
def test_training_runs_differ_by_the_order_of_sums_only(tmp_path):
    pytest.importorskip("megatron.core")
    path, _ = words(tmp_path)
    output = tmp_path / "training.json"
    sizes = "--steps 4 --layers 1 --vocab 300 --tokens 32 --microbatches 4 --lr 6e-4"
    run_ranks(1, "benchmark.run", "training", "--device", "cpu", "--text", path, *sizes.split(), "--json", output)
    document = results.load(output)
    records = {record["run"]: record for record in document["training"]}
    assert list(records) == list(run.RUNS)
    for name, record in records.items():
        native = records["native"]["losses"]
        assert record["status"] == "ok"
        assert record["losses"][0] == pytest.approx(native[0], abs=1e-4), name  # of the same tokens
        assert record["losses"][-1] < record["losses"][0] - 0.05, name
        differences = [abs(a - b) for a, b in zip(record["losses"], native, strict=True)]
        assert name == "native" or 0 < max(differences) < 1e-3, name
    assert pictures.draw("training", document, tmp_path).exists()

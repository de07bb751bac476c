"""Benchmarks of the flag on a CPU at a tiny size: training runs that differ by nothing but their way."""

import random

import pytest
import torch

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


def text_of_words(tmp_path, options=""):
    """The module of training runs, its arguments, and the text of the words."""
    pytest.importorskip("megatron.core")
    curves, (path, _) = pytest.importorskip("benchmark.training_curves"), words(tmp_path)
    arguments = f"training --device cpu --text {path} --steps 10 --vocab 300 {options}"
    arguments = run.parse_arguments(arguments.split())
    return curves, arguments, curves.Text(arguments, torch.device("cpu"))


def test_runs_that_take_sums_in_another_order_see_the_same_sequences(tmp_path):
    curves, arguments, text = text_of_words(tmp_path, "--microbatches 4")
    split = {}
    for order in (0, 1):
        batches = text.step(3, curves.Run("", order))
        assert len(batches) == arguments.microbatches
        split[order] = [{tuple(sequence) for sequence in batch["input_ids"].tolist()} for batch in batches]
        assert torch.equal(batches[0]["input_ids"][:, 1:], batches[0]["labels"][:, :-1])
    assert set().union(*split[0]) == set().union(*split[1])
    assert set(map(frozenset, split[0])) != set(map(frozenset, split[1]))
    arguments.microbatches = 100
    with pytest.raises(ValueError, match="tokens: a step and the held-out text have more than"):
        curves.Text(arguments, torch.device("cpu"))


def test_a_text_begins_again_at_its_end_without_what_is_held_out(tmp_path):
    curves, _, text = text_of_words(tmp_path)
    held_out = {tuple(row) for batch in text.held_out() for row in batch["input_ids"].tolist()}
    steps = [text.step(step, curves.Run(""))[0]["input_ids"] for step in range(200)]
    rows = [tuple(row) for batch in steps for row in batch.tolist()]
    assert len(rows) > text.trained
    assert rows[text.trained :] == rows[: len(rows) - text.trained]
    assert not held_out & set(rows)


@pytest.mark.parametrize("tied", [False, True])
def test_neurons_in_another_order_are_the_same_function(tied):
    pytest.importorskip("megatron.core")
    from benchmark import training_curves
    from scripts import megatron_runtime
    from tests import megatron_world

    with megatron_world.world() as device:
        model = megatron_runtime.build_gpt(megatron_world.options(tied=tied), device=device)
        for parameter in model.parameters():
            parameter.data.add_(torch.rand_like(parameter) * 0.1)  # norms begin with ones
        tensors, _ = megatron_world.inputs(device)
        before, expected = model.decoder.layers[0].mlp.linear_fc1.weight.clone(), model(*tensors)
        training_curves.shuffle_neurons(model, 1)
        assert not torch.equal(model.decoder.layers[0].mlp.linear_fc1.weight, before)
        torch.testing.assert_close(model(*tensors), expected, rtol=1e-5, atol=1e-5)

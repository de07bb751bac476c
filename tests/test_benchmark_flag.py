"""Benchmarks of the flag on a CPU at a tiny size: its head, and training runs that differ by nothing but their way."""

import random

import pytest
import torch

from benchmark import measure, pictures, providers, publish, results, run, training_text
from benchmark.shapes import make_inputs, parse_shape
from tests.ranks import run_ranks


def test_the_flags_known_loss_is_measured_beside_linear_token_loss():
    arguments = "known_loss --device cpu --dtype fp32 --shapes 12x8x40 --budget-ms 1 --rounds 1"
    document = run.main(arguments.split())
    times = {(record["provider"], record["mode"]): record for record in document["times"]}
    assert times["ours-known-640", "rl"]["status"] == "unsupported"
    assert times["ours-known-640", "sft"]["over_products"] > 0
    inputs = make_inputs(parse_shape("12x8x40"), torch.float32, torch.device("cpu"))
    head = providers.PROVIDERS["ours-known-640"].load()
    for _ in range(2):
        assert max(measure.measure_error(head, inputs, "sft", measure.oracle(inputs)).values()) < 1e-5


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


def test_tokens_of_text_are_those_that_were_written(tmp_path):
    pytest.importorskip("tokenizers")
    path, written = words(tmp_path)
    header, tokens = training_text.load(path)
    assert header == written
    assert (len(tokens), tokens.dtype) == (header["tokens"], torch.int64)
    ends = (tokens == 1).nonzero().flatten()  # the end of a text
    assert len(ends) == header["documents"] == 20  # the one that is there twice counts once
    assert int(tokens.max()) < header["vocab"] <= 300


@pytest.mark.torchrun
def test_training_curves_differ_by_the_order_of_sums_only(tmp_path):
    pytest.importorskip("megatron.core")
    path, _ = words(tmp_path)
    output = tmp_path / "curves_h100.json"
    chosen = [name for name in run.RUNS if not name.endswith(("2", "3", "4", "5"))]
    sizes = f"--steps 4 --layers 1 --vocab 300 --tokens 32 --lr 6e-4 --runs {','.join(chosen)}"
    run_ranks(1, "benchmark.run", "curves", "--device", "cpu", "--text", path, *sizes.split(), "--json", output)
    document = results.load(output)
    records = {record["run"]: record for record in document["curves"]}
    assert list(records) == chosen
    for name, record in records.items():
        native = records["masked-native" if record["masked"] else "native"]
        assert record["status"] == "ok"
        assert record["losses"][0] == pytest.approx(native["losses"][0], abs=1e-4), name  # of the same tokens
        assert record["losses"][-1] < record["losses"][0] - 0.05, name
        assert 0 < record["difference_median"] <= record["difference_largest"] < 1e-3, name
        record["peak_mib"] = record["time_ms"]  # for the table: a CPU has none
    assert records["masked-native"]["losses"][0] != records["native"]["losses"][0]
    assert pictures.draw("training", document, tmp_path).exists()
    assert publish.curves(document, document, document).count("\n") == 2 + len(chosen) - 2  # native runs share a row


@pytest.mark.torchrun
def test_a_sampler_and_its_trainer_differ_by_hidden_states_and_by_rounding(tmp_path):
    pytest.importorskip("megatron.core")
    path, _ = words(tmp_path)
    output = tmp_path / "rounding_cpu.json"
    sizes = "--steps 4 --layers 1 --vocab 300 --tokens 64 --sequence-length 16 --hidden 32 --heads 4"
    run_ranks(1, "benchmark.run", "rounding", "--device", "cpu", "--text", path, *sizes.split(), "--json", output)
    document = results.load(output)
    assert document["model"]["held_out_loss"] < document["model"]["losses"][0]
    records = {record["trainer"]: record for record in document["rounding"]}
    assert all(record["status"] == "ok" for record in records.values())
    same = records.pop("same")
    assert same["hidden_difference"] == 0
    assert same["both_fp32"] < 1e-6 < 2e-5 < same["sampler_bf16"]
    assert same["both_bf16"] < same["sampler_bf16"] / 10
    for record in records.values():
        assert 1e-4 < record["hidden_difference"] < 2**-6
        assert record["both_fp32"] > 10 * same["both_fp32"]
    assert publish.rounding(document).count("\n") == 2 + len(document["rounding"])


def test_runs_that_take_sums_in_another_order_see_the_same_sequences(tmp_path):
    pytest.importorskip("megatron.core")
    curves = pytest.importorskip("benchmark.training_curves")
    path, _ = words(tmp_path)
    arguments = run.parse_arguments(f"curves --device cpu --text {path} --steps 10 --vocab 300".split())
    text = curves.Text(arguments, torch.device("cpu"))
    split = {}
    orders = (0, *run.ORDERS)
    for order in orders:
        batches = text.step(3, curves.Run("", order))
        assert len(batches) == arguments.microbatches
        split[order] = [{tuple(sequence) for sequence in batch["input_ids"].tolist()} for batch in batches]
        assert torch.equal(batches[0]["input_ids"][:, 1:], batches[0]["labels"][:, :-1])
    assert len({frozenset().union(*sets) for sets in split.values()}) == 1
    assert len({frozenset(map(frozenset, sets)) for sets in split.values()}) == len(orders)
    masked = text.step(3, curves.Run("", masked=True))
    share = torch.cat([batch["loss_mask"] for batch in masked]).mean()
    assert 0.1 <= share <= 0.7
    arguments.steps = 100
    with pytest.raises(ValueError, match="steps: must be at most"):
        curves.Text(arguments, torch.device("cpu"))


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

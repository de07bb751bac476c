"""The benchmark on a CPU at tiny shapes: numbers are what they claim to be, none is dropped; what is published."""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import random
import re

import pytest
import torch

from benchmark import measure, pictures, providers, publish, results, run, training_text
from benchmark.shapes import Shape, make_inputs
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SHAPE = Shape("tiny", 12, 8, 40)


def test_error_sees_a_head_that_is_one_percent_off():
    def wrong_head(*arguments):
        return tuple(1.01 * output for output in providers._eager_head(*arguments))

    inputs = make_inputs(SHAPE, torch.float64, CPU)
    expected = measure.oracle(inputs)
    right = measure.measure_error(providers._eager_head, inputs, "rl", expected)
    wrong = measure.measure_error(wrong_head, inputs, "rl", expected)
    assert max(right.values()) < 1e-5
    assert wrong["grad_hidden_relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert wrong["grad_weight_relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert wrong["logprobs_max_error"] == pytest.approx(0.01 * expected["logprobs"].abs().max().item(), rel=1e-3)


def test_a_run_records_what_failed_and_what_is_missing_and_goes_on(tmp_path, monkeypatch, capsys):
    def failing(*arguments):
        raise RuntimeError("no such kernel")

    def absent():
        raise ModuleNotFoundError("No module named 'peer'")

    heads = {
        "eager": providers.PROVIDERS["eager"],
        "failing": providers.Provider("failing", lambda: failing),
        "absent": providers.Provider("absent", absent),
        "mean-only": providers.Provider("mean-only", lambda: providers._eager_head, ("sft",), "gives the mean only"),
        "ours": providers.PROVIDERS["ours"],
    }
    monkeypatch.setattr(providers, "PROVIDERS", heads)
    output = tmp_path / "results" / "run.json"
    arguments = "head --device cpu --dtype fp32 --shapes 8x8x24 --providers all --modes fwd,rl --error-shape 6x8x16"
    arguments += f" --budget-ms 1 --memory-tokens 4,8 --memory-modes rl --json {output}"
    document = run.main(arguments.split())

    assert json.loads(output.read_text()) == document
    loaded = {record["provider"]: record["status"] for record in document["providers"]}
    assert loaded == {name: "not installed" if name == "absent" else "ok" for name in heads}
    status = {(record["provider"], record["mode"]): record for record in document["times"]}
    assert status["failing", "rl"]["reason"] == "RuntimeError: no such kernel"
    assert status["mean-only", "rl"] | {"shape": ""} == {
        "provider": "mean-only", "mode": "rl", "shape": "", "status": "unsupported", "reason": "gives the mean only",
    }  # fmt: skip
    assert status["ours", "rl"]["time_ms"] > 0
    assert status["ours", "rl"]["over_products"] > status["ours", "rl"]["over_products_recomputed"] > 0
    assert {record["provider"] for record in document["errors"] if record["status"] == "ok"} == {
        "eager", "mean-only", "ours",
    }  # fmt: skip
    sizes = {(record["tokens"], record["provider"], record["mode"]) for record in document["memory"]}
    kinds = {("eager", "rl"), ("failing", "rl"), ("ours", "rl"), ("mean-only", "sft")}
    assert sizes == {(tokens, *kind) for tokens in (4, 8) for kind in kinds}
    printed = capsys.readouterr().out
    assert "absent: not installed: No module named 'peer'" in printed
    assert "no such kernel" in printed


@pytest.mark.gpu
def test_a_turn_begins_with_calls_that_are_not_timed():
    calls = []
    times = measure.time_ms(lambda: calls.append(torch.ones(4, device="cuda")), torch.device("cuda"), 2, settle=3)
    assert (len(times), len(calls)) == (2, 5)
    assert measure.calls_of_a_turn(100.0, 20.0) == {"repeats": 5, "settle": 3}


def test_a_context_is_entered_outside_of_what_is_measured(monkeypatch):
    """As plugins are installed."""
    measuring, entered = [], []

    def noted(own, *inputs, **keywords):
        measuring.append(own)
        found = own(*inputs, **keywords)
        measuring.pop()
        return found

    @contextlib.contextmanager
    def context():
        entered.append(len(measuring))
        yield
        entered.append(len(measuring))

    for name in ("time_ms", "peak_mib", "_once_ms"):
        monkeypatch.setattr(measure, name, functools.partial(noted, getattr(measure, name)))
    timed = measure.Timed(lambda: None, CPU, context)
    timed.warm_up()
    timed.round(budget_ms=1)
    assert entered == [0] * 4


@pytest.mark.gpu
def test_memory_that_is_freed_meanwhile_hides_nothing_of_a_calls_own():
    device = torch.device("cuda")
    kept = [torch.empty(2**23, dtype=torch.uint8, device=device)]

    def call():
        kept.clear()
        return torch.empty(2**22, dtype=torch.uint8, device=device)

    assert measure.peak_mib(call, device) == 4


def test_heads_take_turns_in_orders_that_ranks_share():
    def orders():
        rounds, found = [], results.Results(CPU, torch.float32, None, {})
        turns = [({"provider": name}, measure.Timed(lambda name=name: rounds[-1].append(name), CPU)) for name in "abcd"]
        rounds.append([])  # for the calls that warm up
        found.take_turns("steps", turns, lambda: rounds.append([]), repeats=1)
        return rounds[1:]

    rounds = orders()
    assert len(rounds) == results.ROUNDS
    assert all(sorted(names) == [*"abcd"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 2
    assert orders() == rounds


def test_a_run_adds_to_the_file_of_another(tmp_path):
    path = tmp_path / "heads.json"
    command = f"head --device cpu --dtype fp32 --shapes 8x8x24 --error-shape= --budget-ms 0 --rounds 1 --json {path}"
    first = run.main([*command.split(), "--modes", "rl", "--providers", "ours"])
    both = run.main([*command.split(), "--modes", "sft", "--providers", "ours", "--append"])
    assert results.load(path) == both
    assert both["times"][0]["time_ms"] == first["times"][0]["time_ms"]
    assert [record["mode"] for record in both["times"]] == ["rl", "sft"]
    assert both["settings"]["appended"][0]["command"][-1] == "--append"
    text = path.read_text().replace(both["environment"]["megatron_lce_source"], "0" * 16)
    path.write_text(text)
    with pytest.raises(ValueError, match="was measured with another package"):
        run.main([*command.split(), "--append"])


@pytest.mark.torchrun
@pytest.mark.parametrize(("layout", "dtype"), [("--tp 2", "bf16"), ("--tp 1 --pp 2", "fp32")])
def test_whole_step_agrees_with_the_flag_on_and_off(tmp_path, layout, dtype):
    pytest.importorskip("megatron.core")
    output = tmp_path / "megatron_step.json"
    sizes = "--tokens 32 --sequence-length 16 --layers 2 --hidden 32 --heads 4 --vocab 96"
    masked = "0.5" if dtype == "bf16" else "0"
    ours = {"ours", "ours-skip", "ours-0"}
    variants = ",".join(["native", "native-fused", "te", *ours])
    arguments = f"{layout} {sizes} --dtype {dtype} --device cpu --masked {masked} --variants {variants} --rounds 1"
    run_ranks(2, "benchmark.run", "megatron_step", *arguments.split(), "--json", output)
    steps = {record["variant"]: record for record in json.loads(output.read_text())["steps"]}
    if importlib.util.find_spec("transformer_engine") is None:
        assert steps.pop("te")["reason"] == "TransformerEngine's files are not there"
    assert set(steps) - {"te"} == {"native", "native-fused", *ours}
    for record in steps.values():
        assert record["status"] == "ok"
        assert record["time_ms"] > 0
        assert record["loss"] == pytest.approx(steps["native"]["loss"], rel=2**-8)
    for variant in ours:
        if dtype == "fp32":
            assert steps[variant]["gradient_relative_error"] < 1e-5
        else:
            assert steps[variant]["over_native_error"] < 1.5


def test_a_batch_in_pieces_has_the_gradients_of_the_whole():
    pytest.importorskip("megatron.core")
    from benchmark import megatron_step
    from tests import megatron_world

    with megatron_world.world() as device:
        model = megatron_world.build(device, ddp=True)
        arguments = argparse.Namespace(sequence_length=8, vocab=megatron_world.VOCAB_SIZE, pp=1)
        batches = megatron_step.make_batches(arguments, 32, 0.4, device)
        batches[0]["loss_mask"][0] = 0  # a piece without a token that counts
        whole, pieces = (megatron_step.losses_and_gradients(model, batches, n) for n in (1, 4))
    torch.testing.assert_close(pieces[0], whole[0])
    for piece, gradient in zip(pieces[1], whole[1], strict=True):
        assert float((piece - gradient).norm()) <= 1e-5 * float(gradient.norm())


def test_jsd_run_measures_against_the_products_of_the_same_run(tmp_path):
    output = tmp_path / "jsd.json"
    arguments = "jsd --device cpu --dtype fp32 --shape 6x8x4x24 --error-shape 5x8x4x16 --budget-ms 0"
    arguments += " --providers ours,ours-3,ours-loss-1024,ours-3-loss-1024,eager --betas 0.1,0,1"
    document = run.main([*arguments.split(), "--json", str(output)])
    assert json.loads(output.read_text()) == document
    assert [record["beta"] for record in document["jsd"] if record["provider"] == "ours"] == [0.1, 0, 1]
    assert all(record["status"] == "ok" and record["over_products"] > 0 for record in document["jsd"])
    products = [{"status": "ok", "student_logits_ms": [1.0], "teacher_logits_ms": [2.0]}]
    products[0] |= {"grad_hidden_ms": [4.0], "grad_weight_ms": [8.0]}
    assert results.limits_ms({"jsd_products": products}, {"beta": 0.5}) == [15, 18]
    assert len(document["jsd_errors"]) == 15
    for record in document["jsd_errors"]:
        assert max(value for value in record.values() if isinstance(value, float) and value != record["beta"]) < 1e-5


def test_a_samplers_rows_beside_the_product():
    sizes = "sampler --dtype fp32 --rows 1,3,12 --hidden 32 --vocab 90 --rounds 1 --device cpu"
    document = run.main(sizes.split())
    records = [record for record in document["sampler"] if record["provider"] == "ours"]
    assert [record["rows"] for record in records] == [1, 3, 12]
    for record in records:
        assert record["status"] == "ok"
        assert record["over_product"] > 0
        assert record["mismatch"] < 1e-5


@pytest.mark.torchrun
def test_heads_of_two_ranks_are_right_and_take_turns(tmp_path):
    pytest.importorskip("megatron.core")
    output = tmp_path / "heads.json"
    providers = "ours,ours-0,ours-token-640,ours-known-640,megatron,te,eager"
    arguments = "--tp 2 --shapes 16x8x64 --error-shape 16x8x64 --dtype fp32 --device cpu --rounds 1 --budget-ms 0"
    run_ranks(2, "benchmark.run", "head", *arguments.split(), "--providers", providers, "--json", output)
    document = json.loads(output.read_text())
    errors = {record["provider"]: record for record in document["errors"]}
    for provider, record in errors.items():
        found = [value for value in record.values() if isinstance(value, float)]
        assert len(found) >= 3, record
        assert max(found) < (5e-3 if provider == "megatron" else 1e-5), record  # its gradient of logits is in bf16
    times = {(record["provider"], record["mode"]): record for record in document["times"]}
    assert times["ours", "rl"]["shape"] == "16x8x64 TP=2"
    assert all(times[one, "sft"]["status"] == "ok" for one in {*errors, "megatron", "ours-known-640"})
    loaded = {record["provider"]: record for record in document["providers"]}
    assert loaded["eager"]["reason"] == "runs on one rank"
    assert "eager" not in errors


@pytest.mark.torchrun
def test_heads_of_a_policy_update_agree(tmp_path):
    pytest.importorskip("megatron.core")
    output = tmp_path / "policy.json"
    arguments = "--tp 2 --dtype fp32 --device cpu --rounds 1 --budget-ms 0 --providers ours-skip,ours-token-skip"
    run_ranks(2, "benchmark.run", "policy", *arguments.split(), "--json", output)
    document = json.loads(output.read_text())
    errors = [record for record in document["policy_errors"] if record["provider"].startswith("ours")]
    names = "masked", "entropy_coeff", "provider"
    cases = itertools.product((0, 0.6), (0, 0.001), ("ours-skip", "ours-token-skip"))
    assert [tuple(record[name] for name in names) for record in errors] == [*cases]
    for record in errors:
        assert max(value for name, value in record.items() if name.endswith("_error")) < 1e-5
    for record in document["policy"]:
        assert record["time_ms"] > 0
        record["peak_mib"] = record["gradients_mib"] + 1024  # for the table: a CPU has none
    assert [line.count("|") for line in publish.policy(document).splitlines()] == [6] * 6


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


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = pictures.draw(name, publish.result(pictures.PICTURES[name][0]), tmp_path)
    assert path == tmp_path / f"{name}.png"
    assert path.stat().st_size > 10_000
    assert (publish.IMAGES / path.name).exists()


def test_every_table_stands_on_a_page():
    """Where `test_docs.py` holds it against its result."""
    text = "".join(page.read_text() for page in publish.pages())
    assert sorted(name for _, name, _ in publish.PLACE.findall(text)) == sorted([*publish.TABLES, "commands"])


def test_committed_results_are_one_record_a_line():
    paths = sorted(publish.RESULTS.glob("*.json"))
    for path in paths:
        assert results.as_text(results.load(path)) == path.read_text(), path.name
    assert sum(path.read_text().count("\n") for path in paths) <= 1000


def test_every_committed_result_is_cited():
    """By a table, a picture, a page or a test; a page cites by the file's name."""
    cited = {file for file, _ in (*publish.TABLES.values(), *pictures.PICTURES.values())}
    texts = [path.read_text() for path in (*publish.pages(), publish.ROOT / "tests" / "test_estimate.py")]
    for path in publish.RESULTS.iterdir():
        assert path.stem in cited or any(re.search(rf"\b{path.stem}\b", text) for text in texts), path.name

"""The benchmark on a CPU at tiny shapes: that its numbers are what they claim to be, and that nothing is dropped."""

import json

import pytest
import torch

from benchmark import measure, providers, results, run
from benchmark.shapes import Shape, make_inputs

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

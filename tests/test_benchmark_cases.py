"""The benchmark's cases beyond a head alone, on a CPU at tiny shapes: Megatron, tensor parallelism, JSD."""

import importlib.util
import json

import pytest
import torch

from benchmark import publish, results, run
from tests.ranks import run_ranks

CPU = torch.device("cpu")


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
    arguments = "--tp 2 --dtype fp32 --device cpu --rounds 1 --budget-ms 0 --providers all"
    run_ranks(2, "benchmark.run", "policy", *arguments.split(), "--json", output)
    document = json.loads(output.read_text())
    errors = [record for record in document["policy_errors"] if record["provider"].startswith("ours")]
    assert [(record["provider"], record["entropy_coeff"]) for record in errors] == [
        (provider, coefficient) for coefficient in (0, 0.001) for provider in ("ours-skip", "ours-token-skip")
    ]
    for record in errors:
        assert max(value for name, value in record.items() if name.endswith("_error")) < 1e-5
    for record in document["policy"]:
        assert record["time_ms"] > 0
        record["peak_mib"] = record["gradients_mib"] + 1024  # for the table: a CPU has none
    assert [line.count("|") for line in publish.policy(document).splitlines()] == [4] * 4

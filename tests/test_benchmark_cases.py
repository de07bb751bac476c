"""The benchmark's cases beyond a head alone, on a CPU at tiny shapes: Megatron, tensor parallelism, JSD."""

import importlib.util
import json
import sys

import pytest
import torch
from torch import nn

from benchmark import measure, providers, publish, results, run, te_loss
from benchmark.ours import Ours
from benchmark.shapes import Shape, make_inputs
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_megatron_and_our_head_agree():
    pytest.importorskip("megatron.core")
    inputs = make_inputs(Shape("tiny", 12, 8, 40), torch.float32, CPU)
    with torch.compiler.set_stance("force_eager"):
        outputs, _ = measure.run_step(providers.PROVIDERS["megatron"].load(), inputs, "logprob")
    torch.testing.assert_close(outputs[0], measure.run_step(Ours(), inputs, "logprob")[0][0])
    torch.distributed.destroy_process_group()


def test_weights_of_transformer_engines_layers_have_the_names_of_local_ones():
    megatron_step = pytest.importorskip("benchmark.megatron_step", exc_type=ImportError)
    layer = nn.Module()
    for path in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"):
        parent, _, name = path.rpartition(".")
        if not hasattr(layer, parent):
            layer.add_module(parent, nn.Module())
        linear = nn.Linear(2, 2, bias=False)
        if name != "linear_fc2":
            linear.layer_norm_weight = nn.Parameter(torch.ones(2))
        getattr(layer, parent).add_module(name, linear)
    names = {"input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_qkv.weight"}
    assert set(megatron_step.parameters(layer)) == names | {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}


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


def test_two_versions_of_transformer_engines_loss_are_loaded_side_by_side(tmp_path):
    before = {name for name in sys.modules if name.partition(".")[0] == "transformer_engine"}
    for version in ("1", "2"):
        for name, text in {
            "pytorch/cross_entropy": "import transformer_engine.pytorch.triton.cross_entropy as kernels\n"
            "def parallel_cross_entropy(logits, labels, smoothing, reduce, group, ignored, capturable, **more):\n"
            "    return kernels.VERSION, ignored, more\n",
            "pytorch/triton/cross_entropy": "from transformer_engine.common.triton.cross_entropy import VERSION\n",
            "common/triton/cross_entropy": f"VERSION = {version}\n",
            "__init__": "raise ImportError('its libraries')\n",
        }.items():
            path = tmp_path / version / "transformer_engine" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    first, second = te_loss.load(tmp_path / "1"), te_loss.load(tmp_path / "2", overwrite_input=True)
    assert first(None, None, None) == (1, -100, {})
    assert second(None, None, None) == (2, -100, {"overwrite_input": True})
    assert {name for name in sys.modules if name.partition(".")[0] == "transformer_engine"} == before


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

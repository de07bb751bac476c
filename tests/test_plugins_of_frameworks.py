"""How plugins read functions and get their calls, and what they do with what frameworks hand them, on stand-ins."""

import functools
import gc
import importlib
import multiprocessing
import os
import sys
import tomllib
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megatron_lce
from megatron_lce.plugins.functions import Function, called_with
from tests.plugin_stand_ins import get, import_plugin, is_ours


@pytest.mark.parametrize(
    ("needed", "found", "fits"),
    [
        ("", ("x",), True),
        ("(x, y)", ("x", "y"), True),
        ("(x, y)", ("x", "y", "z"), False),
        ("(x, y)", ("y", "x"), False),
        ("(x, ...)", ("y", "x", "z"), True),
        ("(x, ...)", ("y",), False),
    ],
)
def test_parameters_that_a_plugin_relies_on(needed, found, fits):
    assert Function.of(f"module:function{needed}").fits(found) == fits


def test_ours_get_a_call_by_name_and_pass_it_on():
    def theirs(x, *rest, y=2, **others):
        return x, rest, y, others

    ours = called_with(theirs, lambda call: (call.original, call.x, call.y, call.run(), call.run(y=call.x)))
    assert ours(1, 7, z=3) == (theirs, 1, 2, (1, (7,), 2, {"z": 3}), (1, (7,), 1, {"z": 3}))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        ours()


def test_a_call_keeps_its_arguments_whatever_their_names_and_however_often_it_runs():
    def theirs(run, original, y=2):
        return run, original, y

    ours = called_with(theirs, lambda call: (call.run(y=3), call.run(original=4), call.original))
    assert ours(0, original=1) == ((0, 1, 3), (0, 4, 2), theirs)


def test_a_call_is_freed_though_a_changed_argument_knows_it():
    """Its tensors, without the collector, which may come some microbatches later."""
    logits = torch.ones(2)
    freed, ours = weakref.ref(logits), called_with(lambda f, x: x.sum(), lambda call: call.run(f=lambda: call))
    gc.disable()
    try:
        assert ours(None, logits) == 2
        del logits
        assert freed() is None
    finally:
        gc.enable()


def verl_of_a_worker():
    import verl.models.mcore

    return is_ours(verl.models.mcore.get_mcore_engine_forward_fn())


def test_workers_of_verl_import_it_in_their_processes(make, monkeypatch):
    """By its entry point and a variable, which they inherit; other variables: tests/frameworks/run_verl_workers.py."""
    folder = make("verl")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    entries = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    (folder / "this-0.dist-info").mkdir()
    lines = "".join(f"{name} = {value}\n" for name, value in entries["verl.plugins"].items())
    (folder / "this-0.dist-info/entry_points.txt").write_text(f"[verl.plugins]\n{lines}")
    for value, expected in (("auto", False), ("other, megatron_lce", True)):
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", value)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(verl_of_a_worker) == expected
    assert "verl" not in sys.modules


def test_an_entry_point_that_cannot_switch_on_says_so(make, monkeypatch, caplog):
    """verl drops what it raises."""
    make("verl", "calculate_entropy", "other")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "megatron_lce")
    monkeypatch.delitem(sys.modules, "megatron_lce.plugins.verl_entry", raising=False)
    with pytest.raises(RuntimeError, match="needs"):
        importlib.import_module("megatron_lce.plugins.verl_entry")
    assert "megatron_lce is not in use: megatron_lce needs" in caplog.text


class Processor:
    def _lm_head_logits_processor(self, logits):
        raise AssertionError("logits were asked for")


SETTINGS = dict.fromkeys(
    ("calculate_sum_pi_squared", "calculate_entropy", "logits_processor_func", "batch", "data_format")
)


@pytest.fixture
def forward(make):
    """verl's, replaced."""
    make("verl")
    import_plugin("verl")
    return get("verl.models.mcore:get_mcore_engine_forward_fn")()


def test_verl_leaves_logits_to_values(forward):
    found = forward("model", logits_processor=None, logits_processor_args={}, vision=True)
    assert found == ("verl's own", "model", None, {}, True)


@pytest.mark.parametrize("clamp", [None, -3.0])
def test_verl_distils_at_a_teachers_ids(clamp, forward):
    """Divergence, its gradient and verl's metrics against those of fp64 logits; logits go to verl's function."""
    plugin, compute = import_plugin("verl"), get("verl.trainer.distillation.megatron.losses:compute_forward_kl_topk")
    assert compute("logits", 1, 2, 3, "thd") == "verl's own"
    generator = torch.Generator().manual_seed(0)
    hidden, weight, logits = (torch.randn(n, 16, generator=generator) for n in (6, 24, 6))
    target, ids = (values[None] for values in (logits @ weight.T).log_softmax(-1).topk(5))
    labels = torch.tensor([[3, -100, 7, 1, 0, -100]])
    losses = []
    for dtype in (torch.float32, torch.float64):
        own = hidden.to(dtype)[None].requires_grad_()
        if dtype == torch.float32:
            operations = {x: getattr(megatron_lce, x) for x in ("linear_cross_entropy", "linear_topk")}
            head = SimpleNamespace(**{x: functools.partial(f, own, weight) for x, f in operations.items()})
            given = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))
            student = plugin.Student(head, labels, temperature=torch.full(labels.shape, 0.7))
            teacher = {"teacher_topk_log_probs": target, "teacher_topk_ids": ids}
            found = compute(student_logits=student, **teacher, config=given, data_format="thd")
            assert {name for name, x in found.items() if x.requires_grad} == {"distillation_losses"}
        else:
            logprobs = (own @ weight.double().T / 0.7).log_softmax(-1)
            p, q = target.double(), logprobs.gather(-1, ids)
            p, q = (p, q) if clamp is None else (p.clamp_min(clamp), q.clamp_min(clamp))
            shared = (ids[..., None] == logprobs.topk(5).indices[..., None, :]).any(-1)
            found = {"distillation_losses": (p.exp() * (p - q)).sum(-1), "overlap_count": shared.sum(-1)}
            found |= {"student_mass": q.exp().sum(-1), "teacher_mass": p.exp().sum(-1)}
            advantage = (p.exp() * (q - p) * shared).sum(-1) / shared.sum(-1).clamp_min(1)
            found = {name: x * (labels >= 0) for name, x in (found | {"overlap_token_advantage": advantage}).items()}
            assert clamp is None or (q == clamp).any()
        found["distillation_losses"].sum().backward()
        losses.append(found | {"gradient": own.grad})
    assert losses[0].keys() == losses[1].keys()
    for name, expected in losses[1].items():
        torch.testing.assert_close(losses[0][name].detach().double(), expected.detach().double(), rtol=1e-5, atol=1e-5)


def test_verl_with_an_unknown_processor_raises(forward):
    known = SETTINGS | {"distillation_use_topk": False, "distillation_only": False}
    newer = functools.partial(Processor()._lm_head_logits_processor, **known, calculate_more=True)
    for processor, named in ((newer, "7.8.9 has .*calculate_more"), (print, r"7.8.9 has \[\]")):
        with pytest.raises(RuntimeError, match=named):
            forward("model", logits_processor=processor, logits_processor_args={})


@pytest.mark.parametrize("own_batch", [False, True])
def test_bridge_gives_the_model_its_mask(own_batch, make):
    make("megatron.bridge")
    import_plugin("megatron.bridge")
    model = nn.Identity()
    model.forward = dict
    step = get("megatron.bridge.by_name:_forward_step_common")
    batch = {"_get_batch_fn": lambda iterator: ("other tokens", "labels", next(iterator))} if own_batch else {}
    given, mask = step(None, iter(["mask"]), model, **batch)
    assert given == {"tokens": "other tokens" if own_batch else "tokens", "labels": "labels", "loss_mask": "mask"}
    assert mask == "mask"


def test_bridge_whose_step_reads_no_batch_raises(make):
    make("megatron.bridge", "(_get_batch_fn or get_batch)(data_iterator)", "1, 2, 3")
    import_plugin("megatron.bridge")
    step = get("megatron.bridge.training.gpt_step:_forward_step_common")
    model = nn.Identity()
    model.forward = dict
    with pytest.raises(RuntimeError, match=r"megatron.bridge \(version unknown\) does not call get_batch"):
        step(None, None, model)


class Chunk:
    def __call__(self):
        return "logits"


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_steps_that_need_logits_get_them(framework, make):
    """Those of a critic's values and of a custom loss."""
    make(framework)
    import_plugin(framework)
    model = importlib.import_module(f"{framework}.backends.megatron_utils.model")
    chunk = Chunk()
    args = SimpleNamespace(loss_type="custom_loss", true_on_policy_mode=False, allgather_cp=False)
    assert model.forward_only(print, args, [chunk]) == "logits"
    assert model.train_one_step(args, model=[chunk]) == "logits"
    args.loss_type = "sft_loss"
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):  # is captured, which is none
        model.train_one_step(args, [chunk])

"""Plugins of frameworks, on stand-in packages with the frameworks' modules and names: what is replaced, and when.

What the plugins compute is compared with the frameworks' own code by `make test-frameworks`.
"""

import functools
import importlib
import logging
import multiprocessing
import operator
import os
import sys
import textwrap
from types import SimpleNamespace

import pytest
from torch import nn

from megatron_lce.plugins.replacing import Plugin
from tests.plugin_stand_ins import BY_NAME, FILES, PLUGIN_OF

PLUGINS = pytest.mark.parametrize("framework", FILES)


def forget(framework):
    """The framework and its plugin as if they had never been imported."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{framework}.")]:
        del sys.modules[name]
    plugin = sys.modules.pop(f"megatron_lce.plugins.{PLUGIN_OF.get(framework, framework)}", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if plugin is None or finder is not plugin.plugin]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes a stand-in of a framework, with parts of its files replaced, and makes it importable."""
    made = []

    def write(framework, **replaced):
        folder = tmp_path.joinpath(*framework.split("."))
        for file, text in FILES[framework].items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            text = functools.reduce(lambda text, change: text.replace(*change), replaced.items(), text)
            path.write_text(textwrap.dedent(text))
        for package in [folder, *filter(os.path.isdir, folder.rglob("*"))]:
            (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        forget(framework)
        made.append(framework)
        return tmp_path

    yield write
    for framework in made:
        forget(framework)


def import_plugin(framework):
    return importlib.import_module(f"megatron_lce.plugins.{PLUGIN_OF.get(framework, framework)}")


def get(target):
    module, _, path = target.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


def is_ours(function):
    code = getattr(function, "__globals__", {"__name__": ""})
    return code["__name__"].startswith("megatron_lce.")


@pytest.mark.parametrize("order", ["before", "after", "in between"])
@PLUGINS
def test_replaces_in_any_order_of_imports(framework, order, make):
    make(framework)
    modules = {"before": [], "after": [name for name, _ in BY_NAME[framework]], "in between": [framework]}[order]
    for name in modules:
        importlib.import_module(name)
    plugin = import_plugin(framework)
    if order != "after":  # a worker that never trains does not import Megatron for the plugin's sake
        assert not [module for module in plugin.plugin.modules if module in sys.modules]
    assert all(is_ours(get(target)) for target in plugin.plugin.replacements)
    assert all(is_ours(get(f"{module}:{name}")) for module, name in BY_NAME[framework])
    if framework == "verl":
        assert is_ours(get("verl.models.mcore:get_mcore_engine_forward_fn")())
        assert not is_ours(get("verl.kernel:linear_cross_entropy"))  # which other engines use
    plugin.uninstall()
    assert not any(is_ours(get(target)) for target in plugin.plugin.replacements)
    assert not any(is_ours(get(f"{module}:{name}")) for module, name in BY_NAME[framework])
    plugin.install()
    assert all(is_ours(get(f"{module}:{name}")) for module, name in BY_NAME[framework])


@PLUGINS
def test_says_what_it_replaces_in_one_line(framework, make, caplog):
    make(framework)
    importlib.import_module(framework)
    with caplog.at_level(logging.WARNING):
        plugin = import_plugin(framework)
        plugin.install()  # again
    (line,) = caplog.messages
    assert line.startswith(f"megatron_lce replaces in {framework} {'7.8.9' if framework == 'verl' else '('}")
    assert all(target in line for target in plugin.plugin.replacements)
    assert "\n" not in line


MOVED = {
    "verl": "gptmodel_forward_model_engine _build_mtp_loss_mask_nested linear_cross_entropy",
    "slime": "get_log_probs_and_entropy get_responses _allgather_cp_redistribute forward_only train_one_step",
    "miles": "get_log_probs_and_entropy get_responses forward_only",
    "swift": "compute_logps_and_entropy_from_logits compute_per_token_logps_fn MegatronGRPOTrainer",
    "megatron.bridge": "_forward_step_common",
}


MOVES = [(f, name, loaded) for f, names in MOVED.items() for name in names.split() for loaded in (False, True)]
MOVES.append(("swift", "MegatronGRPOTrainer.forward_step", True))  # of a method a module's source would not say


@pytest.mark.parametrize(("framework", "moved", "loaded"), MOVES)
def test_a_function_that_has_moved_raises(framework, moved, loaded, make):
    make(framework, **{moved.rpartition(".")[2]: "renamed"})
    for name, _ in BY_NAME[framework] if loaded else ():
        importlib.import_module(name)
    with pytest.raises(
        RuntimeError, match=rf"needs {moved}\S* in {framework}\.\S+: {framework} (7.8.9|\(version unknown\))"
    ):
        import_plugin(framework)
    assert not any(is_ours(getattr(sys.modules[module], "renamed", None)) for module, _ in BY_NAME[framework] if loaded)


@pytest.mark.parametrize("module", ["model_forward", "model_forward_fused"])
def test_a_module_that_has_moved_raises(module, make):
    (make("verl") / "verl/models/mcore" / f"{module}.py").rename(make("verl") / "verl/models/mcore/moved.py")
    with pytest.raises(RuntimeError, match=rf"in verl.models.mcore.{module}: verl"):
        import_plugin("verl")


@PLUGINS
def test_without_the_framework_it_says_so(framework):
    forget(framework)
    with pytest.raises(ImportError, match=f"needs {framework}, which is not installed"):
        import_plugin(framework)


@pytest.mark.parametrize("wraps", [functools.wraps, lambda own: lambda function: function])
@PLUGINS
def test_what_another_has_replaced_is_left_alone(framework, wraps, make):
    make(framework)
    for module, name in BY_NAME[framework]:
        own = get(f"{module}:{name}")

        @wraps(own)
        def theirs(own=own):
            return own()

        holder = sys.modules[getattr(own, "__module__", module)]
        setattr(holder, name, theirs)
        with pytest.raises(RuntimeError, match=f"replaces {holder.__name__}:{name}, but {__name__} has already"):
            import_plugin(framework)
        assert getattr(holder, name) is theirs
        setattr(holder, name, own)


@PLUGINS
def test_uninstall_refuses_where_another_has_replaced_ours(framework, make):
    make(framework)
    plugin = import_plugin(framework)
    found = {target: get(target) for target in plugin.plugin.replacements}
    module, _, name = next(iter(found)).partition(":")
    setattr(sys.modules[module], name, forget)
    with pytest.raises(RuntimeError, match=f"{__name__} has replaced {module}:{name} after megatron_lce"):
        plugin.uninstall()
    setattr(sys.modules[module], name, found[f"{module}:{name}"])
    assert {target: get(target) for target in found} == found


def verl_of_a_worker():
    import verl.models.mcore

    return is_ours(verl.models.mcore.get_mcore_engine_forward_fn())


def test_workers_of_verl_import_it_in_their_processes(make, monkeypatch):
    """By verl's variable, which they inherit; this process has not imported verl."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(make("verl")), *sys.path]))
    for value, expected in (("megatron_lce.plugins.verl", True), ("", False)):
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", value)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(verl_of_a_worker) == expected
    assert "verl" not in sys.modules


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


def test_verl_leaves_logits_to_top_k_and_values(forward):
    top_k = functools.partial(
        Processor()._lm_head_logits_processor, **SETTINGS, distillation_use_topk=True, distillation_only=False
    )
    for processor in (top_k, None):
        own, inputs, keywords = forward(
            "model", 1, logits_processor=processor, logits_processor_args={}, value_model=True
        )
        assert (own, inputs) == ("verl's own", ("model", 1))
        assert keywords == {"logits_processor": processor, "logits_processor_args": {}, "value_model": True}


def test_verl_with_an_unknown_processor_raises(forward):
    known = SETTINGS | {"distillation_use_topk": False, "distillation_only": False}
    newer = functools.partial(Processor()._lm_head_logits_processor, **known, calculate_more=True)
    for processor, named in ((newer, "7.8.9 has .*calculate_more"), (print, r"7.8.9 has \[\]")):
        with pytest.raises(RuntimeError, match=named):
            forward("model", logits_processor=processor, logits_processor_args={})


def test_a_module_that_loads_without_a_method_is_left_alone(tmp_path, monkeypatch):
    """Its source names the class, so that installing finds nothing amiss."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late/model.py").write_text("def first():\n    pass\n\nclass Second:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = Plugin("late", {"late.model:first": print, "late.model:Second.run": print})
    plugin.install()
    with pytest.raises(RuntimeError, match=r"needs Second.run in late.model"):
        importlib.import_module("late.model")
    assert not plugin.replaced
    plugin.uninstall()


def test_a_method_that_is_inherited_is_replaced(make):
    inherited = "(self): ...\n\n            class MegatronGRPOTrainer(Base): ..."
    make("swift", **{"class MegatronGRPOTrainer:": "class Base:", "(self): ...": inherited})
    plugin = import_plugin("swift")
    forward_step = "swift.megatron.trainers.grpo_trainer:MegatronGRPOTrainer.forward_step"
    assert is_ours(get(forward_step))
    plugin.uninstall()
    assert not is_ours(get(forward_step))


@pytest.mark.parametrize("own_batch", [False, True])
def test_bridge_gives_the_model_its_mask(own_batch, make):
    make("megatron.bridge")
    import_plugin("megatron.bridge")
    model = nn.Identity()
    model.forward = dict
    step = get("megatron.bridge.training.other_step:_forward_step_common")
    batch = {"_get_batch_fn": lambda iterator: ("other tokens", "labels", next(iterator))} if own_batch else {}
    given, mask = step(None, iter(["mask"]), model, **batch)
    assert given == {"tokens": "other tokens" if own_batch else "tokens", "labels": "labels", "loss_mask": "mask"}
    assert mask == "mask"


def test_bridge_whose_step_reads_no_batch_raises(make):
    make("megatron.bridge", **{"(_get_batch_fn or get_batch)(data_iterator)": "1, 2, 3"})
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
    """Those of a critic's values and of a custom loss. The chunk is what it was after any step."""
    make(framework)
    import_plugin(framework)
    model = importlib.import_module(f"{framework}.backends.megatron_utils.model")
    chunk = Chunk()
    args = SimpleNamespace(loss_type="custom_loss", true_on_policy_mode=False, allgather_cp=False)
    assert model.forward_only(print, args, [chunk]) == "logits"
    assert model.train_one_step(args, model=[chunk]) == "logits"
    args.loss_type = "sft_loss"
    with pytest.raises(TypeError, match="Chunk"):  # is captured, which is no Megatron model
        model.train_one_step(args, [chunk])
    assert type(chunk) is Chunk

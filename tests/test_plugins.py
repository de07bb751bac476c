"""Plugins of frameworks, on stand-in packages with the frameworks' modules and names: what is replaced, and when.

What the plugins compute is compared with the frameworks' own code by `make test-frameworks`.
"""

import contextlib
import functools
import importlib
import logging
import re
import sys
import threading
import time
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from megatron_lce.plugins.functions import Function
from megatron_lce.plugins.patching import Plugin
from tests.frameworks.run_changed import changes
from tests.plugin_stand_ins import FRAMEWORKS, by_name, file_of, forget, get, import_plugin, is_ours, plugin_of

PLUGINS = pytest.mark.parametrize("framework", FRAMEWORKS)
PAGE = Path(__file__).parent.parent / "docs/integrations.md"
ROWS = {"swift": "ms-swift", "megatron.bridge": "megatron-bridge", "nemo_rl": "nemo-rl", "megatron.rl": "megatron-rl"}
VERSION = r"\d+\.\d+\.\S+"  # the stand-in's, or the installed framework's


@pytest.mark.parametrize("order", ["before", "after", "in between"])
@PLUGINS
def test_replaces_in_any_order_of_imports(framework, order, make):
    make(framework)
    importer, functions = by_name(framework)
    for name in {"before": [], "after": [importer], "in between": [framework]}[order]:
        importlib.import_module(name)
    plugin = import_plugin(framework)
    if order != "after":  # a worker that never trains does not import Megatron for the plugin's sake
        assert not [module for module in plugin.plugin.modules if module in sys.modules]
    targets = [function.name for function in plugin.plugin.replacements]
    targets += [f"{importer}:{function.path}" for function in functions]
    assert all(map(is_ours, map(get, targets)))
    if framework == "verl":
        assert is_ours(get("verl.models.mcore:get_mcore_engine_forward_fn")())
        assert is_ours(get("verl.models.mcore.model_forward_fused:linear_cross_entropy"))
    plugin.uninstall()
    assert not any(map(is_ours, map(get, targets)))
    plugin.install()
    assert all(map(is_ours, map(get, targets)))


@PLUGINS
def test_says_what_it_has_replaced_when_it_has(framework, make, caplog):
    make(framework)
    importlib.import_module(framework)
    with caplog.at_level(logging.WARNING):
        plugin = import_plugin(framework)
        plugin.install()  # again
        for module in plugin.plugin.modules:
            importlib.import_module(module)
            start = f"megatron_lce has replaced in {framework} {'7.8.9' if framework == 'verl' else '('}"
            assert all(line.startswith(start) for line in caplog.messages)
            said = [name for line in caplog.messages for name in line.partition(": ")[2].split(", ")]
            assert said == [function.name for function in plugin.plugin.replaced]
    assert plugin.plugin.replaced.keys() == plugin.plugin.replacements.keys()
    plugin.uninstall()
    caplog.clear()
    plugin.install()
    (line,) = caplog.messages
    assert all(function.name in line for function in plugin.plugin.replacements)


@PLUGINS
def test_the_page_has_the_versions_that_errors_name(framework):
    (row,) = re.findall(rf"(?im)^\| \[[^]]*{ROWS.get(framework, framework)}.*$", PAGE.read_text())
    assert all(version in row for version in plugin_of(framework).tested.split(", "))


@pytest.mark.parametrize("loaded", [False, True])
@PLUGINS
def test_a_function_that_has_moved_or_takes_other_arguments_raises(framework, loaded, make, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within a second
    folder, plugin = make(framework).joinpath(*framework.split(".")), plugin_of(framework)
    for function in plugin.functions:
        file = folder / file_of(framework, function.module)
        for text, needed in changes(function, file.read_text()):
            file.write_text(text)
            forget(framework)
            with contextlib.suppress(ImportError):  # of what imports the function by its name
                loaded and importlib.import_module(function.module)
            version = rf"{framework} ({VERSION}|\(version unknown\)) has .*; tested: {plugin.tested}"
            with pytest.raises(RuntimeError, match=rf"needs {re.escape(needed)}.* in {function.module}: {version}"):
                import_plugin(framework)
            assert not any(is_ours(x.loaded()) for x in plugin.replacements)
            make(framework)


def test_a_module_that_has_moved_raises(make):
    path = make("verl") / "verl/models/mcore/model_forward.py"
    path.rename(path.with_name("moved.py"))
    with pytest.raises(RuntimeError, match=r"in verl.models.mcore.model_forward: verl"):
        import_plugin("verl")


@PLUGINS
def test_without_the_framework_it_says_so(framework, monkeypatch):
    forget(framework)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ImportError, match=f"needs {framework}, which is not installed"):
        import_plugin(framework)


@pytest.mark.parametrize("wraps", [functools.wraps, lambda own: lambda function: function])
def test_what_another_has_replaced_is_left_alone(wraps, make):
    make("slime")
    for function in by_name("slime")[1]:
        own = get(function.name)

        @wraps(own)
        def theirs(own=own):
            return own()

        holder = sys.modules[function.module]
        setattr(holder, function.path, theirs)
        with pytest.raises(RuntimeError, match=f"replaces {function.name}, but {__name__} has already"):
            import_plugin("slime")
        assert getattr(holder, function.path) is theirs
        setattr(holder, function.path, own)


@pytest.mark.parametrize("framework", ["slime", "swift"])  # functions; methods of classes, too
def test_uninstall_refuses_where_another_has_replaced_ours(framework, make):
    make(framework)
    plugin = import_plugin(framework)
    found = {function.name: get(function.name) for function in plugin.plugin.replacements}
    module, _, name = next(iter(found)).partition(":")
    setattr(sys.modules[module], name, lambda: None)
    with pytest.raises(RuntimeError, match=f"{__name__} has replaced {module}:{name} after megatron_lce"):
        plugin.uninstall()
    setattr(sys.modules[module], name, found[f"{module}:{name}"])
    assert {target: get(target) for target in found} == found


def test_a_module_that_loads_without_a_method_is_left_alone(tmp_path, monkeypatch):
    """Its source defines the method, so that installing finds nothing amiss."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late/model.py").write_text("def first(): ...\nclass Second:\n    def run(self): ...\ndel Second.run\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = Plugin("late", "7.8", {"late.model:first": print, "late.model:Second.run": print})
    plugin.install()
    with pytest.raises(RuntimeError, match=r"needs Second.run in late.model"):
        importlib.import_module("late.model")
    assert not plugin.replaced
    plugin.uninstall()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_decorator_that_hides_parameters_raises(loaded, tmp_path, monkeypatch):
    """Its calls could not be handed over by name."""
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding/model.py").write_text(
        "def decorate(function):\n    return lambda *inputs: function(*inputs)\n\n@decorate\ndef first(x, y): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forget("hiding")
    plugin = Plugin("hiding", "7.8", {"hiding.model:first(y, ...)": print})
    load = functools.partial(importlib.import_module, "hiding.model")
    first, second = (load, plugin.install) if loaded else (plugin.install, load)
    first()
    with pytest.raises(RuntimeError, match=r"needs first\(y, \.\.\.\) in hiding.model: hiding .* has \(\)"):
        second()
    assert not plugin.replaced
    plugin.uninstall()


def test_modules_of_a_zip(tmp_path, monkeypatch):
    """They share one loader."""
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as file:
        for name in ("__init__", "first", "second"):
            file.writestr(f"zipped/{name}.py", "def function(x): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "zipped.zip")
    targets = ["zipped.first:function", "zipped.second:function"]
    plugin = Plugin("zipped", "7.8", {f"{target}(x)": print for target in targets})
    for _ in range(2):
        plugin.install()
        assert all(map(is_ours, map(get, targets)))
        assert not any(is_ours(get(target).__wrapped__) for target in targets)
        plugin.uninstall()
        assert not any(map(is_ours, map(get, targets)))
        forget("zipped")


def test_a_lazy_module_that_imports_when_it_is_looked_at(make):
    class Lazy:
        @property
        def __class__(self):
            sys.modules["imported_by_lazy"] = ModuleType("imported_by_lazy")
            return ModuleType

    make("slime")
    importlib.import_module("slime.backends.megatron_utils.model")
    sys.modules["lazy"] = Lazy()
    try:
        assert import_plugin("slime").plugin.replaced
    finally:
        del sys.modules["lazy"], sys.modules["imported_by_lazy"]


def test_code_outside_of_the_framework_that_took_a_function_by_name(make):
    """As recipes and external files do. It gets ours, whenever it took it, and the framework's again."""
    make("slime")
    model, before, after = importlib.import_module("slime.backends.megatron_utils.model"), *map(ModuleType, "ba")
    sys.modules |= {"recipe_before": before, "recipe_after": after}
    before.step = own = model.train_one_step
    plugin = import_plugin("slime")
    after.renamed = model.train_one_step
    assert is_ours(before.step)
    plugin.uninstall()
    assert before.step is after.renamed is own
    del sys.modules["recipe_before"], sys.modules["recipe_after"]


@pytest.mark.parametrize("framework", ["slime", "swift"])  # functions; methods of classes, too
def test_a_module_that_is_loaded_again(framework, make):
    """It gets ours anew; importers keep what they took, as without us, and all get the framework's back."""
    make(framework)
    plugin = import_plugin(framework).plugin
    module, functions = by_name(framework)
    importers = [(importlib.import_module(module), function.path) for function in functions]
    holders = [(get(x.name.rpartition(".")[0]), x.path.partition(".")[2]) for x in plugin.replacements if "." in x.path]
    old = [*importers, *holders]
    originals = [getattr(*place).__wrapped__ for place in old]
    for function in {function.module: function for function in plugin.replacements}.values():
        importlib.reload(sys.modules[function.module])
    targets = [function.name for function in plugin.replacements]
    assert all(map(is_ours, [*map(get, targets), *(getattr(*place) for place in old)]))
    assert not any(is_ours(get(target).__wrapped__) for target in targets)
    plugin.uninstall()
    assert [getattr(*place) for place in old] == originals
    assert not any(map(is_ours, map(get, targets)))
    plugin.install()
    assert all(map(is_ours, map(get, targets)))


class AnotherHook:
    """A type checker's, as jaxtyping's and typeguard's: it loads modules itself."""

    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name.startswith("slime.") else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), setattr(module, "checked", True))
        return spec


@pytest.mark.parametrize("first", ["plugin", "hook"])
def test_beside_another_import_hook(first, make, monkeypatch, caplog):
    make("slime")
    monkeypatch.setattr(sys, "meta_path", [AnotherHook(), *sys.meta_path])
    plugin = import_plugin("slime").plugin
    if first == "hook":
        sys.meta_path.insert(0, sys.meta_path.pop(1))
    importer = importlib.import_module("slime.by_name")
    assert sys.modules["slime.backends.megatron_utils.loss"].checked
    sys.modules.pop("this", None)
    with contextlib.redirect_stdout(None):
        import this  # noqa: F401  # any import that comes next
    assert all(is_ours(get(function.name)) for function in plugin.replacements)
    assert is_ours(importer.forward_only)
    assert all(function.name in caplog.text for function in plugin.replacements)
    plugin.uninstall()
    assert not is_ours(importer.forward_only)


def test_a_module_that_another_hook_loaded_without_a_function_raises_once(make, monkeypatch):
    make("slime")
    import_plugin("slime")
    sys.modules["slime.backends.megatron_utils.model"] = ModuleType("model")
    for name in ("this", "antigravity"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(RuntimeError, match=r"needs forward_only in slime\.\S+model: slime"):
        importlib.import_module("this")
    with contextlib.redirect_stdout(None):
        importlib.import_module("this")


def test_installing_in_several_threads_wraps_once(make, monkeypatch):
    make("slime")
    plugin, check = import_plugin("slime").plugin, Function.check
    plugin.uninstall()
    for function in plugin.replacements:
        importlib.import_module(function.module)
    monkeypatch.setattr(Function, "check", lambda *inputs: (check(*inputs), time.sleep(0.01))[0])
    threads = [threading.Thread(target=plugin.install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.meta_path.count(plugin) == 1
    assert not any(is_ours(get(function.name).__wrapped__) for function in plugin.replacements)

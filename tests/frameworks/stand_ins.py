"""Importing single files of a project without what the rest of it needs: services, tokenizers, other engines."""

import __future__

import ast
import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo

ACTIONS = "is_replay_backward_action", "is_replay_forward_action", "is_r2_record_action"
NO_REPLAY = SimpleNamespace(**dict.fromkeys(ACTIONS, lambda *_, **__: False))  # of routers: RouterReplayHelper
INSTALLED = tuple(f"{name}." for name in (*sys.stdlib_module_names, "torch", "megatron.core", "megatron_lce"))


def packages_without_their_init(folder: Path, *names: str) -> None:
    """Makes these packages of `folder` and their parents importable without `__init__`, which imports everything."""
    paths = (itertools.accumulate(name.split("."), "{}.{}".format) for name in names)
    for name in [name for name in itertools.chain(*paths) if name not in sys.modules]:
        package = stand_in(name, __path__=[str(folder / name.replace(".", "/"))])
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        package.__spec__.submodule_search_locations = package.__path__


def forget(framework: str) -> None:
    """A framework's modules and its plugin are imported anew."""
    of_framework = [name for name in sys.modules if name.partition(".")[0] == framework]
    for name in (*of_framework, f"megatron_lce.plugins.{framework}"):
        sys.modules.pop(name, None)


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module with these contents in place of one that imports what is not installed, or compiles kernels."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


@contextlib.contextmanager
def cuda_without_gpu() -> Iterator[None]:
    """torch.cuda's calls do nothing, or answer for a CPU, beside `cpu_patches`; torch.compile does not compile."""
    nothing = "empty_cache", "manual_seed", "reset_peak_memory_stats", "set_device", "synchronize"
    zero = "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"
    calls = {
        **{name: lambda *_, **__: None for name in nothing},
        **{name: lambda *_: 0 for name in zero},
        **{name: lambda *_, **__: mock.MagicMock() for name in ("Stream", "current_stream", "stream")},
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: SimpleNamespace(major=10, name="CPU"),
        "mem_get_info": lambda *_: (0, 0),
        "memory_stats": lambda *_: {},
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "default_generators": [torch.default_generator],
    }
    with mock.patch.multiple(torch.cuda, **calls), torch._dynamo.config.patch(disable=True):
        yield


def mocks(*names: str) -> None:
    """Modules of which anything can be imported, in place of ones that the tests do not run."""
    for name in names:
        stand_in(name, __getattr__=lambda attribute: mock.MagicMock(), __path__=[])


def module_with(file: Path, name: str, *names: str, **known: Any) -> ModuleType:
    """A module with these definitions of a file alone; `known`: what they refer to."""
    module = stand_in(name, **known)
    definitions(file, name, *names, into=vars(module))
    return module


def definitions(file: Path, module: str, *names: str, into: dict[str, Any] | None = None, **known: Any) -> list[Any]:
    """These classes, functions and methods of a file that is not imported as a whole.

    `known`: what they refer to, beside what the file imports of Python, torch, Megatron-core and this package.
    """
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree)
    found = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names]
    assert len(found) == len(names), f"{file} has {[node.name for node in found]} of {names}"
    contents = {**known, "__name__": module} if into is None else into
    used = {node.id for part in found for node in ast.walk(part) if isinstance(node, ast.Name)} - contents.keys()
    for statement in _imports(tree, used):
        with contextlib.suppress(ImportError):  # of another version of Megatron-core, for an annotation
            exec(compile(ast.Module([statement], []), str(file), "exec"), contents)
    code = compile(ast.Module(found, []), str(file), "exec", flags=__future__.annotations.compiler_flag)
    exec(code, contents)
    return [contents[name] for name in names]


def _imports(tree: ast.Module, names: set[str]) -> Iterator[ast.stmt]:
    """The file's imports of these names from what is installed, each by itself."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else []:
            path = f"{'.' * node.level}{node.module}" if isinstance(node, ast.ImportFrom) else alias.name
            if f"{path}.".startswith(INSTALLED) and (alias.asname or alias.name.partition(".")[0]) in names:
                single = copy.copy(node)
                single.names = [alias]
                yield single

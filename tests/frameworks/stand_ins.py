"""Importing single files of a project without what the rest of it needs: services, tokenizers, other engines."""

import __future__

import ast
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


def packages_without_their_init(folder: Path, *names: str) -> None:
    """Makes these packages of `folder` importable, their `__init__`, which imports the whole project, not run."""
    for name in [name for name in names if name not in sys.modules]:
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        package.__spec__.submodule_search_locations = package.__path__
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, package)


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module with these contents in place of one that imports what is not installed, or compiles kernels."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


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
    """These classes, functions and methods of a file that is not imported as a whole; `known`: what they refer to."""
    nodes = ast.walk(ast.parse(file.read_text()))
    found = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names]
    assert len(found) == len(names), f"{file} has {[node.name for node in found]} of {names}"
    contents = {**known, "__name__": module} if into is None else into
    code = compile(ast.Module(found, []), str(file), "exec", flags=__future__.annotations.compiler_flag)
    exec(code, contents)
    return [contents[name] for name in names]

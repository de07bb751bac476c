"""Importing single files of a project without what the rest of it needs: services, tokenizers, other engines."""

import __future__

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def packages_without_their_init(folder: Path, *names: str) -> None:
    """Makes these packages of `folder` importable, their `__init__`, which imports the whole project, not run."""
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)


def stand_in(name: str, **contents: Any) -> None:
    """A module with these contents in place of one that imports what is not installed, or compiles kernels."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def definitions(file: Path, module: str, *names: str, **known: Any) -> list[Any]:
    """These classes, functions and methods of a file that is not imported as a whole; `known`: what they refer to."""
    nodes = ast.walk(ast.parse(file.read_text()))
    found = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names]
    assert len(found) == len(names), f"{file} has {[node.name for node in found]} of {names}"
    contents = {**known, "__name__": module}
    code = compile(ast.Module(found, []), str(file), "exec", flags=__future__.annotations.compiler_flag)
    exec(code, contents)
    return [contents[name] for name in names]

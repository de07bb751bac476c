"""Importing single files of a project without what the rest of it needs: services, tokenizers, other engines."""

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

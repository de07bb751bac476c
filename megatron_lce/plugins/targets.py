"""Functions of a framework by "module:function" or "module:Class.method", in modules that are loaded or not yet."""

import contextlib
import importlib.metadata
import importlib.util
import operator
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any


def found(target: str) -> Any:
    """The function, or None if there is none or its module is not loaded."""
    module, _, path = target.partition(":")
    with contextlib.suppress(AttributeError):
        return operator.attrgetter(path)(sys.modules.get(module))
    return None


def put(target: str, old: Any, new: Any, framework: str) -> None:
    """Puts `new` where `old` is, and, if it is defined there, wherever the framework's modules have imported it."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    holder = operator.attrgetter(".".join(parents))(sys.modules[module]) if parents else sys.modules[module]
    setattr(holder, name, new)
    if module in (origin(old), origin(new)):
        for other in [other for name, other in sys.modules.items() if f"{name}.".startswith(f"{framework}.")]:
            vars(other).update({name: new for name, value in vars(other).items() if value is old})


def origin(function: Any) -> str:
    """The module whose code runs, whatever `functools.wraps` has copied; behind decorators such as `torch.no_grad`."""
    owner = getattr(function, "__self__", function)
    module = getattr(owner, "__globals__", {"__name__": str(getattr(owner, "__module__", None))})["__name__"]
    is_decorator = module.partition(".")[0] in ("torch", "contextlib", "functools")
    return origin(function.__wrapped__) if is_decorator and hasattr(function, "__wrapped__") else module


def names_in(framework: str, module: str) -> Collection[str]:
    """What the source of a module that is not loaded defines, imports or calls at its top level."""
    folders = getattr(sys.modules.get(framework), "__path__", None)
    with contextlib.suppress(ModuleNotFoundError):
        folders = folders or getattr(importlib.util.find_spec(framework), "submodule_search_locations", None)
    if folders is None:
        raise ImportError(f"megatron_lce's plugin needs {framework}, which is not installed")
    base = Path(next(iter(folders)), *module.removeprefix(framework).split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return compile(file.read_text(), str(file), "exec").co_names
    return ()


def version_of(framework: str) -> str:
    version = getattr(sys.modules.get(framework), "__version__", None)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = version or importlib.metadata.version(framework)
    return f"{framework} {version or '(version unknown)'}"

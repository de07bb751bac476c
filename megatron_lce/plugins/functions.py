"""Framework functions, named "module:function" or "module:Class.method"."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from typing import Any


def called_with(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `ours` with the framework's function as its first argument."""

    @functools.wraps(own)
    def call(*inputs: Any, **keywords: Any) -> Any:
        return ours(own, *inputs, **keywords)

    return call


def lookup(target: str) -> Any:
    """Returns the function, or None if it is missing or its module is not loaded."""
    module, _, path = target.partition(":")
    return functools.reduce(lambda holder, name: getattr(holder, name, None), path.split("."), sys.modules.get(module))


def names_in(framework: str, module: str) -> Collection[str]:
    """Returns the names in the top-level code of a module, without importing it or its packages."""
    package = importlib.util.find_spec(framework)
    if package is None:
        raise ImportError(f"megatron_lce's plugin needs {framework}, which is not installed")
    inside = module.removeprefix(framework).rpartition(".")[0].replace(".", "/")
    folders = [f"{folder}{inside}" for folder in package.submodule_search_locations or ()]
    loader: Any = getattr(PathFinder.find_spec(module, folders), "loader", None)
    return () if loader is None else loader.get_code(module).co_names


def origin(function: Any) -> str:
    """Returns the module whose code runs, whatever `functools.wraps` says. Looks through torch's own decorators."""
    owner = getattr(function, "__self__", function)
    module = getattr(owner, "__globals__", {"__name__": str(getattr(owner, "__module__", None))})["__name__"]
    is_decorator = module.partition(".")[0] in ("torch", "contextlib", "functools")
    return origin(function.__wrapped__) if is_decorator and hasattr(function, "__wrapped__") else module


def version_of(framework: str) -> str:
    version = getattr(sys.modules.get(framework), "__version__", None)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = version or importlib.metadata.version(framework)
    return f"{framework} {version or '(version unknown)'}"

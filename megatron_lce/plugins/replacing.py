"""Replaces functions of a framework, whether or not their modules are loaded yet, and restores them."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

logger = logging.getLogger("megatron_lce.plugins")


class Plugin:
    """Functions of a framework, and ours that replace them once their modules are loaded.

    `replacements` maps "module:function" or "module:Class.method" to our function. It is called with the framework's
    function as its first argument. `needs` lists framework functions that ours call.
    """

    def __init__(self, framework: str, replacements: dict[str, Callable[..., Any]], *needs: str) -> None:
        self.framework, self.replacements, self.needs = framework, replacements, needs
        self.modules = {target.partition(":")[0] for target in replacements}
        self.replaced: dict[str, tuple[Any, Any]] = {}  # by target: the framework's, ours

    def install(self, *_: object) -> None:
        """Replaces the functions. A second call, and arguments that a framework passes to hooks, are ignored.

        If the framework is not installed (ImportError), a function is missing, or something else has replaced it
        (RuntimeError), nothing is replaced.
        """
        if self in sys.meta_path:
            return
        for target in (*self.replacements, *self.needs):
            self._check(target)
        self._replace_in(sys.modules)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        # As a warning, because frameworks hide INFO.
        logger.warning("megatron_lce replaces in %s: %s", version_of(self.framework), ", ".join(self.replacements))

    def uninstall(self) -> None:
        """Restores the framework's functions. If something else has replaced ours: RuntimeError, and no change."""
        for target, (_, ours) in self.replaced.items():
            if (now := lookup(target)) is not ours:
                raise RuntimeError(f"{origin(now)} has replaced {target} after megatron_lce: undo that first")
        for target, (own, ours) in self.replaced.items():
            self._put(target, ours, own)
        self.replaced.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Import hook: replaces functions right after their module is loaded."""
        spec: Any = PathFinder.find_spec(name, path) if name in self.modules else None
        if spec is not None:
            spec.loader.exec_module = functools.partial(self._load, spec.loader.exec_module)
        return spec

    def _load(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._replace_in({module.__name__})

    def _replace_in(self, modules: Collection[str]) -> None:
        found = {target: self._check(target) for target in self.replacements if target.partition(":")[0] in modules}
        for target, own in found.items():  # after all checks
            self.replaced[target] = own, called_with(own, self.replacements[target])
            self._put(target, *self.replaced[target])

    def _put(self, target: str, old: Any, new: Any) -> None:
        """Puts `new` in place of `old`, and in every module that imported it by name from the one that defines it."""
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, sys.modules[module]), name, new)
        if module in (origin(old), origin(new)):
            for other in [other for name, other in sys.modules.items() if f"{name}.".startswith(f"{self.framework}.")]:
                vars(other).update({name: new for name, value in vars(other).items() if value is old})

    def _check(self, target: str) -> Any:
        """Returns the function, or None if its module is not loaded. Raises if it is missing or already replaced."""
        module, _, path = target.partition(":")
        own = lookup(target)
        if own is None and (module in sys.modules or path.partition(".")[0] not in names_in(self.framework, module)):
            raise RuntimeError(f"megatron_lce needs {path} in {module}: {version_of(self.framework)} has none there")
        if own is not None and not f"{origin(own)}.".startswith(f"{self.framework}."):
            raise RuntimeError(f"megatron_lce replaces {target}, but {origin(own)} has already: use one of the two")
        return own


def called_with(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
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

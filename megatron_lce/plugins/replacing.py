"""Replaces functions of a framework, whether or not their modules are loaded yet, and restores them."""

import functools
import logging
import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from megatron_lce.plugins.functions import called_with, lookup, names_in, origin, version_of

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
        own = {target: self._check(target) for target in self.replacements if target.partition(":")[0] in modules}
        self.replaced |= {target: (own[target], called_with(own[target], self.replacements[target])) for target in own}
        for target in own:
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

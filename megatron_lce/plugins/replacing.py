"""Functions of a framework that ours replace: looked for first, and put back by `uninstall`."""

import logging
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from megatron_lce.plugins.targets import found, names_in, origin, put, version_of

logger = logging.getLogger("megatron_lce.plugins")


class Plugin:
    """Replaces functions once the modules that hold them are loaded, at once if they are.

    `replacements` maps "module:function" to what makes our function of the framework's. Modules that have imported a
    function from where it is defined get ours, too. `needs` are functions that ours call.
    """

    def __init__(self, framework: str, replacements: dict[str, Callable[[Any], Any]], *needs: str) -> None:
        self.framework, self.replacements, self.needs = framework, replacements, needs
        self.modules = {target.partition(":")[0] for target in replacements}
        self.made: dict[str, tuple[Any, Any]] = {}  # by target: the framework's function and ours

    def install(self, *_: object) -> None:
        """Replaces the functions; a second call changes nothing. Ignores what a framework passes to its hooks.

        Raises:
            ImportError: the framework is not installed.
            RuntimeError: a function is missing, or something else has replaced it. Then nothing is replaced.
        """
        if self in sys.meta_path:
            return
        for target in (*self.replacements, *self.needs):
            self._check(target)
        self._replace_in(self.modules & sys.modules.keys())
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        message = "megatron_lce replaces in %s: %s"
        logger.warning(message, version_of(self.framework), ", ".join(self.replacements))  # frameworks hide INFO

    def uninstall(self) -> None:
        """Puts back what was there. RuntimeError, and nothing is put back, if something else has replaced ours."""
        for target, (_, ours) in self.made.items():
            if (now := found(target)) is not ours:
                raise RuntimeError(f"{origin(now)} has replaced {target} after megatron_lce: undo that first")
        for target, (own, ours) in self.made.items():
            put(target, ours, own, self.framework)
        self.made.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Called by Python's import: the module is loaded as ever, then its functions are replaced."""
        spec: Any = PathFinder.find_spec(name, path) if name in self.modules else None
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                self._replace_in({name})

            spec.loader.exec_module = execute_and_replace
        return spec

    def _replace_in(self, modules: set[str]) -> None:
        targets = [target for target in self.replacements if target.partition(":")[0] in modules]
        own = {target: self._check(target) for target in targets}
        made = {target: (own[target], self.replacements[target](own[target])) for target in targets}
        for target, pair in made.items():
            put(target, *pair, self.framework)
        self.made |= made

    def _check(self, target: str) -> Any:
        """Returns the function; None if its module, which defines or imports such a name, is not loaded yet."""
        module, _, path = target.partition(":")
        own = found(target)
        if own is None and (module in sys.modules or path.partition(".")[0] not in names_in(self.framework, module)):
            raise RuntimeError(f"megatron_lce needs {path} in {module}: {version_of(self.framework)} has none there")
        if own is not None and not f"{origin(own)}.".startswith(f"{self.framework}."):
            raise RuntimeError(f"megatron_lce replaces {target}, but {origin(own)} has already: use one of the two")
        return own

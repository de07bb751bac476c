"""Replaces functions of a framework, whether or not their modules are loaded yet, and restores them."""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from megatron_lce.plugins.functions import Function, called_with, origin, version_of

logger = logging.getLogger("megatron_lce.plugins")
Table = Mapping[str, Callable[[Any], Any] | None]


class Plugin:
    """Functions of a framework, and ours that replace them once their modules are loaded.

    `tested`: versions of the framework, for errors. `table`: functions as `Function.of` reads them, and ours, which
    `called_with` calls; None: ours only rely on it.
    """

    def __init__(self, framework: str, tested: str, table: Table) -> None:
        self.framework, self.tested = framework, tested
        self.functions = {Function.of(text): ours for text, ours in table.items()}
        self.replacements = {function: ours for function, ours in self.functions.items() if ours}
        self.modules: dict[str, ModuleType | None] = {function.module: None for function in self.replacements}
        # The module or class, the framework's function, and ours; again for each time that the module was reloaded.
        self.replaced: dict[Function, list[tuple[Any, Any, Any]]] = {}
        self.lock = threading.RLock()

    def install(self, *_: object) -> None:
        """Replaces the functions. A second call, and arguments that a framework passes to hooks, are ignored.

        If the framework is not installed (ImportError), a function is missing or takes other arguments than ours knows,
        or something else has replaced it (RuntimeError), nothing is replaced.
        """
        with self.lock:
            if self not in sys.meta_path:
                for function in self.functions:
                    function.check(self.framework, self.tested)
                sys.meta_path.insert(0, self)  # type: ignore[arg-type]
                self._replace_in(self.modules.keys() & sys.modules.keys())

    def uninstall(self) -> None:
        """Restores the framework's functions. If something else has replaced ours: RuntimeError, and no change."""
        with self.lock:
            for x, times in self.replaced.items():
                if (now := x.loaded()) is not times[-1][-1]:
                    raise RuntimeError(f"{origin(now)} has replaced {x.name} after megatron_lce: undo that first")
            for function, times in self.replaced.items():
                for holder, original, replacement in times:
                    put(function, holder, replacement, original)
            self.replaced.clear()
            self.modules = dict.fromkeys(self.modules)
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Import hook: replaces functions right after their module is loaded, by whichever finder comes next."""
        self._catch_up()
        finders: list[Any] = [*sys.meta_path]
        if name not in self.modules or self not in finders:
            return None
        specs = (finder.find_spec(name, path, target) for finder in finders[finders.index(self) + 1 :])
        spec: Any = next(filter(None, specs), None)
        if spec is not None:
            spec.loader.exec_module = functools.partial(self._load, spec.loader.exec_module)
        return spec

    def _load(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        with self.lock:
            self._replace_in(self.modules.keys() & {module.__name__})

    def _catch_up(self) -> None:
        """Replaces functions of modules that another import hook has loaded without asking this one."""
        if self.lock.acquire(blocking=False):  # an import that waits for `install` could wait for ever
            try:
                now = {name: sys.modules.get(name) or module for name, module in self.modules.items()}
                new = {x: module.__spec__ for x, module in now.items() if module and module is not self.modules[x]}
                self._replace_in([name for name, spec in new.items() if not getattr(spec, "_initializing", False)])
            finally:
                self.lock.release()

    def _replace_in(self, modules: Collection[str]) -> None:
        modules = modules if self in sys.meta_path else ()  # another thread may have uninstalled it
        self.modules |= {name: sys.modules[name] for name in modules}
        ours = [times[-1][-1] for times in self.replaced.values()]  # a loader that modules share comes twice
        new = [x for x in self.replacements if x.module in modules and x.loaded() not in ours]
        originals = {x: x.check(self.framework, self.tested) for x in new}
        for function, original in originals.items():  # after all checks
            replaced = function.holder(), original, called_with(original, self.replacements[function])
            self.replaced.setdefault(function, []).append(replaced)
            put(function, *replaced)
        if originals:  # as a warning, because frameworks hide INFO
            names = ", ".join(function.name for function in originals)
            logger.warning("megatron_lce has replaced in %s: %s", version_of(self.framework), names)


def put(function: Function, holder: Any, old: Any, new: Any) -> None:
    """Puts `new` in place of `old`, and in every module that imported it by name from the one that defines it."""
    setattr(holder, function.path.rpartition(".")[2], new)
    if function.module in (origin(old), origin(new)):
        for module in [module for module in [*sys.modules.values()] if isinstance(module, ModuleType)]:
            vars(module).update({name: new for name, value in [*vars(module).items()] if value is old})


def installed(framework: str, tested: str, table: Table) -> tuple[Plugin, Callable[..., None], Callable[[], None]]:
    """Installs a plugin. Returns it, and its `install` and `uninstall`."""
    plugin = Plugin(framework, tested, table)
    plugin.install()
    return plugin, plugin.install, plugin.uninstall

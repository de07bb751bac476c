"""Functions of a framework: where they are, what they take, whose they are; without importing the framework."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple


class Function(NamedTuple):
    """A function of a framework, and the parameters that a plugin relies on.

    As text: "module:function(x, y)", for exactly these in this order, "module:Class.method(x, ...)", for some of them.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None

    @classmethod
    def of(cls, text: str) -> "Function":
        name, _, parameters = text.partition("(")
        module, _, path = name.partition(":")
        return cls(module, path, tuple(parameters.rstrip(")").split(", ")) if parameters else None)

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"

    def loaded(self) -> Any:
        """Returns the function, or None if it is missing or its module is not loaded."""
        return functools.reduce(lambda x, y: getattr(x, y, None), self.path.split("."), sys.modules.get(self.module))

    def holder(self) -> Any:
        """Returns the loaded module or class that has the function."""
        return functools.reduce(getattr, self.path.split(".")[:-1], sys.modules[self.module])

    def check(self, framework: str, tested: str) -> Any:
        """Returns the function, or None if its module is not loaded. Its parameters are read in the source.

        Raises RuntimeError if it is missing, takes other parameters, as a decorator may, or is another package's.
        """
        original = self.loaded()
        if original is not None and not f"{(owner := origin(original))}.".startswith(f"{framework}."):
            raise RuntimeError(f"megatron_lce replaces {self.name}, but {owner} has already: use one of the two")
        is_gone = original is None and self.module in sys.modules
        found = None if is_gone else parameters_in(code_of(framework, self.module), self.path)
        found = found and tuple(x for x in found if not original or x in inspect.signature(original).parameters)
        if found is None or not self.fits(found):
            needed = self.path if found is None else f"{self.path}({', '.join(self.parameters or ())})"
            has = "none there" if found is None else f"({', '.join(found)})"
            version = f"{version_of(framework)} has {has}; tested: {tested}"
            raise RuntimeError(f"megatron_lce needs {needed} in {self.module}: {version}")
        return original

    def fits(self, found: tuple[str, ...]) -> bool:
        *known, last = self.parameters or ["..."]
        return {*known} <= {*found} if last == "..." else self.parameters == found


def parameters_in(code: CodeType | None, path: str) -> tuple[str, ...] | None:
    """Returns the parameters of a function in a module's or class's code. None: not there, (): defined elsewhere."""
    name, _, inside = path.partition(".")
    codes = [inner for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name == name] if code else []
    if not codes:
        return () if code and name in code.co_names else None
    names, count = codes[-1].co_varnames, codes[-1].co_argcount + codes[-1].co_kwonlyargcount
    return parameters_in(codes[-1], inside) if inside else names[:count]


def code_of(framework: str, module: str) -> CodeType | None:
    """Returns a module's top-level code, without importing it or its packages; None if it does not exist."""
    package = importlib.util.find_spec(framework)
    if package is None:
        raise ImportError(f"megatron_lce's plugin needs {framework}, which is not installed")
    inside = module.removeprefix(framework).rpartition(".")[0].replace(".", "/")
    folders = [f"{folder}{inside}" for folder in package.submodule_search_locations or ()]
    loader: Any = getattr(PathFinder.find_spec(module, folders), "loader", None)
    return loader and loader.get_code(module)


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


def called_with(original: Callable[..., Any], replacement: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function that hands its calls to `replacement`: arguments by name, `original`, and `run(**changed)`."""

    @functools.wraps(original)
    def ours(*inputs: Any, **keywords: Any) -> Any:
        def run(**changed: Any) -> Any:  # `original`, with some arguments changed, without a cycle
            given = inspect.BoundArguments(bound.signature, bound.arguments | changed)
            return original(*given.args, **given.kwargs)

        bound = inspect.signature(original).bind(*inputs, **keywords)
        bound.apply_defaults()
        return replacement(SimpleNamespace(**bound.arguments | {"original": original, "run": run}))

    return ours

"""Functions of a framework: where they are, what they take, whose they are; without importing the framework."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import sys
from importlib.machinery import PathFinder
from types import CodeType
from typing import Any, NamedTuple


class Function(NamedTuple):
    """A function as a plugin knows it.

    As text: "module:function" or "module:Class.method", with the parameters that a plugin relies on in parentheses:
    "(x, y)" for exactly these in this order, "(x, y, ...)" for these among others.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None

    @classmethod
    def of(cls, text: str) -> "Function":
        name, _, given = text.partition("(")
        module, _, path = name.partition(":")
        return cls(module, path, tuple(given.rstrip(")").split(", ")) if given else None)

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"

    def loaded(self) -> Any:
        """Returns the function, or None if it is missing or its module is not loaded."""
        holder = sys.modules.get(self.module)
        return functools.reduce(lambda holder, name: getattr(holder, name, None), self.path.split("."), holder)

    def check(self, framework: str) -> Any:
        """Returns the function, or None if its module is not loaded: then the source is read.

        Raises RuntimeError if it is missing, takes other parameters, or is another package's.
        """
        original = self.loaded()
        if original is not None and not f"{origin(original)}.".startswith(f"{framework}."):
            raise RuntimeError(
                f"megatron_lce replaces {self.name}, but {origin(original)} has already: use one of the two"
            )
        if original is None:
            code = None if self.module in sys.modules else code_of(framework, self.module)
            parameters = code and parameters_in(code, self.path)
        else:
            parameters = parameters_of(original) if self.parameters else ()
        if parameters is None or not self.fits(parameters):
            needed = self.path if parameters is None else f"{self.path}({', '.join(self.parameters or ())})"
            has = "none there" if parameters is None else f"({', '.join(parameters)})"
            raise RuntimeError(f"megatron_lce needs {needed} in {self.module}: {version_of(framework)} has {has}")
        return original

    def fits(self, parameters: tuple[str, ...]) -> bool:
        *known, last = self.parameters or ["..."]
        return {*known} <= {*parameters} if last == "..." else self.parameters == parameters


def parameters_of(function: Any) -> tuple[str, ...]:
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return tuple(x.name for x in inspect.signature(function).parameters.values() if x.kind not in variable)


def parameters_in(code: CodeType, path: str) -> tuple[str, ...] | None:
    """As `parameters_of`, of a function in a module's or class's code. None: unknown, (): defined elsewhere."""
    name, _, inside = path.partition(".")
    codes = [inner for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name == name]
    if not codes:
        return () if name in code.co_names else None
    if inside:
        return parameters_in(codes[-1], inside)
    return codes[-1].co_varnames[: codes[-1].co_argcount + codes[-1].co_kwonlyargcount]


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

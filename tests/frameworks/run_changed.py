"""A plugin's import where a function that it relies on has moved, or takes other parameters: every one of them in turn.

    python tests/frameworks/run_changed.py PLUGIN FOLDER      # a copy of the framework, which is changed

FOLDER is on PYTHONPATH. Every import must raise, and name the function.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def import_plugin(name: str) -> Any:
    sys.modules.pop(f"megatron_lce.plugins.{name}", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Plugin"]
    return importlib.import_module(f"megatron_lce.plugins.{name}").plugin


def changes(function: Any, text: str) -> Iterator[tuple[str, str]]:
    """Texts of the function's file in which it or its last known parameter is renamed, and what an error then names."""
    yield re.sub(rf"\b{function.path.rpartition('.')[2]}\b", "renamed", text), function.path
    if not function.parameters:
        return
    tree = node = ast.parse(text)
    for name in function.path.split("."):
        definitions = (x for x in ast.walk(node) if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == name)
        *_, node = definitions
    known = [parameter for parameter in function.parameters if parameter != "..."]
    (parameter,) = (found for found in ast.walk(node.args) if getattr(found, "arg", None) == known[-1])
    parameter.arg = "renamed"
    yield ast.unparse(tree), f"{function.path}("


def main() -> None:
    sys.dont_write_bytecode = True
    name, folder = sys.argv[1], Path(sys.argv[2])
    plugin = import_plugin(name)
    for function in plugin.functions:
        file = folder.joinpath(*function.module.split(".")).with_suffix(".py")
        text = file.read_text()
        for changed, needed in changes(function, text):
            file.write_text(changed)
            try:
                import_plugin(name)
            except RuntimeError as error:
                said = str(error)
            else:
                raise AssertionError(f"{needed} is renamed, and nothing notices")
            assert said.startswith(f"megatron_lce needs {needed}"), said
            assert f" in {function.module}: {plugin.framework} " in said, said
            print(f"ok      {said}")
        file.write_text(text)
    import_plugin(name)


if __name__ == "__main__":
    main()

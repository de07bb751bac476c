"""A plugin's import where a function that it relies on has moved, or takes other parameters: every one of them in turn.

    python tests/frameworks/run_changed.py PLUGIN FOLDER      # a copy of the framework, which is changed

FOLDER is on PYTHONPATH. Every import must raise, and name the function.
"""

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True


def import_plugin(name: str) -> Any:
    sys.modules.pop(f"megatron_lce.plugins.{name}", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Plugin"]
    return importlib.import_module(f"megatron_lce.plugins.{name}").plugin


def without(function: Any, text: str) -> str:
    return re.sub(rf"\b{function.path.rpartition('.')[2]}\b", "renamed", text)


def with_other_parameter(function: Any, text: str) -> str:
    """The file with another name of the last parameter that the plugin knows."""
    tree = node = ast.parse(text)
    for name in function.path.split("."):
        definitions = (x for x in ast.walk(node) if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == name)
        *_, node = definitions
    known = [parameter for parameter in function.parameters if parameter != "..."]
    (parameter,) = (found for found in ast.walk(node.args) if getattr(found, "arg", None) == known[-1])
    parameter.arg = "renamed"
    return ast.unparse(tree)


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    plugin = import_plugin(name)
    for function in plugin.functions:
        file = folder.joinpath(*function.module.split(".")).with_suffix(".py")
        text = file.read_text()
        for change in (without, with_other_parameter)[: 2 if function.parameters else 1]:
            file.write_text(change(function, text))
            try:
                import_plugin(name)
            except RuntimeError as error:
                said = str(error)
            else:
                raise AssertionError(f"{function.name}: {change.__name__} is not noticed")
            path = function.path if change is without else f"{function.path}("
            expected = f"megatron_lce needs {path}", f" in {function.module}: {plugin.framework} "
            assert said.startswith(expected[0]), said
            assert expected[1] in said, said
            print(f"ok      {said}")
        file.write_text(text)
    import_plugin(name)


if __name__ == "__main__":
    main()

"""A file that sets up a worker, with the line that docs/integrations.md adds to it, in two new processes.

    python tests/frameworks/run_workers.py FOLDER FILE      # FOLDER/FILE has the line

The file's imports run in its order, without those that fail here for want of services, other engines or GPUs. Then the
modules of IMPORTED are imported, if they have not been. Stand-ins: what is not installed.
"""

import ast
import contextlib
import importlib
import multiprocessing
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import megatron.core.models.gpt  # noqa: F401  # before the stand-ins
from stand_ins import mocks, packages_without_their_init

import megatron_lce  # noqa: F401

IMPORTED = {  # with what stands in for other modules of the framework
    "nemo_rl.distributed.model_utils": (),
    "skyrl.backends.skyrl_train.distributed.megatron.model_utils": (),
    "areal.models.mcore.vocab_parallel_head": ("areal.infra", "areal.infra.platforms"),
}


class Missing:
    """The last finder: mocks in place of top-level packages that are not installed."""

    def __init__(self, framework: str) -> None:
        self.framework = framework

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        root, _, inside = name.partition(".")
        is_mock = "__file__" not in vars(sys.modules[root]) if inside else root != self.framework
        return ModuleSpec(name, self, is_package=True) if is_mock else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(__getattr__=lambda attribute: mock.MagicMock(), __version__="99.0")
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def replaced_in_worker(folder: str, file: str) -> dict[str, str]:
    """Whose code runs in place of each function that the plugin replaces."""
    sys.path.insert(0, folder)
    sys.meta_path.append(Missing(file.partition("/")[0]))  # type: ignore[arg-type]
    package = file.rpartition("/")[0].replace("/", ".")
    for node in ast.parse(Path(folder, file).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            is_line = "megatron_lce" in ast.unparse(node)
            with contextlib.nullcontext() if is_line else contextlib.suppress(Exception):
                exec(compile(ast.Module([node], []), file, "exec"), {"__name__": file, "__package__": package})
    from megatron_lce.plugins.functions import origin

    (plugin,) = [finder for finder in sys.meta_path if type(finder).__name__ == "Plugin"]
    for name in plugin.modules.keys() & IMPORTED:
        packages_without_their_init(Path(folder), name.rpartition(".")[0])
        mocks(*IMPORTED[name])
        importlib.import_module(name)
    return {x.name: origin(x.loaded()) for x in plugin.replacements if x.module in sys.modules}


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        found = pool.starmap(replaced_in_worker, [tuple(sys.argv[1:])] * 2, chunksize=1)
    assert {owner for of_worker in found for owner in of_worker.values()} <= {"megatron_lce.plugins.functions"}, found
    print(f"ok      {sys.argv[2]}: {', '.join(found[0])}")


if __name__ == "__main__":
    main()

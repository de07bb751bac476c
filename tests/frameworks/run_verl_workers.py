"""verl's own switches in two new processes each, which import verl as a worker does.

    python tests/frameworks/run_verl_workers.py FOLDER      # FOLDER/verl

verl's `__init__` and its loader of external modules run as they are. Stand-ins: those of run_verl.py, and verl's
protocol, which wants Ray.
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch  # noqa: F401  # before the stand-ins
from run_verl import import_registry, stand_ins_of_verl
from stand_ins import stand_in

PLUGIN = "megatron_lce.plugins.verl"


def engine_of_worker(folder: Path, external_lib: str | None) -> str:
    """The module whose code runs as the forward pass of verl's engine in this process."""
    sys.path.insert(0, str(folder))
    stand_in("verl.utils", __path__=[str(folder / "verl/utils")])
    stand_in("verl.protocol", DataProto=None)
    stand_in("verl.utils.device", is_npu_available=False)
    importlib.import_module("verl")
    from verl.utils.import_utils import import_external_libs

    import_external_libs(external_lib)  # as the model's configuration does
    stand_ins_of_verl(folder)
    forward = import_registry(folder).get_mcore_engine_forward_fn(SimpleNamespace(architectures=[None]))
    return forward.__globals__["__name__"]


def main() -> None:
    folder = Path(sys.argv[1])
    for variable, external_lib in ((PLUGIN, None), ("", PLUGIN), ("", None)):
        os.environ["VERL_USE_EXTERNAL_MODULES"] = variable
        with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
            found = pool.starmap(engine_of_worker, [(folder, external_lib)] * 2, chunksize=1)
        expected = "megatron_lce.plugins.functions" if variable or external_lib else "verl.models.mcore.model_forward"
        assert found == [expected] * 2, found
        print(f"ok      verl's workers, VERL_USE_EXTERNAL_MODULES={variable} external_lib={external_lib}: {found}")


if __name__ == "__main__":
    main()

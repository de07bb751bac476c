"""TransformerEngine's cross-entropy from its three Python and Triton files, without the rest of it."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.distributed import ProcessGroup

Loss = Callable[[Tensor, Tensor, ProcessGroup | None], Tensor]  # logits [s, b, V/tp], labels [s, b], the group

NAME = "transformer_engine"
PACKAGES = (NAME, f"{NAME}.common", f"{NAME}.common.triton", f"{NAME}.pytorch", f"{NAME}.pytorch.triton")


def load(folder: Path | None = None, overwrite_input: bool = False) -> Loss:
    """`parallel_cross_entropy` as Megatron calls it, from the folder that holds `transformer_engine`; None: installed.

    Its modules are imported under bare packages that point at the folder: the rest needs compiled libraries. They are
    gone from `sys.modules` afterwards, so that two versions can be loaded, and an installed one works.

    Raises:
        ModuleNotFoundError: TransformerEngine is not installed.
    """
    found = _folder(folder)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == NAME}
    for name in before:
        del sys.modules[name]
    try:
        for name in PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(found.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        jit = types.ModuleType(f"{NAME}.pytorch.jit")  # as of 2.20; it keeps a function out of torch.compile
        jit.no_torch_dynamo = lambda: lambda function: function  # type: ignore[attr-defined]
        sys.modules[jit.__name__] = jit
        function = importlib.import_module(f"{NAME}.pytorch.cross_entropy").parallel_cross_entropy
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
        sys.modules.update(before)
    return partial(_as_megatron, partial(function, overwrite_input=True) if overwrite_input else function)


def _folder(folder: Path | None) -> Path:
    if folder is not None:
        return folder / NAME
    spec = importlib.util.find_spec(NAME)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{NAME}'", name=NAME)
    return Path(next(iter(spec.submodule_search_locations)))


def _as_megatron(
    function: Callable, logits: Tensor, labels: Tensor, group: ProcessGroup | None, is_cg_capturable: bool = False
) -> Tensor:
    return function(logits, labels, 0.0, False, group, -100, is_cg_capturable)

"""Triton's interpreter at more than twice its speed for small kernels, and rounding as a GPU does.

Of small tiles numpy computes in no time; the rest is Python that does the same again at every operation.
"""

import dataclasses
import functools
import importlib.util
import math
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np


def hasten() -> None:
    """Has Triton's interpreter, from now on, remember what types, shapes and modules alone decide."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language import core
    from triton.runtime import interpreter

    _prepare_modules_once(interpreter)
    _know_shapes_and_dtypes(core, interpreter)
    _broadcast_what_differs(interpreter)
    _round_to_bf16(core, interpreter)
    _sum_products_in_order(interpreter)
    # Its copies of arguments on the host, which are there already here, wait for the garbage collector.
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    # It computes every integer operation a second time in int64, and drops the verdict outside debug mode.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _prepare_modules_once(interpreter: Any) -> None:
    """Attributes of `triton.language` are replaced at each launch and put back; nothing compiles here: they stay."""
    prepare = interpreter._patch_lang
    prepared: set[int] = set()
    nothing_to_restore = mock.Mock()

    def prepare_once(fn: FunctionType) -> Any:
        if id(fn.__globals__) not in prepared:
            prepared.add(id(fn.__globals__))  # of a module, which stays
            prepare(fn)
        return nothing_to_restore

    interpreter._patch_lang = prepare_once


def _know_shapes_and_dtypes(core: Any, interpreter: Any) -> None:
    """Each value gets a type and a shape, which no one changes: those of one shape share it."""
    make_block_type, equal = core.block_type.__init__, core.dtype.__eq__
    block_types: dict[tuple, dict[str, Any]] = {}
    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = vars(self).copy()
        vars(self).update(block_types[key])

    @functools.cache
    def shape_and_numel(*sizes: int):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_numel(*(type.shape if type.is_block() else ()))

    def np_dtype_of(dtype):
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    interpreter._get_np_dtype = np_dtype_of


def _broadcast_what_differs(interpreter: Any) -> None:
    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value
    semantic.broadcast_impl_value = lambda lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)


def _round_to_bf16(core: Any, interpreter: Any) -> None:
    """To nearest even, as GPUs do; the interpreter truncates, and gets subnormal numbers wrong."""
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if (source, target, rounding_mode) == (core.bfloat16, core.float32, None):
            return data.astype(np.uint32) << 16
        if (source, target, rounding_mode) != (core.float32, core.bfloat16, None):
            return convert(data, source, target, rounding_mode)
        bits = data.view(np.uint32)
        rounded = np.where(np.isnan(data), bits | 0x400000, bits + 0x7FFF + (bits >> 16 & 1))
        return (rounded >> 16).astype(np.uint16)

    interpreter._convert_float = convert_float


def _sum_products_in_order(interpreter: Any) -> None:
    """As a GPU does; BLAS sums in an order that may depend, with the CPU, on a row's place in its tile."""

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        products = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot

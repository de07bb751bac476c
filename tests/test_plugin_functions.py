"""How plugins read a framework's functions, and how ours get their calls."""

import gc
import weakref

import pytest
import torch

from megatron_lce.plugins.functions import Function, called_with


@pytest.mark.parametrize(
    ("needed", "found", "fits"),
    [
        ("", ("x",), True),
        ("(x, y)", ("x", "y"), True),
        ("(x, y)", ("x", "y", "z"), False),
        ("(x, y)", ("y", "x"), False),
        ("(x, ...)", ("y", "x", "z"), True),
        ("(x, ...)", ("y",), False),
    ],
)
def test_parameters_that_a_plugin_relies_on(needed, found, fits):
    assert Function.of(f"module:function{needed}").fits(found) == fits


def test_ours_get_a_call_by_name_and_pass_it_on():
    def theirs(x, *rest, y=2, **others):
        return x, rest, y, others

    ours = called_with(theirs, lambda call: (call.original, call.x, call.y, call.run(), call.run(y=call.x)))
    assert ours(1, 7, z=3) == (theirs, 1, 2, (1, (7,), 2, {"z": 3}), (1, (7,), 1, {"z": 3}))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        ours()


def test_a_call_keeps_its_arguments_whatever_their_names_and_however_often_it_runs():
    def theirs(run, original, y=2):
        return run, original, y

    ours = called_with(theirs, lambda call: (call.run(y=3), call.run(original=4), call.original))
    assert ours(0, original=1) == ((0, 1, 3), (0, 4, 2), theirs)


def test_a_call_is_freed_though_a_changed_argument_knows_it():
    """Its tensors, without the collector, which may come some microbatches later."""
    logits = torch.ones(2)
    freed, ours = weakref.ref(logits), called_with(lambda f, x: x.sum(), lambda call: call.run(f=lambda: call))
    gc.disable()
    try:
        assert ours(None, logits) == 2
        del logits
        assert freed() is None
    finally:
        gc.enable()

"""An interrupt before any line of a registration, a removal or a backward pass leaves nothing half registered."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

import megatron_lce
from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_integration.test_fsdp import Unit
from tests.megatron_integration.test_heads import as_of_mcore_adapter
from tests.megatron_world import enable, state

MEGATRON = str(Path(megatron_lce.__file__).parent / "megatron")
TORCH = tuple(
    sys.modules[f"torch.{name}"].__file__ for name in ("nn.modules.module", "utils.hooks", "autograd.function")
)


def interrupt(step, action, *files):
    """Raise KeyboardInterrupt before the action's step-th line in these files; return whether it has so many."""
    lines, reached = itertools.count(), []

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(files):
            return None
        if event == "line" and next(lines) == step:
            reached.append(step)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert reached
    finally:
        sys.settrace(before)
    return bool(reached)


def until_done(action, *files):
    """Yield after each run of the action that was interrupted, one line later each time."""
    for step in itertools.count():
        if not interrupt(step, action, *files):
            assert step > 10, "the interrupts reached nothing"
            return
        yield step


@pytest.fixture(params=[False, True], ids=["plain", "with a hook"])
def hooked(request, untied):
    """A model whose head may have a forward hook that is wrapped while it is replaced."""
    if request.param:
        as_of_mcore_adapter(untied)
    return untied


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts of `__del__`
@pytest.mark.parametrize("enabled", [False, True])
def test_a_capture(hooked, enabled):
    enable(hooked, use_fused_linear_ce=enabled)
    before = state(hooked)

    def capture():
        with capture_lm_head(hooked):
            pass

    for step in until_done(capture, MEGATRON, *TORCH):
        assert state(hooked) == before, step


def test_a_capture_that_is_kept(untied):
    """Nothing is closed by the end of the object's life."""
    before, capture = state(untied), capture_lm_head(untied)
    for step in until_done(capture.__enter__, MEGATRON, *TORCH):
        if "forward" in vars(untied.output_layer):  # entered, but for its last line
            capture.__exit__(None, None, None)
        assert state(untied) == before, step
    capture.__exit__(None, None, None)
    assert state(untied) == before


def test_the_flag(hooked):
    before = state(hooked)
    for step in until_done(lambda: enable(hooked), MEGATRON, *TORCH):
        if state(hooked) != before:  # enabled, but for the handle
            enable(hooked, use_fused_linear_ce=False)
        assert state(hooked) == before, step
    handles = [enable(hooked)]
    for step in until_done(lambda: handles[-1].remove(), MEGATRON, *TORCH):
        if handles[-1].enabled:  # not begun, with everything in place
            handles[-1].remove()
        assert state(hooked) == before, step
        handles.append(enable(hooked))


def test_a_backward_pass_with_main_grad(device, tensors, labels):
    """After one, a training loop that starts anew has right gradients, and no hook stays at the weight's node."""
    model = megatron_world.build(device, ddp=True)
    weight = model.module.output_layer.weight
    model.module.output_layer.gradient_accumulation_fusion = True
    enable(model)
    node = torch.autograd.graph.get_gradient_edge(weight).node

    def hooks():
        handles = [register(lambda *_: None) for register in (node.register_hook, node.register_prehook)]
        for handle in handles:
            handle.remove()
        return [list(handle.hooks_dict_ref().values()) for handle in handles]

    def gradients():
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.grad = None
        model(*tensors, labels=labels).sum().backward()
        return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}

    expected, before = gradients(), hooks()
    files = str(Path(MEGATRON) / "main_grad.py"), *TORCH[1:]
    for step in until_done(gradients, *files):
        megatron_world.assert_same_gradients(gradients(), expected)
        assert hooks() == before, step
        assert not weight.grad_added_to_main_grad


def test_a_pass_of_a_head_that_fsdp_frees(untied, tensors, labels):
    """Whose hook takes the loss from the outputs."""
    Unit(untied.output_layer)
    enable(untied)
    expected, before = untied(*tensors, labels=labels), state(untied)
    files = str(Path(MEGATRON) / "loss.py"), str(Path(MEGATRON) / "replace.py"), *TORCH[1:]
    for step in until_done(lambda: untied(*tensors, labels=labels), *files):
        assert torch.equal(untied(*tensors, labels=labels), expected), step
        assert state(untied) == before, step

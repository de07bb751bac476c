"""Methods replaced on an instance, and that it is the class's own again afterwards."""

import copy

from torch import nn

from megatron_lce.megatron_integration.method_overrides import MethodOverride, overrides_of


class Number(nn.Module):
    def __init__(self, value=0):
        super().__init__()
        self.value = value

    def forward(self):
        return self.value


class Owner:
    def __init__(self, module, value):
        self.value = value
        self.override = MethodOverride(module, "forward", self.forward)

    def forward(self):
        return self.value


def test_the_last_open_one_answers_and_the_last_to_close_leaves_nothing():
    module = Number()
    first, second = Owner(module, 1), Owner(module, 2)
    assert [override.owner for override in overrides_of(module, "forward")] == [second, first]
    first.override.close()
    first.override.close()
    assert module.forward() == 2
    second.override.close()
    assert module.forward() == 0
    assert "forward" not in vars(module)


def test_a_closed_one_that_others_hold_passes_on():
    module = Number()
    ours = Owner(module, 1)
    kept = module.forward
    module.forward = lambda: 10 * kept()
    ours.override.close()
    assert module.forward() == 0
    module.forward = kept
    assert [override.is_open for override in overrides_of(module, "forward")] == [False]
    Owner(module, 2).override.close()
    assert "forward" not in vars(module)


def test_a_deep_copy_has_its_own():
    module = Number()
    ours = Owner(module, 1)
    deep = copy.deepcopy(module)
    deep.value = 5
    (override,) = overrides_of(deep, "forward")
    assert override.module is deep
    override.close()
    assert (deep.forward(), module.forward()) == (5, 1)
    ours.override.close()
    assert module.forward() == 0

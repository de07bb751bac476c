"""Methods replaced on an instance, and that it is the class's own again afterwards."""

import copy

from torch import nn

from megatron_lce.megatron.replace import open_override, override_of


class Number(nn.Module):
    def __init__(self, value=0):
        super().__init__()
        self.value = value

    def forward(self):
        return self.value


class Owner:
    def __init__(self, module, value):
        self.value = value
        self.override = open_override(module, "forward", self)

    def forward(self):
        return self.value

    def close(self):
        self.override.close(self)


def test_the_last_open_one_answers_and_the_last_to_close_leaves_nothing():
    module = Number()
    first, second = Owner(module, 1), Owner(module, 2)
    assert override_of(module, "forward").owners == [first, second]
    first.close()
    first.close()
    assert module.forward() == 2
    second.close()
    assert module.forward() == 0
    assert "forward" not in vars(module)


def test_a_closed_one_that_others_hold_passes_on():
    module = Number()
    ours = Owner(module, 1)
    kept = module.forward
    module.forward = lambda: 10 * kept()
    ours.close()
    assert module.forward() == 0
    module.forward = kept
    assert override_of(module, "forward").owners == []
    Owner(module, 2).close()
    assert "forward" not in vars(module)


def test_a_deep_copy_has_its_own():
    module = Number()
    ours = Owner(module, 1)
    deep = copy.deepcopy(module)
    deep.value = 5
    override = override_of(deep, "forward")
    assert override.module is deep
    override.close(*override.owners)
    assert (deep.forward(), module.forward()) == (5, 1)
    ours.close()
    assert module.forward() == 0

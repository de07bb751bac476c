"""`install_megatron_linear_cross_entropy` on the modules of Megatron's dev branch; its model is run elsewhere."""

import sys
import types

import pytest

pytest.importorskip("megatron.core")

from megatron_lce import compat, install_megatron_linear_cross_entropy
from megatron_lce.megatron import own_flag


def test_it_takes_the_place_of_megatrons_and_gives_it_back(monkeypatch):
    theirs = lambda *_: None  # noqa: E731
    for name in (own_flag._DEFINED_IN, own_flag._CALLED_IN):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        module.linear_cross_entropy = theirs
        monkeypatch.setitem(sys.modules, name, module)
    called = sys.modules[own_flag._CALLED_IN]
    for _ in range(2):
        install_megatron_linear_cross_entropy()
        assert called.linear_cross_entropy is compat.megatron_linear_cross_entropy
    for _ in range(2):
        install_megatron_linear_cross_entropy(False)
        assert called.linear_cross_entropy is theirs


@pytest.mark.skipif(own_flag.importlib.util.find_spec(own_flag._CALLED_IN) is not None, reason="this Megatron has it")
def test_a_megatron_without_it_is_told():
    with pytest.raises(RuntimeError, match=r"megatron-core .* has no .* dev branch has: use enable_fused_linear_ce"):
        install_megatron_linear_cross_entropy()

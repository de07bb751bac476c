"""How `compat` knows Megatron's functions whose backward sums over the ranks: by their names in autograd's graph."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings, random

from megatron_lce.compat import _OPAQUE, is_summed_in_front

FRONTS = {
    "nothing": (lambda x: x, False),
    "copied": (mappings.copy_to_tensor_model_parallel_region, True),
    "gathered": (mappings.gather_from_sequence_parallel_region, True),
    "cut": (lambda x: mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False), False),
}


@pytest.mark.parametrize("front", FRONTS)
def test_megatrons_functions_have_the_names_that_are_looked_for(front, device):
    function, summed = FRONTS[front]
    hidden = function(torch.ones(4, 2, 8, device=device, requires_grad=True)).transpose(0, 1)
    assert is_summed_in_front(hidden, parallel_state.get_tensor_model_parallel_group()) is summed


def test_megatrons_checkpoint_is_known_to_hide_its_graph():
    assert random.CheckpointFunction.__name__ in _OPAQUE

"""What `explain` says of heads that can be fused and of heads that cannot."""

import pytest
import torch

import megatron_lce
from tests import megatron_world
from tests.megatron_world import assert_refused


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_can_be_fused(device, tied):
    model = megatron_world.build(device, vocab_size=4096, tied=tied)
    found = megatron_lce.explain(model, tokens=2**17)
    assert (found.can_capture, found.can_fuse, found.reasons) == (True, True, ())
    assert found.head == f"131072 tokens x 32 x 4096, fp32{', tied' * tied}"
    assert [row["head"] for row in found.ways] == ["Megatron", "megatron-lce"]
    assert str(found).startswith("this head can be fused\nbackend: ")
    assert not vars(model.output_layer).get("forward")  # nothing was put in place
    assert megatron_lce.enable_fused_linear_ce(model).enabled
    assert megatron_lce.explain(model).can_fuse  # also where it is enabled


def test_the_numbers_are_those_of_the_backend_that_it_names(untied):
    """On a CPU the torch backend, which computes logits twice for known losses, too, and keeps none."""
    found = megatron_lce.explain(untied.bfloat16())
    if found.backend == "torch":
        assert {row["head"]: row["matmuls"] for row in found.ways if "lce" in row["head"]} == {"megatron-lce": 4}
        assert "Recommended: megatron-lce, " not in str(found)
    else:
        assert "megatron-lce, known_loss=True" in [row["head"] for row in found.ways]


def test_it_says_where_fusing_does_not_help(untied):
    few = str(megatron_lce.explain(untied, tokens=4096))
    assert few.startswith("this head can be fused, but that saves no memory in a step of this size\n")
    assert "Fusing saves no memory here: the head peaks at" in few


def test_a_head_that_is_fused_and_has_no_estimate(untied):
    """Formulas are for rows of whole 16 bytes; the operation takes any."""
    untied.output_layer.weight = torch.nn.Parameter(untied.output_layer.weight[:, :-1].clone())
    found = megatron_lce.explain(untied)
    assert (found.can_capture, found.can_fuse, found.reasons) == (True, True, ())
    assert str(found) == "this head can be fused"


def test_a_head_that_can_only_be_captured_and_one_that_cannot(untied):
    untied.output_layer.gather_output = True
    found = megatron_lce.explain(untied)
    assert (found.can_capture, found.can_fuse) == (True, False)
    assert "- output_layer gathers its output" in str(found)
    assert "capture_lm_head works" in str(found)
    untied.output_layer.bias = torch.nn.Parameter(torch.zeros(104))
    found = megatron_lce.explain(untied)
    assert not found.can_capture
    reasons = [reason.split(" (")[0] for reason in found.reasons]
    assert reasons == ["output_layer has a bias", "output_layer gathers its output"]


def test_a_critic_and_a_stage_without_a_head(untied):
    untied.output_layer = torch.nn.Linear(32, 1)
    found = megatron_lce.explain(untied)
    assert not found.can_capture
    assert "this head cannot be fused:\n- output_layer is a Linear" in str(found)
    assert_refused(TypeError, "tokens must be an int, got float", megatron_lce.explain, untied, tokens=8.5)
    untied.post_process = False
    assert megatron_lce.explain(untied).reasons == ("this pipeline stage has no LM head",)
    assert_refused(TypeError, "megatron-core language model", megatron_lce.explain, torch.nn.Linear(2, 2))

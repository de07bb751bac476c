"""What `explain` says of heads that can be fused and of heads that cannot."""

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron_lce
from tests import megatron_world


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


def test_it_says_where_fusing_does_not_help(device):
    model = megatron_world.build(device)
    few = str(megatron_lce.explain(model, tokens=4096))
    assert few.startswith("this head can be fused, but that hardly helps in a step of this size\n")
    assert "Fusing hardly helps here: the head peaks at" in few


def test_a_head_that_is_fused_and_has_no_estimate(device):
    """Formulas are for rows of whole 16 bytes; the operation takes any."""
    model = megatron_world.build(device)
    model.output_layer.weight = torch.nn.Parameter(model.output_layer.weight[:, :-1].clone())
    found = megatron_lce.explain(model)
    assert (found.can_capture, found.can_fuse, found.reasons) == (True, True, ())
    assert str(found) == "this head can be fused"


def test_a_head_that_can_only_be_captured(device):
    model = megatron_world.build(device)
    model.output_layer.gather_output = True
    found = megatron_lce.explain(model)
    assert (found.can_capture, found.can_fuse) == (True, False)
    assert "- output_layer gathers its output" in str(found)
    assert "capture_lm_head works" in str(found)


def test_every_reason_is_told_at_once(device):
    model = megatron_world.build(device)
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(104))
    model.output_layer.gather_output = True
    found = megatron_lce.explain(model)
    assert not found.can_capture
    assert [reason.split(" (")[0] for reason in found.reasons] == [
        "output_layer has a bias",
        "output_layer gathers its output",
    ]


def test_a_critic_and_a_stage_without_a_head(device):
    critic, stage = megatron_world.build(device), megatron_world.build(device)
    critic.output_layer = torch.nn.Linear(32, 1)
    found = megatron_lce.explain(critic)
    assert not found.can_capture
    assert "this head cannot be fused:\n- output_layer is a Linear" in str(found)
    stage.post_process = False
    assert megatron_lce.explain(stage).reasons == ("this pipeline stage has no LM head",)
    with pytest.raises(TypeError, match="megatron-core language model"):
        megatron_lce.explain(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="tokens must be an int, got float"):
        megatron_lce.explain(critic, tokens=8.5)

"""Logits that a hook keeps of an enabled model's pass: their values, their gradients, and how long they answer."""

import copy
import io
import pickle

import pytest
import torch

pytest.importorskip("megatron.core")


from tests import megatron_world
from tests.megatron_world import enable


def kept_logits(model):
    """The logits of every pass from now on, as a hook keeps them."""
    kept = []
    model.output_layer.register_forward_hook(lambda module, args, output: kept.append(output[0]))
    return kept


def test_logits_kept_by_a_hook_are_those_of_the_pass_or_none(untied, device):
    tensors, labels = megatron_world.inputs(device)
    expected = untied(*tensors).transpose(0, 1).detach()
    enable(untied)
    kept = kept_logits(untied)
    for _ in range(2):
        loss = untied(*tensors, labels=labels)
    read = kept[0].detach()
    loss.sum().backward()
    for parameter in untied.parameters():
        parameter.data.add_(1.0)  # as Megatron's optimizers copy their fp32 weights: no version counter sees it
    torch.testing.assert_close(read, expected)
    torch.testing.assert_close(kept[0].detach(), expected)
    with pytest.raises(RuntimeError, match="kept from before a backward pass, after which weights change"):
        kept[1].sum()


def test_logits_kept_past_a_change_of_weights_in_place_are_refused(untied, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    kept = kept_logits(untied)
    with torch.no_grad():
        untied(*tensors, labels=labels)
        untied.output_layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="the LM head's weight was changed in place after the forward pass"):
        kept[0].sum()


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e39])
def test_products_that_are_no_scale_are_computed(untied, device, factor):
    tensors, labels = megatron_world.inputs(device)
    untied.eval()
    expected = untied(*tensors).transpose(0, 1) * factor
    enable(untied)
    kept = kept_logits(untied)
    untied(*tensors, labels=labels)
    assert torch.equal((kept[0] * factor).nan_to_num(), expected.nan_to_num())
    assert torch.equal((kept[0] * 2 * factor).isnan(), expected.isnan())


def saved(logits, save, load):
    file = io.BytesIO()
    save(logits, file)
    file.seek(0)
    return load(file)


KEPT = {
    "torch.save": lambda logits: saved(logits, torch.save, torch.load),
    "pickle": lambda logits: saved(logits, pickle.dump, pickle.load),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "numpy": lambda logits: torch.from_numpy(logits.cpu().numpy()),
    "tolist": lambda logits: torch.tensor(logits.tolist()),
    "dlpack": torch.from_dlpack,
    "storage": lambda logits: torch.tensor(logits.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32),
    "data_ptr": lambda logits: torch.full((), float(logits.data_ptr() != 0)),
}


@pytest.mark.parametrize("way", KEPT)
def test_what_goes_past_the_dispatcher_gets_real_logits(untied, device, way):
    tensors, labels = megatron_world.inputs(device)
    expected = untied(*tensors).transpose(0, 1).contiguous()
    enable(untied)
    kept = kept_logits(untied)
    with torch.no_grad():
        untied(*tensors, labels=labels)
        got = KEPT[way](kept[0])
    assert type(got) is torch.Tensor
    torch.testing.assert_close(
        got.to(device).flatten(), expected.flatten() if got.numel() > 1 else expected.new_ones(1)
    )


def test_logits_in_their_graph_are_saved_with_it(untied, device):
    tensors, labels = megatron_world.inputs(device)
    enable(untied)
    kept = kept_logits(untied)
    untied(*tensors, labels=labels)
    got = saved(kept[0], torch.save, torch.load)
    assert (type(got), got.requires_grad) == (torch.Tensor, True)
    with pytest.raises(RuntimeError, match="requires grad"):
        kept[0].cpu().numpy()
    with pytest.raises(RuntimeError, match="data of an enabled model's logits cannot be replaced"):
        kept[0].data = torch.zeros(2)

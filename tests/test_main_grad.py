"""Megatron's `main_grad` protocol of the head's weight, on one rank."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_lce import enable_fused_linear_ce
from megatron_lce.megatron_integration.main_grad import main_grad_sink
from scripts import megatron_runtime
from tests import megatron_world


@pytest.fixture(scope="module")
def device():
    with megatron_world.world() as device:
        yield device


@pytest.fixture
def head(device):
    """An output layer as DistributedDataParallel leaves it, with gradient_accumulation_fusion."""
    head = megatron_runtime.build_gpt(megatron_world.options(), device=device).output_layer
    head.gradient_accumulation_fusion = True
    head.weight.main_grad = torch.ones_like(head.weight, requires_grad=False)
    head.weight.grad_added_to_main_grad = False
    return head


def test_finish_gives_a_dummy_and_sets_the_mark(head):
    sink = main_grad_sink(head.weight, head)
    assert sink.buffer() is head.weight.main_grad
    dummy = sink.finish()
    assert head.weight.grad_added_to_main_grad
    assert (dummy.shape, dummy.dtype, dummy.requires_grad) == (head.weight.shape, head.weight.dtype, False)


def test_the_dummy_of_a_shared_weight_is_zeros(head):
    head.weight.zero_out_wgrad = True
    assert not main_grad_sink(head.weight, head).finish().any()


def test_without_ddp_there_is_no_dummy(head):
    del head.weight.grad_added_to_main_grad
    assert main_grad_sink(head.weight, head).finish() is None


def test_no_sink_where_main_grad_must_not_be_written(head):
    embedding = torch.nn.Parameter(torch.zeros_like(head.weight))
    embedding.main_grad = torch.zeros_like(head.weight)
    assert main_grad_sink(embedding, head) is None, "another layer's gradient would be lost with the dummy"
    embedding.zero_out_wgrad = True
    assert main_grad_sink(embedding, head) is not None
    head.weight.requires_grad_(False)
    assert main_grad_sink(head.weight, head) is None, "frozen"
    head.weight.requires_grad_(True)
    head.weight.main_grad = head.weight.main_grad.bfloat16()
    assert main_grad_sink(head.weight, head) is None, "slabs are accumulated in fp32"
    del head.weight.main_grad
    assert main_grad_sink(head.weight, head) is None, "no DDP around the model"
    head.weight.main_grad = torch.zeros_like(head.weight)
    head.gradient_accumulation_fusion = False
    assert main_grad_sink(head.weight, head) is None


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_added_over_microbatches(device, frozen):
    model = megatron_runtime.build_gpt(megatron_world.options(), device=device, ddp=True)
    weight = model.module.output_layer.weight
    weight.requires_grad_(not frozen)
    tensors, labels = megatron_world.inputs(device)

    def accumulated():
        model.zero_grad_buffer()
        for shift in (0, 1):
            model(*tensors, labels=labels.roll(shift, 1)).sum().backward()
        return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}

    expected = accumulated()
    enable_fused_linear_ce(model, backend="torch")
    model.module.output_layer.gradient_accumulation_fusion = True
    actual = accumulated()
    assert weight.grad_added_to_main_grad is not frozen
    assert weight.grad is None
    for name, gradient in expected.items():
        if frozen and name.endswith("output_layer.weight"):
            assert not actual[name].any()
        else:
            assert (actual[name] - gradient).norm() / gradient.norm() < 1e-5, name

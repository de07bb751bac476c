"""A head whose weight is whole in its call only, by stand-ins on one rank: FSDP's hooks, a shard of GTP's protocol."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import REFUSED, VOCAB_SIZE, assert_refused, enable

WHY = "FSDP frees the head's weight after the output layer's call, behind which"


class Unit:
    """The output layer as a unit of Megatron-FSDP: hooks gather and free its weight, and make views of all outputs."""

    def __init__(self, head, output=lambda tensor: tensor.view_as(tensor)):
        self.whole, self.output = head.weight.detach().clone(), output
        head.weight.__fsdp_param__ = True
        for hook in (self.after_forward, self.before_backward):
            hook.__func__.__module__ = "megatron_fsdp.megatron_fsdp"
        self.weight = head.weight
        head.register_forward_pre_hook(lambda *_: self.gather())
        head.register_forward_hook(self.after_forward)
        self.free()

    def gather(self):
        with torch.autograd._unsafe_preserve_version_counter(self.weight), torch.no_grad():
            self.weight.untyped_storage().resize_(self.whole.nbytes)
            self.weight.copy_(self.whole)

    def free(self):
        self.weight.untyped_storage().resize_(0)

    def after_forward(self, head, inputs, outputs):
        outputs = tree_map(lambda x: self.output(x) if torch.is_tensor(x) else x, outputs)
        tensors = [x for x in outputs if torch.is_tensor(x)]
        torch.autograd.graph.register_multi_grad_hook(tensors, self.before_backward, mode="any")
        self.free()
        return outputs

    def before_backward(self, gradient):
        self.gather()


@pytest.mark.parametrize("known_loss", [False, True])
@pytest.mark.parametrize("batch", [megatron_world.BATCH, 1])
def test_loss_and_gradients_are_those_of_a_whole_weight(untied, known_loss, batch, tensors, labels):
    inputs = [x if x is None else x[:batch] for x in (*tensors, labels)]
    labels = inputs.pop()
    expected = untied(*inputs, labels=labels)
    expected_gradients = megatron_world.gradients(untied, expected.sum())
    unit = Unit(untied.output_layer)
    handle = enable(untied, on_unsupported="raise", known_loss=known_loss)
    for _ in range(2):
        loss = untied(*inputs, labels=labels)
        assert unit.weight.untyped_storage().size() == 0
        gradients = megatron_world.gradients(untied, loss.sum())
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-6)
    hooks = list(untied.output_layer._forward_hooks.values())
    assert hooks == [unit.after_forward]
    with torch.no_grad():
        torch.testing.assert_close(untied(*inputs, labels=labels), expected)
    handle.remove()
    torch.testing.assert_close(untied(*inputs, labels=labels), expected)


@pytest.mark.filterwarnings("error:fused linear cross-entropy")
def test_fsdp_may_come_after_the_flag(untied, tensors, labels):
    expected = untied(*tensors, labels=labels)
    enable(untied)
    Unit(untied.output_layer)
    torch.testing.assert_close(untied(*tensors, labels=labels), expected)


OF_A_DTYPE = "output_dtype of None or torch.float32, got torch.bfloat16, which rounds the loss"


@pytest.mark.parametrize("message", [OF_A_DTYPE, REFUSED])
def test_what_a_hook_may_not_do_to_the_outputs(untied, message, tensors, labels):
    """Round the loss [b, s], or compute with logits [s, b, V]."""
    round_loss = lambda x: x.bfloat16() if x.dim() == 2 else x  # noqa: E731
    Unit(untied.output_layer, round_loss if message == OF_A_DTYPE else lambda x: x * 1)
    enable(untied, on_unsupported="raise")
    for _ in range(2):
        assert_refused(RuntimeError, message, untied, *tensors, labels=labels)


def test_a_loss_that_is_not_known_in_the_heads_call_is_megatrons(device):
    model = megatron_world.build(device, mtp_layers=1)
    model.config.use_mup = True
    Unit(model.output_layer)
    with pytest.warns(UserWarning, match=f"not used: {WHY}"):
        handle = enable(model)
    assert handle.reasons == (f"{WHY} multi-token prediction shifts the labels", f"{WHY} MuP scales the logits")


def test_a_capture_names_what_works_there(untied, device):
    Unit(untied.output_layer)
    message = r"managed by FSDP, .* use enable_fused_linear_ce, or FusedLinearHead"
    assert_refused(ValueError, message, capture_lm_head(untied).__enter__)


HALF = VOCAB_SIZE // 2


class Shard(nn.Parameter):
    """The first half of a weight's rows; what is gathered stays whole until the next layer's weight takes its place."""

    def __new__(cls, weight, calls):
        return super().__new__(cls, weight.detach()[:HALF].clone())

    def __init__(self, weight, calls):
        self.calls, self.other, self.buffer = calls, weight.detach()[HALF:].clone(), torch.empty_like(weight)
        self.main_grad = torch.zeros(HALF, weight.shape[1], device=weight.device)

    def _gather(self, name):
        self.calls.append(name)
        self.buffer.copy_(torch.cat([self.detach(), self.other]))
        return self.buffer.detach().requires_grad_()

    def all_gather_and_prefetch(self, fwd=True):
        return self._gather("forward")

    def all_gather_and_prefetch_bwd(self):
        return self._gather("backward")

    def wgrad_reduce_scatter(self, grad):
        self.calls.append("scatter")
        self.main_grad += grad[:HALF]


def sharded(model, calls):
    head = model.output_layer
    shard = Shard(head.weight, calls)
    del head.weight
    head.weight, head.gtp_remat_size = shard, 2
    return shard


@pytest.mark.parametrize("known_loss", [False, True])
def test_the_weight_is_gathered_around_each_product(untied, known_loss, tensors, labels):
    plain = untied(*tensors, labels=labels)
    expected = megatron_world.gradients(untied, plain.mean())
    calls = []
    shard = sharded(untied, calls)
    untied.output_layer.gradient_accumulation_fusion = True  # Megatron does without under GTP
    enable(untied, known_loss=known_loss)
    losses = untied(*tensors, labels=labels)
    assert calls == ["forward"]
    shard.buffer.fill_(torch.nan)  # another layer's weight
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-6)
    actual = megatron_world.gradients(untied, losses.mean())
    assert calls == ["forward", "backward", "scatter"]
    head_grad = expected.pop("output_layer.weight")[:HALF]
    megatron_world.assert_same_gradients(actual | {"shard": shard.main_grad}, expected | {"shard": head_grad})


def test_megatrons_mtp_losses_gather_it_too(device, tensors, labels):
    model = megatron_world.build(device, mtp_layers=1)
    calls = []
    sharded(model, calls)
    enable(model)
    model(*tensors, labels=labels, loss_mask=torch.ones_like(labels)).mean().backward()
    assert calls == ["forward"] * 2 + ["backward", "scatter"] * 2


def test_a_capture_is_refused(untied):
    sharded(untied, [])
    message = "sharded by generalized tensor parallelism, which gathers .* use enable_fused_linear_ce"
    assert_refused(ValueError, message, capture_lm_head(untied).__enter__)

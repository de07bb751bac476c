"""A head under generalized tensor parallelism: Megatron's protocol with a shard, by a stand-in on one rank.

`run_megatron` runs Megatron's own shards on GPUs.
"""

import pytest
import torch
from torch import nn

from megatron_lce import capture_lm_head
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE, assert_refused, enable

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

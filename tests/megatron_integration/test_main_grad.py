"""Megatron's `main_grad` protocol of the head's weight, on one rank."""

import functools

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import capture_lm_head, linear_jsd
from megatron_lce.megatron.main_grad import main_grad_sink
from tests import megatron_world
from tests.megatron_world import captured


@pytest.fixture
def head(untied):
    """An output layer as DistributedDataParallel leaves it, with gradient_accumulation_fusion, and without its hook."""
    head = untied.output_layer
    head.gradient_accumulation_fusion = True
    head.weight.main_grad = torch.zeros_like(head.weight, requires_grad=False)
    head.weight.grad_added_to_main_grad = False
    return head


def test_no_sink_where_main_grad_must_not_be_written(head):
    assert main_grad_sink(head.weight, head) is not None
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


class LikeMegatrons(torch.autograd.Function):
    """A head that accumulates as Megatron's own does: the mark is set for good, and autograd gets what is in memory."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        weight.main_grad += torch.einsum("sbv,sbh->vh", grad, hidden)
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan)


def accumulated(model, fusion, losses):
    """Every parameter's gradient over microbatches, with and without gradient_accumulation_fusion."""
    model.module.output_layer.gradient_accumulation_fusion = fusion
    model.zero_grad_buffer()
    for loss in losses:
        loss().backward()
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def cross_entropy(head, teacher, labels):
    return -head.linear_cross_entropy(labels, backend="torch").logprobs.sum()


def jsd_of_the_tensors(head, teacher, labels):
    heads = head.hidden, head.weight, teacher.hidden, teacher.weight
    return linear_jsd(*heads, labels=labels.T, backend="torch").sum()


def token_loss(head, teacher, labels):
    """Whose gradient is scaled on its way into main_grad."""
    result = head.linear_token_loss(labels, lambda out: out.mean_logit - out.logprobs, telemetry=True, backend="torch")
    return result.loss / 3


def some_ids(head, teacher, labels):
    """Logits at ids, and logprobs over sets of two, one of them empty."""
    ids = torch.stack([labels, labels.roll(1, 1)], dim=-1)
    offsets = (2 * torch.arange(labels.numel() + 1, device=labels.device)).clamp(max=2 * labels.numel() - 2)
    kept = head.support_logprobs(labels, ids.view(-1)[:-2], offsets, backend="torch")
    return head.linear_logits_at(ids, backend="torch").square().sum() - kept.sum()


def plain_logits(head, teacher, labels):
    return F.linear(head.hidden, head.weight).logsumexp(-1).sum()


def weight_alone(head, teacher, labels):
    return head.weight.square().sum()


OTHER_USES = {
    "token loss": token_loss,
    "some ids": some_ids,
    "jsd": lambda head, teacher, labels: head.linear_jsd(teacher, labels=labels, backend="torch").sum(),
    "loss of divergences": lambda head, teacher, labels: (
        head.linear_divergence_loss(teacher, labels, lambda out: out.tv, kinds=("tv",), backend="torch").loss
    ),
    "jsd of the tensors": jsd_of_the_tensors,
    "plain logits": plain_logits,
    "weight alone": weight_alone,
    "Megatron's own": lambda head, *_: LikeMegatrons.apply(head.hidden, head.weight).logsumexp(-1).sum(),
}


@pytest.mark.parametrize("other", OTHER_USES)
@pytest.mark.parametrize(("together", "mtp_layers"), [(False, 1), (True, 0)])
def test_every_use_of_the_captured_head_reaches_main_grad(device, together, other, mtp_layers, tensors, labels):
    """Beside cross-entropy and MTP's losses, which add to main_grad themselves, and in a microbatch of its own."""
    model = megatron_world.build(device, ddp=True, mtp_layers=mtp_layers)
    teacher = megatron_world.build(device, seed=7)
    with torch.no_grad():
        teacher_head = captured(teacher, tensors)

    def microbatch(*losses):
        with capture_lm_head(model) as head:
            model(*tensors, labels=labels if mtp_layers else None)
        return torch.stack([loss(head, teacher_head, labels) for loss in losses]).sum()

    def gradients(fusion, loss):
        uses = [(cross_entropy, loss)] if together else [(cross_entropy,), (loss,), (cross_entropy,)]
        return accumulated(model, fusion, [functools.partial(microbatch, *losses) for losses in uses])

    expected = gradients(False, OTHER_USES["plain logits" if other == "Megatron's own" else other])
    megatron_world.assert_same_gradients(gradients(True, OTHER_USES[other]), expected)


def test_zeros_alone_are_not_added(device, tensors, labels):
    """DDP's hook finds the mark then, and only then: an addition of nothing would cost as much as one of a gradient."""
    model = megatron_world.build(device, ddp=True)
    weight = model.module.output_layer.weight
    model.module.output_layer.gradient_accumulation_fusion = True
    found = []
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_hook(lambda *_: found.append(weight.grad_added_to_main_grad))  # runs after DDP's, before what follows
    for loss in (cross_entropy, weight_alone, cross_entropy):
        loss(captured(model, tensors), None, labels).backward()
        assert not weight.grad_added_to_main_grad
    assert found == [True, False, True]


def test_zeros_that_no_hook_drops_are_zeros(head, untied, monkeypatch, tensors, labels):
    """What `grad` held already stays."""
    weight = head.weight
    monkeypatch.setattr(torch, "empty_like", lambda like, **keywords: torch.full_like(like, torch.nan, **keywords))
    losses = cross_entropy, cross_entropy, weight_alone, cross_entropy
    for loss, expected in zip(losses, (0, 0, 2 * weight.detach(), 2 * weight.detach()), strict=True):
        loss(captured(untied, tensors), None, labels).backward()
        assert (weight.grad == expected).all()
        assert not weight.grad_added_to_main_grad
    assert weight.main_grad.any()
    del weight.grad_added_to_main_grad, weight.grad
    cross_entropy(captured(untied, tensors), None, labels).backward()
    assert weight.grad is None


def test_a_hook_may_put_main_grad_in_grads_place(head, untied, tensors, labels):
    """As a loop does whose optimizer reads `grad`."""
    weight = head.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.main_grad))
    cross_entropy(captured(untied, tensors), None, labels).backward()
    assert weight.grad is weight.main_grad
    assert weight.main_grad.any()

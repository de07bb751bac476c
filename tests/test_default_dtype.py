"""torch's default dtype, which training programs change, decides nothing: every result keeps its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import megatron_lce
from megatron_lce import compat
from tests.jsd_oracle import make_inputs
from tests.problems import BETAS, ignored_labels, make_problem

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OTHERS = [BF16, FP16, FP64]


def results(call: Callable[..., Any], inputs: list[Tensor], default: torch.dtype) -> list[Tensor]:
    """Tensors that the call returns under this default dtype, and the gradients of the inputs that take one."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    torch.set_default_dtype(default)
    try:
        returned = [leaf for leaf in tree_leaves(call(*inputs)) if isinstance(leaf, Tensor)]
        sum(leaf.float().sum() for leaf in returned if leaf.requires_grad).backward()
    finally:
        torch.set_default_dtype(FP32)
    return [t.nan_to_num(7.0) for t in (*returned, *(t.grad for t in inputs if t.requires_grad))]


def check(call: Callable[..., Any], *inputs: Tensor) -> None:
    expected = results(call, list(inputs), FP32)
    for default in OTHERS:
        actual = results(call, list(inputs), default)
        assert [t.dtype for t in actual] == [t.dtype for t in expected], default
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), default


def head(device: torch.device, dtype: torch.dtype, hidden_size: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = make_problem(20, hidden_size, 300, device, dtype)
    problem.labels[3:6] = -100
    temperature = (torch.arange(20, dtype=FP32, device=device) % 5 + 1) / 3
    return problem.hidden.requires_grad_(), problem.weight.requires_grad_(), problem.labels, temperature


OPTIONS = [
    {},
    {"telemetry": True, "vocab_size": 280},
    {"softcap": 5.0, "logits_scale": 0.3, "temperature": 0.7},
    {"skip_ignored": True, "logits_cache_bytes": 2**20},
    {"skip_ignored": 17, "entropy": False},
    {"skip_ignored": 16},  # not the labels' number: NaN
    {"workspace_bytes": 120_000},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_linear_cross_entropy(options, dtype, backend, device):
    def call(hidden, weight, labels, temperature):
        keywords = {"temperature": temperature, "backend": backend, **options}
        return megatron_lce.linear_cross_entropy(hidden, weight, labels, **keywords)

    check(call, *head(device, dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("skip_ignored", [False, True, 17])
def test_linear_token_loss(skip_ignored, dtype, backend, device):
    def loss(out, advantages):
        return -(out.logprobs * advantages) + 0.1 * out.entropy, {"ratio": out.logprobs.exp()}

    def call(hidden, weight, labels, temperature):
        given = {"temperature": temperature, "skip_ignored": skip_ignored, "backend": backend}
        result = megatron_lce.linear_token_loss(hidden, weight, labels, loss, temperature, **given)
        return result.loss, result.outputs, result.metrics

    check(call, *head(device, dtype))


JSD_OPTIONS = [{"beta": beta} for beta in BETAS]
JSD_OPTIONS += [{"skip_ignored": skip, "student_softcap": 3.0} for skip in (True, 6)]
JSD_OPTIONS += [{"workspace_bytes": 2**17}]  # blocks of few tokens


@pytest.mark.parametrize("options", JSD_OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_linear_jsd(options, weighted, backend, device):
    inputs, labels = make_inputs(9, 24, 40, 2000, device, BF16), ignored_labels(slice(0, 3), 9, device)
    keywords = {"labels": labels, "token_weights": inputs.upstream if weighted else None, "backend": backend, **options}

    def call(hidden, weight):
        return megatron_lce.linear_jsd(hidden, weight, *inputs[2:4], **keywords)

    check(call, *(tensor.requires_grad_() for tensor in inputs[:2]))


COMPAT = {
    "verl": lambda h, w, labels, t: compat.linear_cross_entropy(h, w, labels, temperature=t),
    "areal": lambda h, w, labels, t: compat.areal_linear_cross_entropy(h, w, labels, 0.7, return_max_logits=True),
    "megatron": lambda h, w, labels, t: compat.megatron_linear_cross_entropy(h, w, labels),
    "torch": lambda h, w, labels, t: compat.torch_linear_cross_entropy(h, w, labels, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", COMPAT)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_compat(name, dtype, device):
    check(COMPAT[name], *head(device, dtype))


def test_labels_of_packed_sequences(device):
    tokens = torch.arange(12, device=device).view(1, 12)
    bounds = torch.tensor([0, 5, 12], device=device)
    expected = megatron_lce.shift_labels(tokens, cu_seqlens=bounds)
    for default in OTHERS:
        torch.set_default_dtype(default)
        try:
            assert torch.equal(megatron_lce.shift_labels(tokens, cu_seqlens=bounds), expected)
        finally:
            torch.set_default_dtype(FP32)

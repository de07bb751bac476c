"""What holds for every operation with a gradient: bits that no setting of torch changes, and gradients where wanted."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lce import compat
from tests.operations import OPERATIONS, SUMS, cross_entropy, jsd, known_jsd, tensors_of, token_loss
from tests.problems import make_problem

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


CALLS = [
    *(
        (call, {"temperature": torch.arange(1, 21) / 8}, dtype)
        for call in OPERATIONS.values()
        for dtype in (FP32, BF16)
    ),
    (cross_entropy, {"telemetry": True, "vocab_size": 280}, BF16),
    (cross_entropy, {"softcap": 5.0, "logits_scale": 0.3, "temperature": 0.7}, FP32),
    (cross_entropy, {"skip_ignored": True, "logits_cache_bytes": 2**20}, BF16),
    (cross_entropy, {"skip_ignored": 17, "entropy": False}, FP32),
    (cross_entropy, {"skip_ignored": 16}, BF16),  # not the labels' number: NaN
    (cross_entropy, {"workspace_bytes": 120_000}, FP32),
    (token_loss, {"skip_ignored": True}, BF16),
    (token_loss, {"skip_ignored": 17}, FP16),
    *((call, {"beta": beta}, BF16) for call in (jsd, known_jsd) for beta in (0, 1)),
    (jsd, {"skip_ignored": True, "student_softcap": 3.0}, BF16),
    (known_jsd, {"skip_ignored": 17, "student_softcap": 3.0}, BF16),
    *((call, {"workspace_bytes": 2**17}, BF16) for call in (jsd, known_jsd)),  # blocks of few tokens
]
COMPAT = {
    "verl": compat.linear_cross_entropy,
    "areal": lambda *head: compat.areal_linear_cross_entropy(*head, 0.7, return_max_logits=True),
    "torch": lambda *head: compat.torch_linear_cross_entropy(*head, label_smoothing=0.1),
}


@contextlib.contextmanager
def other_settings(device: torch.device, default: torch.dtype, autocast: torch.dtype, precision: str) -> Iterator[None]:
    """What training programs set around a call, all of it at once."""
    torch.set_default_dtype(default)
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast(device.type, autocast), torch.device("meta"):
            yield
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_default_dtype(FP32)
        torch.set_float32_matmul_precision("highest")


def head(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...] = (20,)) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels, _ = make_problem(shape, 24, 300, device, dtype)
    labels.view(-1)[3:6] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def results(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Tensors that the call returns, and the gradients of the inputs that take one."""
    inputs = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
    returned = tensors_of(call(*inputs))
    sum(tensor.sin().sum() for tensor in returned if tensor.requires_grad).backward()
    gradients = [tensor.grad for tensor in inputs if tensor.requires_grad]
    return [tensor.detach().nan_to_num(7.0) for tensor in (*returned, *gradients)]


def check_bits(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    expected = results(call, inputs)
    for settings in ((BF16, FP16, "high"), (torch.float64, BF16, "medium")):
        with other_settings(inputs[0].device, *settings):
            actual = results(call, inputs)
        assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected], settings
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), settings


@pytest.mark.parametrize(("call", "keywords", "dtype"), CALLS, ids=range(len(CALLS)))
def test_no_setting_of_torch_changes_a_bit(call, keywords, dtype, backend, device):
    keywords = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in keywords.items()}
    check_bits(functools.partial(call, backend=backend, **keywords), head(device, dtype))


@pytest.mark.parametrize("name", COMPAT)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_no_setting_of_torch_changes_a_bit_of_the_other_projects_calls(name, dtype, device):
    check_bits(COMPAT[name], head(device, dtype))


@pytest.fixture(params=OPERATIONS)
def operation(request, backend):
    return request.param, functools.partial(OPERATIONS[request.param], backend=backend)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_frozen_input_gets_no_gradient_and_changes_none(dtype, operation, device):
    hidden, weight, labels = head(device, dtype)
    *_, of_hidden, of_weight = results(operation[1], (hidden, weight, labels))
    assert torch.equal(results(operation[1], (hidden, weight.detach(), labels))[-1], of_hidden)
    assert torch.equal(results(operation[1], (hidden.detach(), weight, labels))[-1], of_weight)


def strided(saved: Tensor) -> Tensor:
    return saved.new_empty(*saved.shape[:-1], 2 * saved.shape[-1] + 1)[..., 1::2].copy_(saved)


def shifted(saved: Tensor) -> Tensor:
    return saved.new_empty(saved.numel() + 1)[1:].view(saved.shape).copy_(saved)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_hooks_may_give_saved_tensors_back_in_another_layout(dtype, operation, device):
    """They promise values, size, dtype and device alone."""
    inputs = head(device, dtype)
    expected = results(operation[1], inputs)
    for layout in (strided, shifted):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda x: layout(x) if x.dim() else x):  # noqa: B023
            actual = results(operation[1], inputs)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), layout


def test_without_gradient_only_forward_runs(operation, device):
    name, call = operation
    inputs = head(device, BF16)
    trained = tensors_of(call(*inputs))
    with torch.no_grad():
        alone = tensors_of(call(*inputs))
    frozen = tensors_of(call(*(tensor.detach() for tensor in inputs)))
    assert not any(tensor.requires_grad for tensor in (*alone, *frozen))
    assert all(torch.equal(one, other) for one, other in zip(alone, frozen, strict=True))
    for one, other in zip(alone, trained, strict=True):
        # Gradients made in forward may cut the tokens otherwise.
        torch.testing.assert_close(one, other.detach(), **({} if name in SUMS else {"rtol": 0.0, "atol": 0.0}))


def test_double_backward_is_refused(operation, device):
    """Not left out: a penalty on the gradient would train as if it were not there."""
    name, call = operation
    hidden, weight, labels = head(device, FP32)
    result = tensors_of(call(hidden, weight, labels))[0].sum()
    with pytest.raises(RuntimeError, match=r"create_graph must be False: linear_.* has no double backward"):
        torch.autograd.grad(result, (hidden, weight), create_graph=True)
    if name not in SUMS:
        assert torch.autograd.grad(result, hidden)[0].isfinite().all()


def test_batched_upstream_gradients_are_refused_in_our_words(operation, device):
    hidden, weight, labels = head(device, FP32)
    result = tensors_of(operation[1](hidden, weight, labels))[0]
    upstream = torch.ones(3, *result.shape, device=device)
    message = r"upstream gradients of .* must be plain tensors, got batched ones \(is_grads_batched, torch\.func\)"
    with pytest.raises(TypeError, match=message):
        torch.autograd.grad(result, (hidden, weight), upstream, is_grads_batched=True)


@pytest.mark.parametrize(("shape", "dtype"), [((0,), BF16), ((0, 3), FP32), ((3, 0), BF16)], ids=str)
def test_no_tokens(shape, dtype, operation, device):
    name, call = operation
    hidden, weight, labels = head(device, dtype, shape)
    *returned, of_hidden, of_weight = results(call, (hidden, weight, labels))
    assert returned[0].shape[: len(shape)] == (() if name in SUMS else shape)
    assert (of_hidden.shape, of_weight.shape) == (hidden.shape, weight.shape)
    assert not of_weight.any()
    if name in SUMS:
        assert returned[0] == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_launch_enters_the_device_of_its_tensors(name, device, monkeypatch):
    pytest.importorskip("triton")
    from megatron_lce.backends.triton.scale_rows import _scale_kernel

    entered, launched, kernels = [], [], type(_scale_kernel)
    run = kernels.run

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor.device)
        yield
        entered.pop()

    def spy(kernel, *arguments, **keywords):
        launched.append(list(entered))
        return run(kernel, *arguments, **keywords)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(kernels, "run", spy)
    inputs = head(device, BF16)
    results(functools.partial(OPERATIONS[name], backend="triton"), inputs)
    assert len(launched) > 2
    assert all(devices == [inputs[0].device] for devices in launched)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one(operation):
    """Its results have the bits of the current GPU's, which stays the current one."""
    name, call = operation
    inputs = head(torch.device("cuda:0"), BF16)
    moved = tuple(tensor.detach().to("cuda:1").requires_grad_(tensor.requires_grad) for tensor in inputs)
    expected, actual = results(call, inputs), results(call, moved)
    assert torch.cuda.current_device() == 0
    assert {tensor.device for tensor in actual} == {torch.device("cuda:1")}
    assert all(torch.equal(a.cpu(), e.cpu()) for a, e in zip(actual, expected, strict=True)), name

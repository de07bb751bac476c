"""`full_fp32`: full fp32 inside, the settings as they were behind it, a range in a trace."""

import contextlib

import pytest
import torch

import megatron_lce
from megatron_lce.core import matmul as matmul_module
from megatron_lce.core.matmul import copies_to_fp32, full_fp32, matmul
from tests.problems import all_equal, make_problem

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def precision():
    """Of fp32 products, which a test may change."""
    before = torch.get_float32_matmul_precision()
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision(before)


def test_products_are_in_full_fp32_and_the_settings_are_put_back(precision, backend, device, monkeypatch):
    """On a CPU a reduced precision may change no bit; so the settings are looked at."""
    settings = (precision, torch.backends.mkldnn.matmul)
    problem = make_problem(5, 8, 24, device)
    seen = []

    def spy_on(name, function):
        def spy(*arguments, **keywords):
            if arguments[-1].dtype == torch.float32:
                seen.append([setting.fp32_precision for setting in settings])
            if interrupt:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        monkeypatch.setattr(torch, name, spy)

    spy_on("mm", torch.mm)
    spy_on("addmm", torch.addmm)
    torch.set_float32_matmul_precision("medium")
    reduced = [setting.fp32_precision for setting in settings]
    for interrupt in (False, True):
        with pytest.raises(KeyboardInterrupt) if interrupt else contextlib.nullcontext():
            problem.run(backend)
        assert [setting.fp32_precision for setting in settings] == reduced
    assert "ieee" not in reduced
    # Logits of the torch backend, hidden's and weight's gradient, and the one that was interrupted.
    assert len(seen) >= (0 if backend == "triton" and device.type == "cuda" else 3)  # there all are of 16-bit parts
    assert all(precisions == ["ieee", "ieee"] for precisions in seen)


def test_the_precision_changes_where_an_operand_is_fp32_only(precision, device, monkeypatch):
    """Neither in the caller's loss nor in products of 16-bit matrices."""
    torch.set_float32_matmul_precision("high")
    reduced, seen, problem = precision.fp32_precision, [], make_problem(4, 8, 20, device)

    def loss(out):
        seen.append(precision.fp32_precision)
        return -out.logprobs

    megatron_lce.linear_token_loss(*problem[:3], loss)
    monkeypatch.setattr(torch, "mm", lambda *_, **__: seen.append(precision.fp32_precision))
    for dtype in (BF16, torch.float32):
        a, b, out = (torch.empty(16, 16, dtype=dtype, device="meta") for _ in range(3))
        matmul(a, b, out, accumulate=False)
    *others, of_fp32 = seen
    assert len(others) >= 2
    assert set(others) == {reduced}
    assert of_fp32 == "ieee"


def test_two_threads_leave_the_precision_as_it_was(precision):
    """The first to leave must not put the setting back under the other, nor the other pin what it found."""
    torch.set_float32_matmul_precision("high")
    reduced, first, second = precision.fp32_precision, full_fp32, full_fp32
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    inside = precision.fp32_precision
    second.__exit__(None, None, None)
    assert (inside, precision.fp32_precision) == ("ieee", reduced)


def test_an_inherited_precision_stays_inherited():
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        with full_fp32:
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = before


def test_a_trace_names_forward_and_backward(backend, device):
    problem = make_problem(4, 8, 20, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        problem.run(backend)
    names = {event.name for event in profile.events()}
    assert {f"megatron_lce: linear_cross_entropy {pass_}" for pass_ in ("forward", "backward")} <= names


@pytest.fixture
def asked_anew():
    """Nothing that torch was asked in other tests, nor here, is remembered."""
    matmul_module._has_fp32_result.cache_clear()
    yield
    matmul_module._has_fp32_result.cache_clear()


def test_fp32_results_of_16_bit_products_are_asked_of_torch(asked_anew, monkeypatch):
    """As on a GPU, but a tensor without memory is what there is here: which operands are multiplied is looked at."""
    a, b, out = (torch.empty(16, 16, dtype=dtype, device="meta") for dtype in (BF16, BF16, torch.float32))
    monkeypatch.setattr(torch, "addmm", lambda *_, **__: None)  # torch 2.11 has no such product without memory
    assert not copies_to_fp32(a)
    matmul_module._has_fp32_result.cache_clear()
    multiplied = []

    def without_out_dtype(bias, a, b, *, out_dtype=None, out=None):
        if out_dtype is not None:
            raise RuntimeError("not implemented for ROCm")
        multiplied.append((a.dtype, b.dtype))

    monkeypatch.setattr(torch, "addmm", without_out_dtype)
    assert copies_to_fp32(a)
    assert not copies_to_fp32(out)
    matmul(a, b, out, accumulate=True)
    matmul(a, b, a.clone(), accumulate=True)
    assert multiplied == [(torch.float32, torch.float32), (BF16, BF16)]


@pytest.mark.parametrize("backend_on_gpu", ["torch", "triton"])
@pytest.mark.gpu
def test_a_gpu_whose_products_have_no_fp32_result(backend_on_gpu, device, monkeypatch):
    monkeypatch.setattr(matmul_module, "_has_fp32_result", lambda device, dtype: False)
    make_problem(150, 64, 600, device, BF16).check(backend_on_gpu)


@pytest.mark.gpu
def test_tf32_changes_nothing_on_gpu(precision, backend, device):
    problem = make_problem(512, 512, 4096, device)
    plain = problem.run(backend)
    precision.fp32_precision = "tf32"
    assert all_equal(plain, problem.run(backend))
    assert precision.fp32_precision == "tf32"

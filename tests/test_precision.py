"""Logits rounded as a sampler's, against the fp64 oracle; the products are exact in fp32, so that all round alike."""

import pytest
import torch

import megatron_lce
from tests.live_bytes import peak_live_bytes
from tests.oracle import oracle, relative_error
from tests.problems import make_problem

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDED = {"logits_dtype": BF16}


def test_ties_go_to_even_and_what_is_no_number_stays(backend, device):
    """One column of H numbers times 1: 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, torch.inf, torch.nan])
    for value, expected in zip(values, (1.0, 1 + 2**-6, -1.0, 1 + 2**-7, torch.nan, torch.nan), strict=True):
        weight = torch.stack([value, torch.tensor(0.0)])[:, None].to(device)
        inputs = torch.ones(1, 1, device=device), weight, torch.tensor([0], device=device)
        out = megatron_lce.linear_cross_entropy(*inputs, telemetry=True, backend=backend, **ROUNDED)
        assert float(out.mean_logit) == pytest.approx(expected / 2, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_weight_in_fp32_beside_16_bit_hidden_states(dtype, backend, device):
    """Outputs and the weight's gradient as exact as if hidden were fp32, hidden's gradient but for its own rounding."""
    problem = make_problem((11, 3), 33, 300, device)
    problem = problem._replace(hidden=problem.hidden.to(dtype))
    mixed = problem.run(backend)
    exact = oracle(*problem).grad_hidden
    assert relative_error(mixed.grad_hidden, exact) <= 1.05 * relative_error(exact.to(dtype), exact)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("size", [1.0, 2.0**-12])
@pytest.mark.parametrize("row", [[-torch.inf] * 24, [0.0] * 3 + [-torch.inf] + [0.0] * 20], ids=["all", "one"])
def test_an_infinite_row_of_an_fp32_weight_takes_no_probability(row, size, dtype, backend, device):
    """Also if hidden states are small, and the row has no finite number but zeros to be scaled by."""
    problem = make_problem(9, 24, 300, device)
    hidden, weight = size * problem.hidden.abs() + size, problem.weight / size
    problem = problem._replace(hidden=hidden.to(dtype), weight=weight, labels=problem.labels % 290)
    expected = problem.run(backend, vocab_size=290)
    problem.weight[290:] = torch.tensor(row, device=device)
    out = megatron_lce.linear_cross_entropy(*problem[:3], backend=backend)
    torch.testing.assert_close(out.logprobs, expected.outputs.logprobs, rtol=0, atol=0)


def test_numbers_whose_rows_are_far_apart_are_no_nan(backend, device):
    """Each row's power of two is in range, and their product is not; the products themselves are small."""
    problem = make_problem(4, 24, 300, device)
    hidden, weight = torch.zeros_like(problem.hidden), 0 * problem.weight
    hidden[0, 0], weight[:, 1] = 1e30, 1e20
    result = problem._replace(hidden=hidden, weight=weight).run(backend)
    assert all(tensor.isfinite().all() for tensor in (*result.outputs[:3], result.grad_hidden, result.grad_weight))


def test_logits_of_tiny_numbers_have_their_digits_where_a_scale_makes_them_large(backend, device):
    problem = make_problem(4, 24, 300, device)
    problem = problem._replace(hidden=problem.hidden * 2.0**-116, weight=problem.weight * 2.0**-10)
    out = problem.run(backend, logits_scale=2.0**63, temperature=2.0**-63).outputs
    logits = problem.hidden.double() @ problem.weight.double().T * 2.0**126
    expected = logits.log_softmax(-1).gather(1, problem.labels[:, None])[:, 0]
    allowed = 4 * torch.finfo(FP32).eps * float(logits.abs().max())  # roundings of a logit and of lse
    torch.testing.assert_close(out.logprobs.double(), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 70, 90), (300, 3, 20)], ids=str)
def test_scaled_parts_are_the_number(shape, device):
    """Rows of any size, with numbers of any size in them, an infinity and a row of zeros."""
    parts = pytest.importorskip("megatron_lce.backends.triton.fp32_split")
    rows, columns, exponent = shape
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-exponent, exponent, (rows, 1))
    matrix *= 2.0 ** torch.randint(-60, 1, (rows, columns), generator=generator)
    matrix[rows // 2] = 0.0
    for number, exact in ((2, matrix.to(device)), (1, matrix.bfloat16().to(device))):
        split, factors = parts.split_fp32(exact, number)
        low, high = split.double().view(rows, number, -1)[:, [0, -1]].unbind(1)
        low = low / parts.LO_SCALE.value if number == 2 else torch.zeros_like(low)
        error = (high + low)[:, :columns] * factors.double()[:rows, None] - exact.double()
        largest = exact.abs().amax(1, keepdim=True).double()
        allowed = 2.0**-50 * largest if number == 2 else 2.0**-39 * largest
        relative = 2.0**-23 if number == 2 else 0.0
        assert (error.abs() <= torch.maximum(relative * exact.double().abs(), allowed)).all()
        assert not high[:, columns:].any()
        assert torch.equal(factors.log2(), factors.log2().round())


def test_an_infinity_is_its_first_part(device):
    parts = pytest.importorskip("megatron_lce.backends.triton.fp32_split")
    split, factors = parts.split_fp32(torch.tensor([[3.0, torch.inf, -torch.inf, torch.nan]], device=device), 2)
    low, high = split[0, :4].float(), split[0, 64:68].float()
    assert high[0] * factors[0] == 3.0
    assert low[:3].tolist() == [0.0, 0.0, 0.0]
    assert high[1:3].tolist() == [torch.inf, -torch.inf]
    assert high[3].isnan()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rows_of_every_size_beside_an_fp32_weight(dtype, backend, device):
    """Tiny rows beside huge ones lose nothing: each has a power of two of its own."""
    problem = make_problem(40, 96, 300, device)
    problem.weight[::3] *= 2.0**-30
    problem.weight[1::3] *= 2.0**8
    problem.hidden[::2] *= 2.0**-12
    problem.hidden[:, ::7] *= 2.0**-10
    problem._replace(hidden=problem.hidden.to(dtype)).check(backend, telemetry=True)


def test_products_of_parts_are_those_of_fp32(device, monkeypatch):
    """The arithmetic of a GPU's gradients, here with the CPU's products of the parts."""
    parts = pytest.importorskip("megatron_lce.backends.triton.fp32_split")
    monkeypatch.setattr(parts.tiles, "has_ptx", lambda: True)
    monkeypatch.setattr(parts, "K_STEP", 64)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(300, 40, generator=generator).to(device).T, torch.randn(300, 24, generator=generator).to(device)
    for left, right in ((a, b), (a, b.bfloat16()), (a.half(), b), (a.bfloat16(), b)):
        exact = left.double() @ right.double()
        out = torch.full((40, 24), 3.0, device=device)
        parts.matmul(left, right, out, accumulate=True)
        assert relative_error(out - 3, exact) <= 1e-6
        parts.matmul(left, right, out, accumulate=False)
        assert relative_error(out, exact) <= 2 * relative_error(left.float() @ right.float(), exact)


def test_copies_of_an_fp32_weight_stay_within_the_workspace(device, usual_torch):
    """Its parts are made for a few columns at a time, and freed before the next ones."""
    pytest.importorskip("triton")
    problem = make_problem(16, 128, 2048, device)
    hidden, workspace = problem.hidden.bfloat16(), 900_000  # parts of all columns take 1.5 MB
    keywords = {"workspace_bytes": workspace, "backend": "triton"}
    peak, out = peak_live_bytes(lambda: megatron_lce.linear_cross_entropy(hidden, *problem[1:3], **keywords))
    assert workspace / 2 < peak <= workspace + 64 * 16
    assert torch.equal(out.logprobs, problem._replace(hidden=hidden).run("triton").outputs.logprobs)

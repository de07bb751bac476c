"""`linear_cross_entropy` against the fp64 oracle: dtypes, shapes, and every keyword that changes a value."""

import pytest
import torch

import megatron_lce
from megatron_lce.backends.choice import load_backend
from tests.oracle import Upstream, largest_error, oracle, relative_error
from tests.problems import make_problem

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


SHAPES = [  # tokens, H, V_local
    (1, 1, 1),
    (1, 8, 300),
    (5, 1, 3),
    (3, 64, 1),
    (7, 33, 101),
    (130, 17, 257),
    (64, 128, 256),
    ((2, 3), 12, 40),
    ((5, 2, 3), 16, 70),
]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("tokens", "hidden_size", "columns"), SHAPES)
def test_outputs_and_gradients_match_the_oracle(tokens, hidden_size, columns, dtype, backend, device):
    result = make_problem(tokens, hidden_size, columns, device, dtype).check(backend)
    assert [o.dtype for o in result.outputs[:3]] == [FP32] * 3
    assert result.grad_hidden.dtype == result.grad_weight.dtype == dtype


OPTIONS = [
    {"temperature": 0.3},
    {"temperature": 4},
    {"logits_scale": 0.25},
    {"logits_scale": -1.5},
    {"logits_scale": 0.0},
    {"logits_scale": 0.0, "softcap": 5.0, "telemetry": True},
    {"softcap": 2.0},
    {"softcap": 30.0, "temperature": 0.7, "logits_scale": 3.0},
    {"entropy": False},
    {"telemetry": True},
    {"telemetry": True, "entropy": False, "softcap": 5.0, "temperature": 2.0},
    {"ignore_index": 3},
    {"vocab_size": 37},
    {"vocab_size": 37, "telemetry": True, "softcap": 2.0},
]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_match_the_oracle(options, dtype, backend, device):
    problem = make_problem(33, 24, 70, device, dtype)
    labels = problem.labels % min(options.get("vocab_size", 70), 70)
    labels[::5] = options.get("ignore_index", -100)
    result = problem._replace(labels=labels).check(backend, **options)
    assert (result.outputs.entropy is None) == (not options.get("entropy", True))
    assert (result.outputs.argmax is None) == (not options.get("telemetry", False))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=str)
def test_temperature_per_token(dtype, backend, device):
    problem = make_problem((11, 3), 24, 70, device)
    temperature = torch.linspace(0.5, 4.0, 33, device=device, dtype=dtype).view(11, 3)
    problem.check(backend, temperature=temperature, telemetry=True)


def test_temperature_per_token_equals_the_same_float(backend, device):
    problem = make_problem(9, 24, 70, device)
    one = problem.run(backend, temperature=0.6)
    per_token = problem.run(backend, temperature=torch.full((9,), 0.6, device=device))
    assert torch.equal(one.outputs.logprobs, per_token.outputs.logprobs)
    assert torch.equal(one.grad_hidden, per_token.grad_hidden)


def test_labels_are_global_ids_from_vocab_start(backend, device):
    problem = make_problem(9, 24, 70, device)
    shifted = problem._replace(labels=problem.labels + 1000)
    here = problem.run(backend, telemetry=True)
    there = shifted.run(backend, vocab_start=1000, telemetry=True)
    assert torch.equal(there.outputs.argmax, here.outputs.argmax + 1000)
    assert torch.equal(there.outputs.logprobs, here.outputs.logprobs)
    assert torch.equal(there.grad_weight, here.grad_weight)
    problem = problem._replace(labels=problem.labels % 61)
    padded = problem._replace(labels=problem.labels + 1000).run(backend, vocab_start=1000, vocab_size=1061)
    expected = problem.check(backend, vocab_size=61)
    assert torch.equal(padded.outputs.lse, expected.outputs.lse)
    assert torch.equal(padded.grad_weight, expected.grad_weight)


def test_padded_columns_take_no_probability_and_no_gradient(backend, device):
    problem = make_problem(9, 24, 300, device)
    problem = problem._replace(labels=problem.labels % 259)
    problem.weight[259:] = 50.0  # would dominate every softmax
    padded = problem.run(backend, vocab_size=259)
    cut = problem._replace(weight=problem.weight[:259]).check(backend)
    assert torch.equal(padded.outputs.lse, cut.outputs.lse)
    assert torch.equal(padded.grad_hidden, cut.grad_hidden)
    assert torch.equal(padded.grad_weight[:259], cut.grad_weight)
    assert not padded.grad_weight[259:].any()


def test_a_shard_that_is_all_padding_has_no_owned_label(backend, device):
    result = make_problem(4, 8, 10, device).run(backend, vocab_start=100, vocab_size=50)
    assert result.outputs.logprobs.isnan().all()
    assert not result.grad_weight.any()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_views_at_odd_places(dtype, backend, device):
    """Rows that start anywhere: a copy is made where kernels and products want 16 bytes."""
    problem = make_problem(9, 24, 70, device, dtype)
    hidden = torch.full((9, 40), float("nan"), device=device, dtype=dtype)[:, 3:27].copy_(problem.hidden)
    weight = torch.full((70 * 24 + 1,), float("nan"), device=device, dtype=dtype)[1:].view(70, 24)
    weight.copy_(problem.weight)
    out, plain = (
        megatron_lce.linear_cross_entropy(h, w, problem.labels, backend=backend)
        for h, w in ((hidden, weight), problem[:2])
    )
    assert torch.equal(out.logprobs, plain.logprobs)


def test_all_rows_ignored(backend, device):
    problem = make_problem((4, 2), 24, 70, device)
    problem.labels.fill_(-100)
    result = problem.run(backend, telemetry=True, candidates=torch.ones(4, 2, 3, dtype=torch.int64, device=device))
    assert not any(o.any() for o in result.outputs)
    assert not result.grad_hidden.any()
    assert not result.grad_weight.any()


@pytest.mark.parametrize("columns", [(3, 8), (255, 256), (0, 299), (256, 299)])
def test_argmax_is_the_lowest_id_on_ties(columns, backend, device):
    problem = make_problem(5, 16, 300, device)
    problem.hidden.abs_()
    problem.weight[list(columns)] = 4.0
    result = problem.run(backend, telemetry=True)
    assert (result.outputs.argmax == columns[0]).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_no_tokens(shape, backend, device):
    result = make_problem(shape, 16, 40, device).run(backend, telemetry=True)
    assert all(o.shape == shape for o in result.outputs[:-1])
    assert result.outputs.argmax.dtype == torch.int64
    assert result.grad_hidden.shape == (*shape, 16)
    assert not result.grad_weight.any()


@pytest.mark.parametrize("logit_std", [0.0, 1e-25, 6.0])
def test_statistics_keep_their_relative_precision(logit_std, backend, device):
    problem = make_problem(50, 64, 300, device, logit_std=logit_std)
    out = problem.run(backend, temperature=0.8, telemetry=True).outputs
    logits = problem.hidden.double() @ problem.weight.double().T / 0.8
    torch.testing.assert_close(out.sum_pi_squared.double(), logits.softmax(-1).square().sum(-1), rtol=3e-5, atol=0.0)
    largest = float(logits.abs().max())
    torch.testing.assert_close(out.mean_logit.double(), logits.mean(-1), rtol=0.0, atol=1e-6 * largest)
    torch.testing.assert_close(out.logits_norm.double(), logits.norm(dim=-1), rtol=1e-6, atol=1e-18)


def test_label_smoothing_is_a_line(backend, device):
    """As docs/sft.md has it."""
    problem = make_problem(20, 24, 70, device)
    problem.labels[::4] = -100
    hidden, weight = (tensor.clone().requires_grad_() for tensor in problem[:2])
    out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, telemetry=True, backend=backend)
    loss = -0.9 * out.logprobs + 0.1 * (out.lse - out.mean_logit)
    exact = [tensor.double().requires_grad_() for tensor in problem[:2]]
    logits = exact[0] @ exact[1].T
    expected = torch.nn.functional.cross_entropy(logits, problem.labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    actual = torch.autograd.grad(loss.sum(), (hidden, weight))
    for one, other in zip(actual, torch.autograd.grad(expected.sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_one_token_without_dimensions(backend, device):
    problem = make_problem((), 16, 40, device)
    assert problem.check(backend).outputs.logprobs.shape == ()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_non_contiguous_inputs(dtype, backend, device):
    problem = make_problem((6, 4), 40, 70, device, dtype)
    contiguous = problem.run(backend)
    hidden = problem.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    weight = torch.stack([problem.weight, problem.weight], dim=-1)[..., 0]
    labels = problem.labels.t().contiguous().t()
    assert not any(t.is_contiguous() for t in (hidden, weight, labels))
    strided = problem._replace(hidden=hidden, weight=weight, labels=labels).run(backend)
    assert torch.equal(contiguous.outputs.logprobs, strided.outputs.logprobs)
    assert torch.equal(contiguous.grad_hidden, strided.grad_hidden)
    assert torch.equal(contiguous.grad_weight, strided.grad_weight)


def test_every_second_column_of_a_wider_hidden(backend, device):
    problem = make_problem(6, 80, 70, device)
    wide = problem.hidden.clone().requires_grad_()
    out = megatron_lce.linear_cross_entropy(wide[:, ::2], problem.weight[:, ::2], problem.labels, backend=backend)
    out.logprobs.sum().backward()
    narrow = problem._replace(
        hidden=problem.hidden[:, ::2].contiguous(),
        weight=problem.weight[:, ::2].contiguous(),
        upstream=Upstream(torch.ones(6, device=device)),
    ).check(backend)
    assert torch.equal(wide.grad[:, ::2], narrow.grad_hidden)
    assert not wide.grad[:, 1::2].any()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_blocks_of_tokens_and_slabs_of_vocabulary(dtype, backend, device):
    """A workspace that holds a small part of the logits gives the same results."""
    problem = make_problem(150, 24, 600, device, dtype)
    problem.check(backend, telemetry=True, only_here={"workspace_bytes": 2**17})


def test_reference_backend_is_the_oracle_in_fp32(device):
    problem = make_problem((3, 5), 24, 70, device)
    result = problem.check("reference", temperature=0.8, vocab_size=66, telemetry=True)
    assert result.outputs.logprobs.dtype == FP32


def test_auto_is_triton_on_a_gpu_and_torch_elsewhere(device):
    pytest.importorskip("triton")
    for elsewhere in ("cpu", "meta"):  # Triton's interpreter, which these tests switch on, must be asked for by name
        assert load_backend("auto", torch.device(elsewhere)).__name__ == "megatron_lce.backends.torch.primitives"
    if device.type == "cuda":
        assert load_backend("auto", device).__name__ == "megatron_lce.backends.triton.primitives"


@pytest.mark.gpu
@pytest.mark.parametrize("backend_on_gpu", ["torch", "triton"])
def test_fp32_accuracy_on_gpu(backend_on_gpu, device):
    problem = make_problem(2048, 2048, 32768, device)
    check_accuracy(problem, backend_on_gpu, logprobs=1e-5, grad_hidden=1e-4, grad_weight=5e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("logits_cache_bytes", [0, 2**26, 2**30])
def test_bf16_accuracy_on_gpu(logits_cache_bytes, device):
    problem = make_problem(2048, 1024, 32768, device, BF16)
    check_accuracy(
        problem,
        "triton",
        logprobs=2e-5,
        grad_hidden=2.5e-3,
        grad_weight=2.5e-3,
        logits_cache_bytes=logits_cache_bytes,
    )


def check_accuracy(problem, backend, *, logprobs, grad_hidden, grad_weight, **keywords):
    actual, expected = problem.run(backend, **keywords), oracle(*problem)
    assert largest_error(actual.outputs.logprobs, expected.outputs.logprobs) <= logprobs
    assert relative_error(actual.grad_hidden, expected.grad_hidden) <= grad_hidden
    assert relative_error(actual.grad_weight, expected.grad_weight) <= grad_weight

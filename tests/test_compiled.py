"""torch.compile of a training step: one graph, and the bits of the same step without it. Two ranks: run_parity.py."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import megatron_lce

HIDDEN, VOCABULARY = 16, 300

CASES = {
    "outputs of every kind": {"telemetry": True},
    "temperature, softcap": {"temperature": 0.7, "softcap": 20.0, "logits_scale": 2.0, "vocab_size": 290},
    "a temperature a token": {"temperature": torch.linspace(0.5, 2.0, 12)},
    "ignored rows skipped": {"skip_ignored": True},
    "their number known": {"skip_ignored": 10},
    "candidates": {"candidates": torch.arange(-1, 59).view(12, 5), "entropy": False},
    "part of the logits kept": {"logits_cache_bytes": 4000, "dtype": torch.bfloat16},
    "all of them kept": {"logits_cache_bytes": 2**20, "dtype": torch.bfloat16},
    "a weight in fp32": {"dtype": torch.bfloat16, "weight_dtype": torch.float32},
    "rounded logits": {"logits_dtype": torch.bfloat16, "dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def step(hidden: Tensor, weight: Tensor, labels: Tensor, keywords: dict) -> tuple[Tensor, list[Tensor]]:
    out = megatron_lce.linear_cross_entropy(2 * hidden, weight, labels, **keywords)
    loss = out.lse.square().mean() - out.logprobs.sum()
    if out.entropy is not None:
        loss = loss + 0.1 * out.entropy.sum()
    if out.mean_logit is not None:
        loss = loss + 0.2 * out.mean_logit.sum()
    if out.candidate_logprobs is not None:
        loss = loss + 0.3 * out.candidate_logprobs.square().sum()
    return loss, [output.detach() for output in out if output is not None]


def inputs(
    dtype: torch.dtype, device: torch.device, tokens: int = 12, weight_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(290, (tokens,), generator=generator)
    labels[[2, 7]] = -100
    hidden = hidden.to(device, dtype).requires_grad_()
    weight = weight.to(device, weight_dtype or dtype).requires_grad_()
    return hidden, weight, labels.to(device)


def bits(function, hidden, weight, labels, keywords) -> list[Tensor]:
    """Loss, outputs and the gradients of those inputs that want one."""
    loss, outputs = function(hidden, weight, labels, keywords)
    wanted = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
    return [loss.detach(), *outputs, *(torch.autograd.grad(loss, wanted) if wanted else ())]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# Of torch's backend, which the compiler sees no more of, those in which forward leaves backward other things.
ON_TORCH = ("outputs of every kind", "ignored rows skipped", "candidates", "rounded logits")


@pytest.mark.parametrize(("case", "backend"), [*((c, "triton") for c in CASES), *((c, "torch") for c in ON_TORCH)])
def test_one_graph_with_the_bits_of_eager(case, backend, device):
    pytest.importorskip(backend)
    keywords = {"backend": backend, **CASES[case]}
    weight_dtype = keywords.pop("weight_dtype", None)
    problem = inputs(keywords.pop("dtype", torch.float32), device, weight_dtype=weight_dtype)
    keywords = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in keywords.items()}
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same(bits(compiled, *problem, keywords), bits(step, *problem, keywords))


def test_nothing_is_kept_of_rows_that_the_device_counts(device):
    pytest.importorskip("triton")
    problem, keywords = inputs(torch.bfloat16, device), {"backend": "triton", "skip_ignored": True}
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same(bits(compiled, *problem, keywords | {"logits_cache_bytes": 4000}), bits(step, *problem, keywords))


@pytest.mark.parametrize("trained", ["neither", "hidden", "weight"])
def test_gradients_only_where_wanted(trained, device):
    hidden, weight, labels = inputs(torch.float32, device)
    hidden.requires_grad_(trained == "hidden")
    weight.requires_grad_(trained == "weight")
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same(bits(compiled, hidden, weight, labels, {}), bits(step, hidden, weight, labels, {}))


@pytest.mark.parametrize("name", ["tokens", "temperature", "logits_scale"])
def test_another_number_does_not_recompile(name, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for number in (12, 17, 31):
        tokens, keywords = (number, {"skip_ignored": number - 2}) if name == "tokens" else (12, {name: number / 10})
        problem = inputs(torch.float32, device, tokens)
        assert same(bits(compiled, *problem, keywords), bits(step, *problem, keywords))
    assert counter.frame_count <= 2  # once for the first number, once for any other


def test_what_is_wrong_with_a_call_is_said(device):
    hidden, weight, labels = inputs(torch.float32, device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="temperature must be positive and finite, got -1"):
        compiled(hidden, weight, labels, {"temperature": -1.0})
    with pytest.raises(RuntimeError, match="labels must have hidden's shape without H"):
        compiled(hidden, weight, labels[:5], {})


def test_a_second_backward_through_kept_logits_raises(device):
    pytest.importorskip("triton")
    problem, keywords = inputs(torch.bfloat16, device), {"backend": "triton", "logits_cache_bytes": 2**20}
    loss, _ = torch.compile(step, fullgraph=True, backend="aot_eager")(*problem, keywords)
    with pytest.raises(RuntimeError):  # noqa: PT012  which of the two, and with what words, is torch's
        torch.autograd.grad(loss, problem[:2], retain_graph=True)
        torch.autograd.grad(loss, problem[:2])


def test_equal_calls_keep_their_own_logits(device):
    """The compiler makes one node of equal ones, and what is kept serves a single backward."""
    pytest.importorskip("triton")
    problem, keywords = inputs(torch.bfloat16, device), {"backend": "triton", "logits_cache_bytes": 2**20}

    def twice(hidden: Tensor, weight: Tensor, labels: Tensor, keywords: dict) -> tuple[Tensor, list[Tensor]]:
        first, second = (megatron_lce.linear_cross_entropy(hidden, weight, labels, **keywords) for _ in range(2))
        return first.logprobs.sum() + (second.logprobs * second.lse).sum(), []

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert same(bits(compiled, *problem, keywords), bits(twice, *problem, keywords))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["outputs of every kind", "their number known", "all of them kept"])
def test_inductor(case, device):
    keywords = dict(CASES[case])
    problem = inputs(keywords.pop("dtype", torch.float32), device)
    compiled = torch.compile(step, fullgraph=True)
    *one, _, _ = bits(compiled, *problem, keywords)
    *other, _, _ = bits(step, *problem, keywords)
    assert same(one[1:], other[1:])

"""CUDA graphs of forward and backward: a replay has the bits of the same call without one. Two ranks: run_parity.py."""

import pytest
import torch

import megatron_lce
from tests.oracle import differentiable
from tests.problems import make_problem

pytestmark = pytest.mark.gpu

SHAPE = (64, 96, 1000)  # tokens, H, V


def make_run(problem, **keywords):
    """A function that computes outputs and both gradients of the problem's hidden and weight as they are then."""
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()

    def run():
        out = megatron_lce.linear_cross_entropy(hidden, weight, problem.labels, backend="triton", **keywords)
        outputs, upstream = differentiable(out, problem.upstream)
        grads = torch.autograd.grad(outputs, (hidden, weight), upstream)
        return [*(output.detach() for output in out if output is not None), *grads]

    return hidden, run


def capture(run):
    """The graph of a call and its results, after a call that compiles what there is to compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize(
    ("dtype", "keywords"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"telemetry": True}),
        (torch.bfloat16, {"logits_cache_bytes": 2**30}),
        (torch.bfloat16, {"skip_ignored": 64}),
    ],
    ids=["fp32", "bf16", "kept logits", "counted rows"],
)
def test_a_replay_has_the_bits_of_eager(dtype, keywords, device, usual_torch):
    hidden, run = make_run(make_problem(*SHAPE, device, dtype), **keywords)
    graph, results = capture(run)
    for seed in (1, 2):
        other = make_problem(*SHAPE, device, dtype, seed=seed).hidden
        with torch.no_grad():
            hidden.copy_(other)
        graph.replay()
        assert all(torch.equal(replayed, eager) for replayed, eager in zip(results, run(), strict=True))


def test_counting_on_the_device_is_refused_with_its_reason(device, usual_torch):
    _, run = make_run(make_problem(*SHAPE, device, torch.bfloat16), skip_ignored=True)
    with pytest.raises(RuntimeError, match="skip_ignored must be False or the number of counted rows while a CUDA"):
        capture(run)


@torch.no_grad()
def test_replays_of_a_samplers_rows_have_the_bits_of_all_rows(device, usual_torch):
    """From 1 to 512 rows, as a sampler has them in a step; a trainer has all of them, with a gradient."""
    problem = make_problem(512, 96, 1000, device, torch.bfloat16)
    options = {"temperature": 0.8, "entropy": False, "backend": "triton"}
    weight = problem.weight.clone().requires_grad_()
    with torch.enable_grad():
        expected = megatron_lce.linear_cross_entropy(problem.hidden, weight, problem.labels, **options)
    for rows in (1, 2, 16, 77, 256, 512):
        tensors = problem.hidden[:rows], weight, problem.labels[:rows]
        graph, (replayed,) = capture(lambda x=tensors: [megatron_lce.linear_cross_entropy(*x, **options).logprobs])
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, expected.logprobs[:rows])

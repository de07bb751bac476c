"""What calls take of the workspace, of a cache and beside them; on a GPU also that the host waits for nothing."""

import pytest
import torch

from megatron_lce import linear_cross_entropy, linear_jsd
from tests.jsd_oracle import make_inputs, weighted_jsd
from tests.live_bytes import Products, peak_live_bytes
from tests.oracle import differentiable
from tests.problems import BETAS, make_problem, smallest_workspace, workspace_of

FP32, BF16 = torch.float32, torch.bfloat16
ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="live bytes are counted on a CPU")
# Statistics and row terms are a few floats a token of one head, a few dozen of two, whose statistics are merged.
OF_A_TOKEN, OF_TWO_HEADS = 128, 192


def trained(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("tokens", "hidden_size"), [(3, 24), (9, 24), (9, 21)])
def test_the_smallest_workspace_is_named_and_works(tokens, hidden_size, dtype, backend, device):
    """With and without copies of rows that are not aligned."""
    problem = make_problem(tokens, hidden_size, 600, device, dtype)
    smallest = smallest_workspace(lambda **keywords: problem.run(backend, **keywords))
    problem.check(backend, only_here={"workspace_bytes": smallest})
    with pytest.raises(ValueError, match=f"at least {smallest} for this head, got {smallest - 1}"):
        problem.run(backend, workspace_bytes=smallest - 1)


@pytest.mark.parametrize(
    ("beta", "hidden_size", "dtype"), [(0.5, 24, FP32), (0, 21, FP32), (0.5, 21, BF16), (1, 24, BF16)]
)
def test_the_smallest_workspace_of_two_heads(beta, hidden_size, dtype, backend, device):
    """In blocks of one token, and of 256 columns in backward."""
    inputs = make_inputs(3, hidden_size, 40, 300, device, dtype)
    smallest = smallest_workspace(lambda **keywords: inputs.run(backend, beta=beta, **keywords))
    for times in (1, 3):
        inputs.check(backend, beta=beta, only_here={"workspace_bytes": times * smallest})
    with pytest.raises(ValueError, match=f"at least {smallest} for these heads, got {smallest - 1}"):
        inputs.run(backend, beta=beta, workspace_bytes=smallest - 1)


@pytest.mark.parametrize("beta", [0.5, 1])
def test_logits_are_computed_once_where_the_workspace_holds_them(beta, backend, device):
    """In blocks of tokens with all their columns, however few."""
    columns = 1300  # a cut falls between chunks
    inputs = make_inputs(140, 24, 16, columns, device, BF16)
    losses = []
    for workspace_bytes in (2**29, workspace_of(90, inputs, backend), workspace_of(30, inputs, backend)):
        with Products() as products:
            losses.append(linear_jsd(*inputs[:4], beta=beta, workspace_bytes=workspace_bytes, backend=backend))
        for size in (24, 16):
            assert sum(m * n for m, k, n in products.shapes if k == size) == 140 * columns
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-6)


@ON_A_CPU
@pytest.mark.parametrize(("sizes", "teacher_dtype"), [((129, 257), FP32), ((16, 24), BF16)], ids=str)
def test_backwards_logits_of_heads_of_two_dtypes_fit(sizes, teacher_dtype, device):
    pytest.importorskip("triton")
    inputs = make_inputs(130, *sizes, 1030, device, FP32, teacher_dtype)
    hidden, weight = trained(*inputs[:2])
    loss = linear_jsd(*inputs[:4], workspace_bytes=2**19, backend="triton")
    peak, _ = peak_live_bytes(lambda: loss.backward(inputs.upstream))
    assert peak <= 2**19 + hidden.nbytes + weight.nbytes + 4 * hidden.numel() + OF_TWO_HEADS * 130


@ON_A_CPU
@pytest.mark.parametrize(("dtype", "workspace_bytes"), [(FP32, 2**19), (FP32, 2**23), (BF16, 2**19)], ids=str)
@pytest.mark.parametrize("beta", [0.5, 1])
def test_slabs_are_gone_before_the_next_ones_come(beta, dtype, workspace_bytes, backend, device):
    if dtype == BF16 and backend == "triton":
        pytest.skip("a CPU's products of 16-bit gradients copy them, for which only the torch backend has room")
    inputs = make_inputs(200, 32, 48, 2300, device, dtype)
    hidden, weight = trained(*inputs[:2])
    keywords = {"beta": beta, "workspace_bytes": workspace_bytes, "backend": backend}
    forward_peak, loss = peak_live_bytes(lambda: linear_jsd(*inputs[:4], **keywords))
    backward_peak, _ = peak_live_bytes(lambda: loss.backward(inputs.upstream))
    most = workspace_bytes + OF_TWO_HEADS * 200
    assert forward_peak <= most
    assert backward_peak <= most + hidden.nbytes + weight.nbytes + 4 * hidden.numel()


def test_known_weights_take_the_workspace_and_the_sum_of_the_weights_gradient():
    inputs = make_inputs(600, 32, 48, 2300, torch.device("cpu"))
    hidden, weight = trained(*inputs[:2])
    keywords = {"weights": inputs.upstream, "workspace_bytes": 2**23, "backend": "torch"}
    peak, _ = peak_live_bytes(lambda: weighted_jsd(*inputs[:4], **keywords))
    assert peak <= 2**23 + weight.nbytes + hidden.nbytes + OF_TWO_HEADS * 600


# What only a GPU can show.

TOKENS, COLUMNS = 4096, 50257


def step_of_cross_entropy(device, dtype, tokens=TOKENS, hidden_size=512, columns=COLUMNS, **keywords):
    """Forward and backward, apart; what they train; and what is not within the caller's bytes."""
    problem = make_problem(tokens, hidden_size, columns, device, dtype)
    inputs = trained(*problem[:2])

    def forward():
        return differentiable(linear_cross_entropy(*inputs, problem.labels, **keywords), problem.upstream)

    return forward, lambda found: torch.autograd.backward(*found), inputs, OF_A_TOKEN * tokens


def step_of_jsd(device, dtype, tokens=TOKENS, hidden_size=512, columns=COLUMNS, weighted=False, **keywords):
    problem = make_inputs(tokens, hidden_size, 3 * hidden_size // 2, columns, device, dtype)
    inputs = trained(*problem[:2])
    keywords |= {"weights": problem.upstream} if weighted else {}
    upstream = torch.ones((), device=device) if weighted else problem.upstream
    return lambda: weighted_jsd(*problem[:4], **keywords), lambda loss: loss.backward(upstream), inputs, 192 * tokens


STEPS = {f"jsd, beta {beta}": (step_of_jsd, {"beta": beta}) for beta in BETAS}
STEPS |= {f"cache of {size}": (step_of_cross_entropy, {"logits_cache_bytes": size}) for size in (0, 2**26)}
STEPS["jsd, known weights"] = step_of_jsd, {"weighted": True}


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("workspace_bytes", [2**24, 2**27, 2**28])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_memory_stays_within_what_the_caller_set(name, dtype, workspace_bytes, backend, device):
    step, keywords = STEPS[name]
    forward, backward, inputs, others = step(
        device, dtype, workspace_bytes=workspace_bytes, backend=backend, **keywords
    )
    for _ in range(2):  # cuBLAS allocates its workspace on first use
        for tensor in inputs:
            tensor.grad = None
        base = requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
        found = forward()
        forward_peak = requested_bytes("peak") - base
        torch.cuda.reset_peak_memory_stats()
        backward(found)
        backward_peak = requested_bytes("peak") - base
        del found
    cache = keywords.get("logits_cache_bytes", 0) if dtype == BF16 and backend == "triton" else 0
    gradients = sum(tensor.nbytes for tensor in inputs) + 4 * inputs[0].numel()
    if "weighted" in keywords:  # forward makes them; 16-bit ones over blocks, with an fp32 sum of the weight's
        gradients += 4 * inputs[1].numel() if dtype == BF16 else 0
        forward_peak -= gradients
    assert forward_peak <= workspace_bytes + cache + others
    assert backward_peak <= workspace_bytes + cache + gradients + others


def requested_bytes(when):
    """Without what the allocator adds: up to 1 MiB a tensor, where it gives a block whole."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


SMALL = {"tokens": 512, "hidden_size": 128, "columns": 5003}
WITHOUT_A_WAIT = [(step_of_jsd, {"beta": beta}) for beta in BETAS] + [
    (step_of_cross_entropy, options)
    for options in ({}, {"softcap": 5.0, "telemetry": True}, {"logits_cache_bytes": 2**24})
]


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize(("step", "options"), WITHOUT_A_WAIT)
def test_no_host_synchronisation(step, options, backend, device):
    temperature = torch.rand(512, device=device) + 0.5
    forward, backward, *_ = step(device, BF16, temperature=temperature, backend=backend, **SMALL, **options)
    backward(forward())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward(forward())
    finally:
        torch.cuda.set_sync_debug_mode("default")

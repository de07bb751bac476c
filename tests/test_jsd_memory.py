"""What `linear_jsd` takes of the workspace and beside it; on a GPU also that the host waits for nothing."""

import pytest
import torch

from megatron_lce import linear_jsd
from tests.jsd_problems import BETAS, BF16, FP32, Products, check, make_inputs, workspace_of
from tests.live_bytes import peak_live_bytes


@pytest.mark.parametrize(
    ("beta", "hidden_size", "dtype"), [(0.5, 24, FP32), (0, 21, FP32), (0.5, 21, BF16), (1, 24, BF16)]
)
def test_the_smallest_workspace_is_named_and_works(beta, hidden_size, dtype, backend, device):
    """In blocks of one token, and of 256 columns in backward, with and without copies of rows that are not aligned."""
    inputs = make_inputs(3, hidden_size, 40, 300, device, dtype)
    with pytest.raises(ValueError, match=r"workspace_bytes must be at least \d+ for these heads, got 1$") as error:
        linear_jsd(*inputs[:4], beta=beta, backend=backend, workspace_bytes=1)
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    check(backend, inputs, beta=beta, only_here={"workspace_bytes": smallest})
    check(backend, inputs, beta=beta, only_here={"workspace_bytes": 3 * smallest})
    with pytest.raises(ValueError, match=f"workspace_bytes must be at least {smallest} .* got {smallest - 1}"):
        linear_jsd(*inputs[:4], beta=beta, backend=backend, workspace_bytes=smallest - 1)


@pytest.mark.parametrize("beta", [0.5, 1])
def test_logits_are_computed_once_where_the_workspace_holds_them(beta, backend, device):
    """In blocks of tokens with all their columns, however few."""
    columns = 1300  # a cut falls between chunks
    inputs = make_inputs(140, 24, 16, columns, device, BF16)
    losses = []
    for workspace_bytes in (2**29, workspace_of(90, inputs, backend), workspace_of(30, inputs, backend)):
        with Products(24, 16) as products:
            losses.append(linear_jsd(*inputs[:4], beta=beta, workspace_bytes=workspace_bytes, backend=backend))
        for computed in products.shapes.values():
            assert sum(rows * width for rows, width in computed) == 140 * columns
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("sizes", "teacher_dtype"), [((129, 257), FP32), ((16, 24), BF16)], ids=str)
def test_backwards_logits_of_heads_of_two_dtypes_fit(sizes, teacher_dtype, device):
    pytest.importorskip("triton")
    if device.type != "cpu":
        pytest.skip("live bytes are counted on a CPU, under Triton's interpreter")
    inputs = make_inputs(130, *sizes, 1030, device, FP32, teacher_dtype)
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    workspace_bytes = 2**19
    loss = linear_jsd(*inputs[:4], workspace_bytes=workspace_bytes, backend="triton")
    peak, _ = peak_live_bytes(lambda: loss.backward(inputs.upstream))
    gradients = hidden.nbytes + weight.nbytes + 4 * hidden.numel()
    assert peak <= workspace_bytes + gradients + 192 * 130  # row terms: a few dozen floats a token


@pytest.mark.parametrize(("dtype", "workspace_bytes"), [(FP32, 2**19), (FP32, 2**23), (BF16, 2**19)], ids=str)
@pytest.mark.parametrize("beta", [0.5, 1])
def test_slabs_are_gone_before_the_next_ones_come(beta, dtype, workspace_bytes, backend, device):
    if device.type != "cpu":
        pytest.skip("live bytes are counted on a CPU")
    if dtype == BF16 and backend == "triton":
        pytest.skip("a CPU's products of 16-bit gradients copy them, for which only the torch backend has room")
    inputs = make_inputs(200, 32, 48, 2300, device, dtype)
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    keywords = {"beta": beta, "workspace_bytes": workspace_bytes, "backend": backend}
    per_token = 192 * 200  # statistics and row terms: a few dozen floats a token
    forward_peak, loss = peak_live_bytes(lambda: linear_jsd(*inputs[:4], **keywords))
    backward_peak, _ = peak_live_bytes(lambda: loss.backward(inputs.upstream))
    assert forward_peak <= workspace_bytes + per_token
    assert backward_peak <= workspace_bytes + hidden.nbytes + weight.nbytes + 4 * hidden.numel() + per_token


def test_known_weights_take_the_workspace_and_the_sum_of_the_weights_gradient():
    inputs = make_inputs(600, 32, 48, 2300, torch.device("cpu"))
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    keywords = {"token_weights": inputs.upstream, "workspace_bytes": 2**23, "backend": "torch"}
    peak, _ = peak_live_bytes(lambda: linear_jsd(*inputs[:4], **keywords))
    assert peak <= 2**23 + weight.nbytes + hidden.nbytes + 192 * 600


@pytest.mark.parametrize(
    ("hidden_size", "columns", "workspace_bytes", "frozen", "expected"),
    [
        (128, 640, 1_185_000, False, [384, 316]),  # without that room blocks would have 256 tokens
        (128, 640, 1_185_000, True, []),
        (256, 637, 1_150_000, False, []),  # an odd vocabulary is two products, with a sum of hidden's gradient
    ],
)
def test_blocks_have_the_room_of_the_gradient_that_is_made_of_their_sum(
    hidden_size, columns, workspace_bytes, frozen, expected, device, monkeypatch
):
    """The step takes the workspace and the sum over its gradients."""
    pytest.importorskip("triton")
    if device.type != "cpu":
        pytest.skip("live bytes are counted on a CPU, under Triton's interpreter")
    num_tokens = 700
    inputs = make_inputs(num_tokens, hidden_size, 8, columns, device, BF16)
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_(not frozen)
    summed = []

    def no_product(a, b, out, *, accumulate):
        if out.shape == weight.shape:
            summed.append(a.shape[1])

    monkeypatch.setattr("megatron_lce.jsd.product", no_product)

    def step():
        loss = linear_jsd(*inputs[:4], token_weights=inputs.upstream, workspace_bytes=workspace_bytes, backend="triton")
        return torch.autograd.grad(loss, [tensor for tensor in (hidden, weight) if tensor.requires_grad])

    peak, gradients = peak_live_bytes(step)
    assert summed == expected
    sum_bytes = 0 if frozen else 4 * weight.numel()
    assert peak <= workspace_bytes + sum_bytes + sum(g.nbytes for g in gradients) + 192 * num_tokens


# What only a GPU can show.


def requested_bytes(when):
    """Without what the allocator adds: up to 1 MiB a tensor, where it gives a block whole."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def gpu_step(inputs, **keywords):
    """Peak bytes over the resting state of forward, and of backward with the gradients it leaves."""
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    hidden.grad = weight.grad = None
    base = requested_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    loss = linear_jsd(*inputs[:4], **keywords)
    forward_peak = requested_bytes("peak") - base
    torch.cuda.reset_peak_memory_stats()
    loss.backward(inputs.upstream)
    return forward_peak, requested_bytes("peak") - base


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("workspace_bytes", [2**24, 2**27])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_memory_stays_within_what_the_caller_set(beta, dtype, workspace_bytes, backend, device):
    inputs = make_inputs(4096, 512, 768, 50257, device, dtype)
    keywords = {"beta": beta, "workspace_bytes": workspace_bytes, "backend": backend}
    gpu_step(inputs, **keywords)  # cuBLAS allocates its workspace on first use
    forward_peak, backward_peak = gpu_step(inputs, **keywords)
    per_token = 192 * 4096  # both heads' statistics and their merge, row terms: a few dozen floats a token
    hidden, weight = inputs.student_hidden, inputs.student_weight
    gradients = hidden.nbytes + weight.nbytes + 4 * hidden.numel()
    assert forward_peak <= workspace_bytes + per_token
    assert backward_peak <= workspace_bytes + gradients + per_token


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("workspace_bytes", [2**24, 2**28])
def test_memory_of_known_weights(workspace_bytes, backend, device):
    inputs = make_inputs(4096, 512, 768, 50257, device, BF16)
    hidden, weight = inputs.student_hidden.requires_grad_(), inputs.student_weight.requires_grad_()
    keywords = {"token_weights": inputs.upstream, "workspace_bytes": workspace_bytes, "backend": backend}
    for _ in range(2):  # cuBLAS allocates its workspace on first use
        hidden.grad = weight.grad = None
        base = requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
        linear_jsd(*inputs[:4], **keywords).backward()
        peak = requested_bytes("peak") - base - weight.grad.nbytes
    assert peak <= workspace_bytes + 4 * weight.numel() + (2 + 4) * hidden.numel() + 192 * 4096


@pytest.mark.gpu
@pytest.mark.usefixtures("usual_torch")
@pytest.mark.parametrize("beta", BETAS)
def test_no_host_synchronisation(beta, backend, device):
    inputs = make_inputs(512, 128, 256, 5003, device, BF16)
    gpu_step(inputs, beta=beta, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu_step(inputs, beta=beta, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")

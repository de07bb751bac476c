"""What backends read and write lies within the tensors that they are given."""

import pytest
import torch

import megatron_lce
from megatron_lce.backends.choice import load_backend
from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.plan import round_up
from tests.problems import all_equal, make_problem


@pytest.fixture
def primitives(backend, device):
    return load_backend(backend, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [slice(0, 300), slice(256, 300)], ids=str)
def test_nothing_behind_a_slab_is_written(columns, dtype, primitives, device):
    """A tensor-memory store ends at 16 bytes: rows of a slab are that much apart, and what lies behind is untouched."""
    problem = make_problem(9, 24, 300, device, dtype)
    weight, width = problem.weight[columns], columns.stop - columns.start
    rows, terms = RowInputs(problem.labels.int(), *torch.ones(2, 9, device=device)), torch.zeros(6, 9, device=device)
    buffer = torch.full((9, 512), 7.0, device=device, dtype=dtype)
    slab = buffer[:, :width]
    where = {"slab_start": columns.start, "entropy": True, "shift": None}
    primitives.grad_logits(LMHead(problem.hidden, weight), rows, terms, slab, **where)
    assert not slab.any()
    assert (buffer[:, round_up(width, 16 // dtype.itemsize) :] == 7.0).all()


@pytest.mark.parametrize("hidden_size", [8, 24])
def test_nothing_behind_hidden_and_weight_is_read(hidden_size, backend, device):
    """Both end where memory of somebody else begins."""
    problem = make_problem(3, hidden_size, 5, device, torch.bfloat16)
    problem.labels[:] = 4  # the last row of the weight

    def in_front_of_nan(matrix):
        memory = matrix.new_full((matrix.numel() + 64,), torch.nan)
        memory[: matrix.numel()] = matrix.flatten()
        return memory[: matrix.numel()].view_as(matrix)

    heads = problem[:2], map(in_front_of_nan, problem[:2])
    expected, found = (megatron_lce.linear_cross_entropy(*of, problem.labels, backend=backend) for of in heads)
    assert torch.equal(torch.stack(found[:3]), torch.stack(expected[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"telemetry": True}, {"logits_cache_bytes": 100 * 2**10}], ids=str)
def test_descriptors_made_in_the_kernel_change_no_bit(options, dtype, device, monkeypatch):
    """As on a GPU without hardware for them. Whole vectors are stored past the 300 columns, within a row's storage."""
    tiles = pytest.importorskip("megatron_lce.backends.triton.tiles")
    if device.type == "cuda" and tiles.has_tma(device):
        pytest.skip("descriptors made in the kernel want memory of an allocator there")
    problem = make_problem(150, 24, 300, device, dtype)
    plain = problem.run("triton", **options)
    monkeypatch.setattr(tiles, "has_tma", lambda device: False)
    assert all_equal(plain, problem.run("triton", **options))

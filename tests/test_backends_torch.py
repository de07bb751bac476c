"""The primitives of both backends by themselves: any cut of the vocabulary gives the same statistics."""

import pytest
import torch

from megatron_lce.backends.choice import load_backend
from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.options import Options
from megatron_lce.core.plan import round_up
from megatron_lce.core.statistics import LN_2, LOG2_E, merge_extremes, unpack_extremes
from tests.problems import all_equal, make_problem


@pytest.fixture
def primitives(backend, device):
    return load_backend(backend, device)


def stats_of(primitives, problem, columns=slice(None), **keywords):
    first = columns.start or 0
    row_scale = torch.full((problem.labels.numel(),), LOG2_E, device=problem.hidden.device)
    labels = problem.labels - first
    weight = problem.weight[columns]
    labels = torch.where((labels >= 0) & (labels < weight.shape[0]), labels, -1).int()
    rows, options = RowInputs(labels, row_scale, row_scale * LN_2), Options(telemetry=True, **keywords)
    return primitives.softmax_stats(LMHead(problem.hidden, weight), rows, options, vocab_start=first)


def merged(primitives, parts):
    extremes, sums = primitives.merge_chunks(parts, parts, 0, True, True)
    torch.testing.assert_close(extremes, merge_extremes(parts, True), rtol=0.0, atol=0.0)
    return extremes, sums


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


@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize(("hidden_size", "dtype"), [(16, torch.bfloat16), (304, torch.float16), (300, torch.float32)])
def test_the_labels_logit_has_the_bits_of_the_statistics(hidden_size, dtype, softcap, primitives, device):
    """Where the label has the largest logit, that is it."""
    problem = make_problem(70, hidden_size, 300, device, dtype)
    extremes, _ = merged(primitives, stats_of(primitives, problem, softcap=softcap, logits_scale=0.3))
    largest = unpack_extremes(extremes, True)
    problem = problem._replace(labels=largest.argmax.long())
    extremes, _ = merged(primitives, stats_of(primitives, problem, softcap=softcap, logits_scale=0.3))
    assert torch.equal(unpack_extremes(extremes, True).label_logit, largest.max_logit)


@pytest.mark.parametrize("hidden_size", [8, 24])
def test_nothing_behind_hidden_and_weight_is_read(hidden_size, primitives, device):
    """Both end where memory of somebody else begins."""
    problem = make_problem(3, hidden_size, 5, device, torch.bfloat16)
    problem.labels[:] = 4  # the last row of the weight
    expected, _ = merged(primitives, stats_of(primitives, problem))

    def in_front_of_nan(matrix):
        memory = matrix.new_full((matrix.numel() + 64,), torch.nan)
        memory[: matrix.numel()] = matrix.flatten()
        return memory[: matrix.numel()].view_as(matrix)

    problem = problem._replace(hidden=in_front_of_nan(problem.hidden), weight=in_front_of_nan(problem.weight))
    extremes, _ = merged(primitives, stats_of(primitives, problem))
    assert torch.equal(extremes, expected)


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

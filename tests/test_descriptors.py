"""On a GPU without hardware for them descriptors are made in the kernel: the same bits."""

import pytest
import torch

from tests.problems import all_equal, make_problem

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", [{"telemetry": True}, {"logits_cache_bytes": 100 * 2**10}], ids=str)
def test_descriptors_made_in_the_kernel_change_no_bit(options, dtype, device, monkeypatch):
    """300 columns are no multiple of 16 bytes: whole vectors are stored past the last of a row, within its storage."""
    tiles = pytest.importorskip("megatron_lce.backends.triton.tiles")
    if device.type == "cuda" and tiles.takes_descriptors(device):
        pytest.skip("descriptors made in the kernel want memory of an allocator there")
    problem = make_problem(150, 24, 300, device, dtype)
    plain = problem.run("triton", **options)
    monkeypatch.setattr(tiles, "takes_descriptors", lambda device: False)
    assert all_equal(plain, problem.run("triton", **options))

"""`load_head_shard`: which rows of which tensor, its memory, and its errors."""

import json
import os
import struct
import subprocess
import sys

import pytest
import torch

from megatron_lce import load_head_shard

safetensors = pytest.importorskip("safetensors.torch")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def matrix(rows, dtype=torch.bfloat16):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)).to(dtype)


def write(directory, files, config=None):
    """A checkpoint of these files, {name of the file: its tensors}; with several files, an index."""
    for name, tensors in files.items():
        safetensors.save_file(tensors, directory / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("names", "of_head"),
    [
        ([EMBEDDING, HEAD], HEAD),
        ([EMBEDDING], EMBEDDING),
        (["transformer.wte.weight"], "transformer.wte.weight"),
        (
            ["model.language_model.embed_tokens.weight", "language_model.lm_head.weight"],
            "language_model.lm_head.weight",
        ),
        ([EMBEDDING, "model.layers.61.embed_tokens.weight"], EMBEDDING),  # multi-token prediction
    ],
    ids=str,
)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_head_or_the_embedding_it_is_tied_to(names, of_head, sharded, tmp_path):
    tensors = {name: matrix(12 + i) for i, name in enumerate(names)} | {"model.norm.weight": torch.ones(6)}
    files = {f"{i}.safetensors": {name: tensors[name]} for i, name in enumerate(tensors)}
    write(tmp_path, files if sharded else {"model.safetensors": tensors})
    assert torch.equal(load_head_shard(tmp_path, rank=0, ranks=1), tensors[of_head])
    if not sharded:
        assert torch.equal(load_head_shard(str(tmp_path / "model.safetensors"), rank=0, ranks=1), tensors[of_head])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [None, 12, 15, 24, 9])
def test_ranks_get_consecutive_rows_and_zeros_behind_the_last(padded, dtype, tmp_path):
    whole, filled = matrix(12, dtype), torch.zeros(padded or 12, 6, dtype=dtype)
    write(tmp_path, {"model.safetensors": {HEAD: whole}})
    shards = [load_head_shard(tmp_path, rank=rank, ranks=3, padded_vocab_size=padded) for rank in range(3)]
    filled[:12] = whole[: padded or 12]
    assert [len(shard) for shard in shards] == [len(filled) // 3] * 3
    assert torch.equal(torch.cat(shards), filled)
    assert {shard.dtype for shard in shards} == {dtype}


def test_memory_is_that_of_the_shard(tmp_path):
    """The peak of a process that reads a sixteenth of 512 MiB."""
    rows, hidden_size, path = 2**16, 2048, tmp_path / "model.safetensors"
    size = rows * hidden_size * 4
    header = json.dumps({HEAD: {"dtype": "F32", "shape": [rows, hidden_size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:  # sparse: zeros that take no room on the disk
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    program = f"""
import megatron_lce, safetensors.torch
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
megatron_lce.load_head_shard({str(path)!r}, rank=0, ranks=2**16)  # what the first call imports
before = peak()
shard = megatron_lce.load_head_shard({str(path)!r}, rank=7, ranks=16)
print(shard.numel() * 4 // 1024, peak() - before)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    of_shard, grown = map(int, done.stdout.split())  # KiB
    assert of_shard == 32 * 1024
    assert of_shard / 2 < grown < 3 * of_shard


ONE = {"model.safetensors": {HEAD: matrix(12)}}
TWO = {"model.safetensors": {"a.lm_head.weight": matrix(12), "b.lm_head.weight": matrix(12)}}
TIED = {"model.safetensors": {EMBEDDING: matrix(12)}}


@pytest.mark.parametrize(
    ("files", "config", "arguments", "error", "message"),
    [
        (ONE, None, {"rank": 2}, ValueError, "rank must be less than ranks, 2, got 2"),
        (ONE, None, {"rank": True}, TypeError, "rank must be an int, got bool"),
        (ONE, None, {"ranks": 0}, ValueError, "ranks must be at least 1, got 0"),
        (ONE, None, {"ranks": 5}, ValueError, "padded_vocab_size must be a multiple of ranks, 5, got None: the check"),
        (ONE, None, {"padded_vocab_size": 13}, ValueError, "padded_vocab_size must be a multiple of ranks, 2, got 13"),
        (TWO, None, {}, ValueError, "checkpoint must have one LM head, got a.lm_head.weight, b.lm_head.weight in"),
        (TIED, {"tie_word_embeddings": False}, {}, ValueError, "checkpoint must have lm_head.weight, or the embed"),
        ({}, None, {}, FileNotFoundError, "checkpoint must be or hold .safetensors files, got"),
        ({"a.safetensors": {HEAD: matrix(12, torch.float64)}}, None, {}, TypeError, "lm_head.weight must be float32, "),
        ({"a.safetensors": {HEAD: torch.ones(12)}}, None, {}, ValueError, "lm_head.weight must be [V, H], got (12,)"),
    ],
    ids=str,
)
def test_errors(files, config, arguments, error, message, tmp_path):
    with pytest.raises(error) as raised:
        load_head_shard(write(tmp_path, files, config), **{"rank": 0, "ranks": 2} | arguments)
    assert str(raised.value).startswith(message)


def test_without_safetensors_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'megatron-lce\[checkpoints\]'"):
        load_head_shard(tmp_path, rank=0, ranks=1)

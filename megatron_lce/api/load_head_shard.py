"""`load_head_shard`: one rank's rows of the LM head in a Hugging Face checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lce.checks.validation import DTYPES, check_integer, require

_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight")


def load_head_shard(
    checkpoint: str | Path,
    *,
    rank: int,
    ranks: int,
    padded_vocab_size: int | None = None,
) -> Tensor:
    """Read one rank's rows of the LM head of a Hugging Face checkpoint, without the rest of the head.

        weight = megatron_lce.load_head_shard("Qwen3-8B", rank=tp_rank, ranks=tp_size, padded_vocab_size=152_064)

    The head is `lm_head.weight` or, in a checkpoint without one, the input embedding that it is tied to. Names may have
    a prefix, as in multimodal models.

    Args:
        checkpoint: a .safetensors file, or a directory with one or several of them.
        rank, ranks: position and size of the tensor-parallel group; each rank gets as many rows.
        padded_vocab_size: rows of the vocabulary over all ranks, a multiple of `ranks`; `None`: those of the
            checkpoint. Rows past the checkpoint's are zero. If it has more, which must be its own padding, they are
            left out. Pass the tokenizer's size as `vocab_size` to the operation that uses the shard.

    Returns:
        [V_local, H] in the checkpoint's dtype, on the CPU.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the checkpoint does not exist, or holds no safetensors files.
        TypeError, ValueError: an argument is not as described; no head, several, or one of another dtype.
    """
    check_integer("ranks", ranks, minimum=1)
    check_integer("rank", rank, minimum=0)
    require(rank < ranks, "rank", f"be less than ranks, {ranks}", rank)
    if padded_vocab_size is not None:
        check_integer("padded_vocab_size", padded_vocab_size, minimum=1)
    try:
        from safetensors import safe_open
    except ImportError as error:
        message = "load_head_shard needs safetensors: pip install 'megatron-lce[checkpoints]'"
        raise ImportError(message) from error
    path = Path(checkpoint)
    files = _files_of_tensors(path, safe_open)
    name = _name_of_head(path, files)
    with safe_open(files[name], framework="pt") as file:
        matrix = file.get_slice(name)
        shape = tuple(matrix.get_shape())
        require(len(shape) == 2, name, "be [V, H]", shape)
        rows, hidden_size = shape
        padded_rows = rows if padded_vocab_size is None else padded_vocab_size
        got = f"{padded_vocab_size}: the checkpoint has {rows} rows"
        require(padded_rows % ranks == 0, "padded_vocab_size", f"be a multiple of ranks, {ranks}", got)
        start = rank * (padded_rows // ranks)
        local_rows = matrix[min(start, rows) : min(start + padded_rows // ranks, rows)]
        require(local_rows.dtype in DTYPES, name, "be float32, bfloat16 or float16", local_rows.dtype, TypeError)
        shard = torch.empty(padded_rows // ranks, hidden_size, dtype=local_rows.dtype, device="cpu")
        shard[: len(local_rows)] = local_rows
        shard[len(local_rows) :] = 0
    return shard


def _files_of_tensors(path: Path, safe_open: Any) -> Mapping[str, Path]:
    """Return the file of each tensor of a checkpoint."""
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return {name: path / file for name, file in index["weight_map"].items()}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"checkpoint must be or hold .safetensors files, got {path}")
    files_by_name: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            files_by_name |= dict.fromkeys(opened.keys(), file)
    return files_by_name


def _name_of_head(path: Path, names: Mapping[str, Path]) -> str:
    """Return the name of the head's weight, or of the embedding that it is tied to."""
    for endings in ((_HEAD,), _EMBEDDINGS):
        matches = sorted(name for name in names if any(f".{name}".endswith(f".{ending}") for ending in endings))
        if len(matches) > 1:  # multi-token prediction may hold a copy
            matches = [name for name in matches if ".layers." not in name] or matches
        if len(matches) > 1:
            raise ValueError(f"checkpoint must have one LM head, got {', '.join(matches)} in {path}")
        if matches and endings != (_HEAD,) and _says_untied(path):
            break
        if matches:
            return matches[0]
    requirement = f"have {_HEAD}, or the embedding that it is tied to"
    raise ValueError(f"checkpoint must {requirement}, got {len(names)} other tensors in {path}")


def _says_untied(path: Path) -> bool:
    """Whether the checkpoint's configuration says that the head is not the embedding."""
    file = path / "config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("tie_word_embeddings") is False

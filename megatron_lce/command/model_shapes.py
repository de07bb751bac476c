"""Heads of public models, for `megatron-lce estimate --model`.

Each row is from the `config.json` of that name on the Hugging Face hub (`hidden_size`, `vocab_size`,
`tie_word_embeddings`; Gemma 3: those under `text_config`), read in 2025. Training frameworks may pad the vocabulary.
"""

import difflib
import json
from pathlib import Path
from typing import NamedTuple


class ModelShape(NamedTuple):
    hidden: int
    vocab: int
    tied: bool


MODEL_SHAPES = {
    "Qwen/Qwen3-0.6B": ModelShape(1024, 151936, tied=True),
    "Qwen/Qwen3-4B": ModelShape(2560, 151936, tied=True),
    "Qwen/Qwen3-8B": ModelShape(4096, 151936, tied=False),
    "Qwen/Qwen3-32B": ModelShape(5120, 151936, tied=False),
    "Qwen/Qwen3-30B-A3B": ModelShape(2048, 151936, tied=False),
    "Qwen/Qwen2.5-7B": ModelShape(3584, 152064, tied=False),
    "meta-llama/Llama-3.2-1B": ModelShape(2048, 128256, tied=True),
    "meta-llama/Llama-3.1-8B": ModelShape(4096, 128256, tied=False),
    "meta-llama/Llama-3.1-70B": ModelShape(8192, 128256, tied=False),
    "google/gemma-2-9b": ModelShape(3584, 256000, tied=True),
    "google/gemma-3-27b-pt": ModelShape(5376, 262208, tied=True),
    "openai/gpt-oss-20b": ModelShape(2880, 201088, tied=False),
    "deepseek-ai/DeepSeek-V3": ModelShape(7168, 129280, tied=False),
}


def find_model(name: str) -> tuple[str, ModelShape]:
    """Return the full name and shape of a model, given with or without its owner, in upper or lower case."""
    names = {known.split("/")[1].lower(): known for known in MODEL_SHAPES}
    short = name.lower().split("/")[-1]
    if short in names and name.lower() in (short, names[short].lower()):
        return names[short], MODEL_SHAPES[names[short]]
    similar = difflib.get_close_matches(short, names, n=1)
    hint = f"did you mean {names[similar[0]].split('/')[1]}?" if similar else "use --hidden and --vocab"
    raise ValueError(f"unknown model {name!r}; {hint}")


def read_config(path: Path) -> tuple[str, ModelShape]:
    """Return a model's name and shape from its `config.json`; for a VLM, of its `text_config`."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
    config = whole.get("text_config", whole) if isinstance(whole, dict) else {}
    hidden, vocab = config.get("hidden_size"), config.get("vocab_size")
    if not (isinstance(hidden, int) and isinstance(vocab, int) and hidden > 0 and vocab > 0):
        raise ValueError(f"{path} must hold hidden_size and vocab_size, got {hidden} and {vocab}")
    tied = bool(config.get("tie_word_embeddings", whole.get("tie_word_embeddings")))
    return whole.get("_name_or_path") or path.parent.name or path.name, ModelShape(hidden, vocab, tied)

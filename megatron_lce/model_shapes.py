"""Heads of public models, for `megatron-lce estimate --model`.

Source of every row: `config.json` of that name on the Hugging Face hub (`hidden_size`, `vocab_size`,
`tie_word_embeddings`; of Gemma 3 those under `text_config`), read in 2025. A training
framework may pad the vocabulary further.
"""

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
    """The row whose name, with or without its owner, is this one; upper and lower case are the same.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for full_name, shape in MODEL_SHAPES.items():
        if name.lower() in (full_name.lower(), full_name.split("/")[1].lower()):
            return full_name, shape
    raise ValueError(f"model must be one of {', '.join(MODEL_SHAPES)}, got {name!r}")

"""Supervised fine-tuning data found on any machine: functions of the running Python's standard library.

The prompt is a function's signature and docstring, the completion its body. Several pairs are packed into a row of
tokens, each attending to itself alone; only completion tokens count in the loss.
"""

import ast
import json
import platform
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS = "<pad>", "<eos>"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def stdlib_sources() -> list[str]:
    """The standard library's source files, without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def function_pairs(source: str) -> list[tuple[str, str]]:
    """(prompt, completion) of every function with a docstring and a body below it; [] where `source` does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    lines = source.splitlines(keepends=True)
    pairs = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        start, middle, end = node.lineno - 1, node.body[0].end_lineno, node.end_lineno
        if node.body[1].lineno > middle:
            text = textwrap.dedent("".join(lines[start:end])).splitlines(keepends=True)
            pairs.append(("".join(text[: middle - start]), "".join(text[middle - start :])))
    return pairs


def train_tokenizer(sources: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `sources`; the same sources give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources, trainer)
    return tokenizer


@dataclass
class Example:
    token_ids: list[int]  # prompt, completion, end of text
    prompt_length: int


def prepare(folder: Path, vocab_size: int) -> Path:
    """Writes tokenizer and tokenised pairs under `folder`, unless an earlier run did; returns the pairs' file."""
    name = f"stdlib-{platform.python_version()}-{vocab_size}"
    examples_path = folder / f"{name}-examples.json"
    if examples_path.exists():
        return examples_path
    folder.mkdir(parents=True, exist_ok=True)
    sources = stdlib_sources()
    tokenizer = train_tokenizer(sources, vocab_size)
    tokenizer.save(str(folder / f"{name}-tokenizer.json"))
    pairs = [pair for source in sources for pair in function_pairs(source)]
    prompts = tokenizer.encode_batch_fast([prompt for prompt, _ in pairs])
    completions = tokenizer.encode_batch_fast([completion for _, completion in pairs])
    eos = tokenizer.token_to_id(EOS)
    rows = [(len(p.ids), [*p.ids, *c.ids, eos]) for p, c in zip(prompts, completions, strict=True)]
    # Another program may be reading: the file appears whole or not at all.
    partial = examples_path.with_suffix(".partial")
    partial.write_text(json.dumps({"pad_id": tokenizer.token_to_id(PAD), "examples": rows}))
    partial.rename(examples_path)
    return examples_path


def load_examples(path: Path, seed: int, row_length: int) -> tuple[list[Example], int]:
    """The shuffled examples of a file that `prepare` wrote, and the padding token.

    Without those of which a row would hold the prompt alone.
    """
    stored = json.loads(path.read_text())
    examples = [Example(token_ids, length) for length, token_ids in stored["examples"] if length <= row_length]
    if not examples:
        shortest = min(length for length, _ in stored["examples"])
        raise ValueError(f"--row-length must be at least {shortest}, the shortest prompt, got {row_length}")
    random.Random(seed).shuffle(examples)
    return examples, stored["pad_id"]


@dataclass
class PackedBatch:
    """One packed row of T tokens; every tensor is [1, T] but cu_seqlens."""

    tokens: torch.Tensor  # int64
    labels: torch.Tensor  # int64, the next token of the same example
    loss_mask: torch.Tensor  # float32, 1 where the label belongs to a completion
    position_ids: torch.Tensor  # int64, from 0 in each example
    cu_seqlens: torch.Tensor  # [examples + 1] int32

    def to(self, device: torch.device) -> "PackedBatch":
        return PackedBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def packed_seq_params(self) -> PackedSeqParams:
        longest = int(self.cu_seqlens.diff().max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def pack(examples: list[Example], pad_id: int, row_length: int) -> PackedBatch:
    """Lays examples one after another, each shifted within itself, and fills the row with masked padding."""
    tokens, labels, mask, positions, lengths = [], [], [], [], []
    for example in examples:
        length = len(example.token_ids) - 1
        tokens += example.token_ids[:-1]
        labels += example.token_ids[1:]
        mask += [float(index + 1 >= example.prompt_length) for index in range(length)]
        positions += range(length)
        lengths.append(length)
    padding = row_length - len(tokens)
    if padding:
        lengths.append(padding)
    return PackedBatch(
        tokens=torch.tensor([tokens + [pad_id] * padding]),
        labels=torch.tensor([labels + [pad_id] * padding]),
        loss_mask=torch.tensor([mask + [0.0] * padding]),
        position_ids=torch.tensor([[*positions, *range(padding)]]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    )


def packed_batches(examples: list[Example], pad_id: int, row_length: int) -> Iterator[PackedBatch]:
    """Endless packed rows; an example longer than a row is cut, one that no longer fits opens the next row."""
    row: list[Example] = []
    used = 0
    while True:
        for example in examples:
            example = Example(example.token_ids[: row_length + 1], example.prompt_length)
            if used + len(example.token_ids) - 1 > row_length:
                yield pack(row, pad_id, row_length)
                row, used = [], 0
            row.append(example)
            used += len(example.token_ids) - 1

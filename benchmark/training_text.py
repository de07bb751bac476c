"""Text of the installed Python as tokens, for `benchmark.run training`: `python -m benchmark.training_text tokens.bin`.

Sources and documentation of the standard library and of all installed packages, each text once, in the order of their
digests. A byte-level BPE tokenizer is trained on all of it. The file is a line of JSON that says what is in it, and
behind it the tokens as int32, compressed, so that it can be carried to a machine without these packages.
"""

import argparse
import hashlib
import json
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from scripts.arguments import HelpFormatter

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
SMALLEST, LARGEST = 500, 200_000  # bytes of a file: no empty __init__.py, and no generated tables
AT_ONCE = 256  # documents that are tokenised together


def documents(folders: Sequence[Path]) -> list[str]:
    """The texts below `folders`, in an order that says nothing about their content."""
    found = {}
    for path in (path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES):
        if path.is_file() and SMALLEST <= path.stat().st_size <= LARGEST:
            content = path.read_bytes()
            found[hashlib.sha256(content).digest()] = content
    return [content.decode(errors="ignore") for _, content in sorted(found.items())]


def prepare(path: Path, folders: Sequence[Path], vocab: int, tokens: int) -> dict:
    """Writes the first `tokens` tokens of the documents, each followed by an end of text, and returns the header."""
    from scripts.sft_data import EOS, train_tokenizer  # of an extra

    texts = documents(folders)
    tokenizer = train_tokenizer(texts, vocab)
    end, used, ids = tokenizer.token_to_id(EOS), 0, torch.empty(0, dtype=torch.int32)
    while len(ids) < tokens and used < len(texts):
        encoded = tokenizer.encode_batch_fast(texts[used : used + AT_ONCE])
        ids = torch.cat([ids, *(torch.tensor([*text.ids, end], dtype=torch.int32) for text in encoded)])
        used += len(encoded)
    header = {
        "tokens": min(tokens, len(ids)),
        "vocab": tokenizer.get_vocab_size(),
        "documents": used,
        "bytes_per_token": round(sum(len(text.encode()) for text in texts[:used]) / len(ids), 3),
        "tokenizer": f"byte-level BPE of {len(texts):,} files, {sum(map(len, texts)):,} characters",
    }
    content = zlib.compress(ids[:tokens].numpy().tobytes(), 9)
    path.write_bytes(json.dumps(header).encode() + b"\n" + content)
    return header


def load(path: Path) -> tuple[dict, Tensor]:
    """What `prepare` wrote: the header, and the tokens as int64."""
    header, _, content = path.read_bytes().partition(b"\n")
    return json.loads(header), torch.frombuffer(bytearray(zlib.decompress(content)), dtype=torch.int32).long()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.training_text", description=__doc__.splitlines()[0], formatter_class=HelpFormatter
    )
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    parser.add_argument("path", type=Path, help="File to write.")
    parser.add_argument("--folders", nargs="+", type=Path, default=folders, help="Where the texts are.")
    parser.add_argument("--vocab", type=int, default=131072, help="Entries of the tokenizer.")
    parser.add_argument("--tokens", type=int, default=12_000_000, help="Tokens to write at most.")
    return parser


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    print(json.dumps(prepare(arguments.path, arguments.folders, arguments.vocab, arguments.tokens)))

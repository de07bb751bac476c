"""The cases of `run_parity.py`: what may go wrong over several ranks, one line each."""

import dataclasses

import torch

from megatron_lce.core.divergence_types import KINDS
from tests.cases import BF16, FP32, SEQUENCE, Case, Whole, case, uneven

WIDE = (SEQUENCE, 3)
BETWEEN = 0.3
TOKEN_LOSS, JSD, IDS = "linear_token_loss", "linear_jsd", "linear_logits_at"


def sizes(columns: int):
    return lambda ranks: [columns] * ranks


def of_128(ranks: int) -> list[int]:
    """Shards that are cut where the bits of the whole stay the same."""
    return [128 * (1 + rank % 2) for rank in range(ranks - 1)] + [77]


def nearly_all_of_20(ranks: int) -> int:
    """A vocabulary without a column of the last shard."""
    return max(20 * (ranks - 1) - 3, 5)


def first_columns(whole: Whole) -> None:
    """Every label is the first column of a shard: the next rank's labels lie just past this one's last tile."""
    starts = torch.tensor(whole.case.starts, device=whole.labels.device)
    whole.labels.copy_(starts.repeat(whole.labels.numel())[: whole.labels.numel()].view_as(whole.labels))


def no_upstream_for_some(whole: Whole) -> None:
    for grad in whole.upstream:
        if grad is not None:
            grad[::2] = 0.0


def tied_maxima(whole: Whole) -> None:
    """Two shards' first rows are equal and the largest by far."""
    hidden, weight = whole.heads[0]
    weight[whole.case.starts] = 3.0
    hidden.abs_()


def nan_in_one_teacher_column(whole: Whole) -> None:
    """Only one rank computes with it; every rank's rows must be NaN."""
    whole.heads[1][1][1, 0] = torch.nan


def nan_in_one_teacher_row(whole: Whole) -> None:
    whole.heads[1][0][1, 0, 0] = torch.nan


SP = {"sequence_parallel": True}
PER_TOKEN, UNUSABLE = {"temperature": "per token"}, {"temperature": "per token, some unusable"}
TELEMETRY, SOME = {"telemetry": True}, {"ignored": 0.3}
TILE = {"shape": (40,), "shards": lambda n: [600 - 400 * (rank == 1) for rank in range(n)], "workspace_bytes": 200_000}
PADDED = {"shards": uneven, "vocab_size": lambda ranks: 13 * ranks - 2}
KEPT, SKIPPED, COUNTED = {"logits_cache_bytes": 2**20}, {"skip_ignored": True}, {"skip_ignored": "count"}
# Room for parts of 144 tokens' logits; the kernels, which the interpreter runs, get parts of a few columns' more.
PARTS = {"workspace_bytes": {"torch": 2**17, "triton": 2**18}}
ROUNDED = {"logits_dtype": BF16, "temperature": 0.7}
ASKED = {"bits": True, "telemetry": True, "candidates": 5}
CASES = [
    case("even shards"),
    case("one dimension of tokens", shape=(7,)),
    case("uneven shards", shape=WIDE, shards=uneven, **SOME, **TELEMETRY),
    case("labels in the next rank's first column", shards=uneven, change=first_columns),
    case("labels in the next rank's first column, whole tiles", shards=sizes(256), change=first_columns),
    case("padded columns", vocab_size=lambda ranks: 20 * ranks - 3),
    case("a shard that is all padding", vocab_size=nearly_all_of_20, **TELEMETRY),
    case("all padding, default bf16", vocab_size=5, default_dtype=BF16, **TELEMETRY),
    case("all padding, default fp64", vocab_size=5, dtype=BF16, default_dtype=torch.float64),
    case("a shard that is all padding, sequence parallel", vocab_size=5, **SP),
    case("all logits near -10000", offset=-1e4),
    case("all rows ignored", ignored=1.0),
    case("sequence parallel, b=3", shape=WIDE, **SP, **SOME, **TELEMETRY),
    case("sequence parallel, uneven", shards=uneven, **SP),
    case("temperature per token", shape=WIDE, **PER_TOKEN, **TELEMETRY),
    case("temperature per token, sequence parallel", **PER_TOKEN, **SP),
    case("unusable temperatures", **UNUSABLE),
    case("softcap, logits_scale, temperature", softcap=3.0, logits_scale=0.7, temperature=1.6, telemetry=True),
    case("without entropy", entropy=False),
    case("telemetry, tied maxima across ranks", change=tied_maxima, **TELEMETRY),
    case("unowned labels", unowned=True),
    case("unowned labels, sequence parallel, padding", unowned=True, vocab_size=lambda n: 5 * n, **SP),
    case("no tokens", shape=(0, 3)),
    case("no tokens, sequence parallel", shape=(0, 3), **SP),
    case("one token, H=1, V_local=1", shape=(1,), hidden_size=1, shards=sizes(1)),
    case("blocks of tokens", shape=(144,), shards=sizes(300), **PARTS),
    case("blocks of tokens, bf16", shape=(144,), shards=sizes(600), workspace_bytes=2**16, dtype=BF16),
    case("bf16, sequence parallel", shape=WIDE, dtype=BF16, **SP),
    case("bf16, uneven, b=3", shape=WIDE, dtype=BF16, shards=uneven),
    case("fp16", dtype=torch.float16),
    case("sequence parallel, cached", dtype=BF16, **SP, **KEPT),
    case("everything cached", shards=uneven, dtype=BF16, **KEPT, **TELEMETRY),
    case("skipped", shards=uneven, **SKIPPED, **SOME),
    case("skipped, sequence parallel", shape=WIDE, **SKIPPED, **SP, **SOME),
    case("counted, sequence parallel", dtype=BF16, **COUNTED, **SP, **SOME),
    case("skipped, cached", dtype=BF16, **SKIPPED, **KEPT, **SOME),
    case("skipped, cached, a tile at first", **TILE, dtype=BF16, **SKIPPED, **KEPT, **SOME),
    # Has no cache, and no slab to begin with.
    case("skipped, cached, all padding", vocab_size=5, dtype=BF16, **SKIPPED, **KEPT, **SP, **SOME),
    case("skipped, all", ignored=1.0, **SKIPPED, **SP),
    case("skipped, no upstream", change=no_upstream_for_some, **SKIPPED, **TELEMETRY),
    case("blocks of tokens outside", shape=(144,), **PARTS, wide_block=16, shards=uneven),
    case("blocks of shards", shape=(144,), workspace_bytes=2**16, wide_block=16, dtype=BF16, **SP),
    case("fp32 weight, bf16 hidden", shards=uneven, dtype=BF16, fp32_weight=True, **TELEMETRY),
    case("fp32 weight, sequence parallel", shape=(144,), dtype=BF16, fp32_weight=True, **PARTS, **SP),
    case("rounded", shards=uneven, **ROUNDED),
    case("rounded, cached", shards=sizes(300), dtype=BF16, logits_cache_bytes=12 * 300 * 2, **SP, **ROUNDED),
    case("reduce_grad_hidden=False", reduce_grad_hidden=False),
    case("candidates", candidates=6, **PER_TOKEN, **SKIPPED),
    case("candidates, uneven", shape=(12, 2), **PADDED, candidates=6, **PER_TOKEN),
    case("candidates, all padding", vocab_size=5, candidates=6, **PER_TOKEN, **SKIPPED, **SP),
    case("pending tensors", pending=True, candidates=6, **PER_TOKEN),
    case("candidates, bf16", shape=WIDE, dtype=BF16, softcap=4.0, candidates=6, **PER_TOKEN, **SKIPPED, **SP),
]
# Outputs are those of one rank to the last bit, and logprobs those without gradients.
BITS = [
    case("bits, fp32", shards=of_128, **ASKED),
    case("bits, bf16", shards=of_128, dtype=BF16, **ASKED),
    case("bits, the mean alone", shards=of_128, dtype=BF16, bits=True, telemetry="mean_logit"),
    case("bits, rounded", shards=of_128, dtype=BF16, logits_dtype=BF16, **ASKED),
    case("bits, fp32 weight", shards=of_128, dtype=BF16, fp32_weight=True, **ASKED),
]
# In blocks: on triton of 128 tokens' logits, which fp32 does not keep.
FEW = {"workspace_bytes": {"torch": 120_000, "triton": 30_000}}
OF_TOKEN_LOSS = [
    case("skipped", shape=(144,), shards=uneven, **PARTS, **SKIPPED),
    case("sequence parallel", shape=(72, 2), dtype=BF16, shards=uneven, **SP, **FEW),
    case("sequence parallel, skipped", shape=(72, 2), dtype=BF16, shards=uneven, **SP, **SKIPPED, **FEW),
    case("pending tensors", pending=True, shape=(40,), **PER_TOKEN),
    case("a shard of padding", shape=(36,), vocab_size=5, workspace_bytes=120_000, **SP),
]
OF_TOKEN_LOSS = [
    dataclasses.replace(c, operation=TOKEN_LOSS, ignored=0.3, keywords=c.keywords | TELEMETRY) for c in OF_TOKEN_LOSS
]
OF_IDS = [
    case("even shards"),
    case("uneven, padded", shape=(3, 2), **PADDED, workspace_bytes=1),
    case("a shard that is all padding, sequence parallel", vocab_size=5, **SP),
    case("pending tensors", pending=True, tail=2),
    case("bf16, sequence parallel", dtype=BF16, softcap=4.0, workspace_bytes=1, **SP),
]
OF_IDS = [dataclasses.replace(c, operation=IDS, keywords=c.keywords | PER_TOKEN | {"candidates": 7}) for c in OF_IDS]


def jsd(name: str, *betas: float, **words) -> list[Case]:
    """Between the ends of beta and at them ranks exchange other numbers, at either end the same ones."""
    words = {"operation": JSD, "shape": (SEQUENCE, 2), "logit_std": 2.0} | words
    return [case(f"jsd, beta {beta}: {name}", beta=beta, **words) for beta in betas]


STUDENT, KNOWN = {"return_student": True, "teacher_temperature": 1.5}, {"weighted": True}
BLOCKS = {"shape": (192,), "shards": sizes(60), "dtype": BF16, "workspace_bytes": 2**18 + 2**17}
FORMS = {"student_logits_scale": 0.7, "student_softcap": 3.0, "teacher_logits_scale": -1.5, "teacher_softcap": 5.0}
FORMS |= {"temperature": 1.6, "teacher_temperature": 0.8}
OF_JSD = [
    *jsd("even shards", 0, BETWEEN, 1),
    *jsd("uneven shards, temperature per token", BETWEEN, 1, shards=uneven, **PER_TOKEN),
    *jsd("the student's outputs, uneven shards, temperature per token", 0.5, shards=uneven, **PER_TOKEN, **STUDENT),
    *jsd("shards wider than a kernel's tile", 0, BETWEEN, shards=sizes(300)),
    *jsd("padded columns, some rows ignored", BETWEEN, 1, vocab_size=lambda ranks: 20 * ranks - 3, **SOME),
    *jsd("a shard that is all padding", BETWEEN, 1, vocab_size=nearly_all_of_20),
    *jsd("the student's outputs, a shard that is all padding", 0.5, vocab_size=nearly_all_of_20, **STUDENT),
    *jsd("all padding, sequence parallel", 0, BETWEEN, vocab_size=5, **SP),
    *jsd("all rows ignored", BETWEEN, ignored=1.0),
    *jsd("NaN rows", BETWEEN, 1, **UNUSABLE, **SOME),
    *jsd("NaN in one shard of the teacher's weight", 0, BETWEEN, change=nan_in_one_teacher_column),
    *jsd("NaN in the teacher's hidden", BETWEEN, 1, change=nan_in_one_teacher_row, **SP),
    *jsd("sequence parallel, uneven, ignored", BETWEEN, 1, shards=uneven, **SP, **SOME),
    *jsd("sequence parallel, NaN rows", BETWEEN, **SP, **UNUSABLE),
    *jsd("skipped, uneven", 0, BETWEEN, shards=uneven, **SOME, **SKIPPED),
    *jsd("the student's outputs, skipped, uneven", 0.5, shards=uneven, **SOME, **SKIPPED, **STUDENT),
    *jsd("skipped, sequence parallel, counted", BETWEEN, 1, **SP, **SOME, **COUNTED),
    *jsd("skipped, all ignored, all padding", BETWEEN, vocab_size=5, ignored=1.0, **SKIPPED),
    *jsd("known weights, uneven", 0, shards=uneven, **SOME, **KNOWN),
    *jsd("known weights, NaN in one shard of the teacher's", 0, change=nan_in_one_teacher_column, **KNOWN),
    *jsd("known weights, skipped, padding", 0, 1, vocab_size=5, **SOME, **SKIPPED, **KNOWN),
    *jsd("the student's, known weights, skipped", 0.5, vocab_size=5, **SOME, **SKIPPED, **KNOWN, **STUDENT),
    *jsd("known weights, SP, blocks, the student's outputs", 0, BETWEEN, **BLOCKS, **SP, **KNOWN, **STUDENT),
    *jsd("known weights, skipped", BETWEEN, workspace_bytes=2**14, **SP, **SOME, **COUNTED, **KNOWN),
    *jsd("known weights, all ignored", BETWEEN, ignored=1.0, **SP, **SKIPPED, **KNOWN),
    *jsd("all kinds, uneven", BETWEEN, 1, shards=uneven, kinds=KINDS, **SOME, **PER_TOKEN),
    *jsd("all kinds, padding, sequence parallel", BETWEEN, vocab_size=5, kinds=KINDS, **SP, **SKIPPED),
    *jsd("all kinds, known weights, SP, blocks", BETWEEN, kinds=KINDS, **BLOCKS, **SP, **KNOWN, **STUDENT),
    *jsd("tv, NaN in one shard of the teacher's weight", BETWEEN, kinds=("tv",), change=nan_in_one_teacher_column),
    *jsd("pending tensors", BETWEEN, pending=True, **PER_TOKEN, **KNOWN),
    *jsd("pending tensors of each token", BETWEEN, pending=True, kinds=("forward_kl", "tv"), **PER_TOKEN, **SOME),
    *jsd("no tokens", BETWEEN, shape=(0, 3)),
    *jsd("no tokens, sequence parallel", 0, BETWEEN, shape=(0, 3), **SP),
    *jsd("blocks of tokens", BETWEEN, shape=(144,), shards=sizes(130), workspace_bytes=2**16),
    *jsd("bf16, sequence parallel", 0, BETWEEN, dtype=BF16, **SP),
    *jsd("bf16, blocks", 1, shape=(144,), shards=sizes(600), dtype=BF16, workspace_bytes=2**18),
    *jsd("fp32 student, bf16 teacher, scale and softcap", BETWEEN, 1, dtype=FP32, teacher_dtype=BF16, **FORMS),
]

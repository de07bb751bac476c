"""Matmuls and peak memory of one step of the head on one rank, by formula, for `megatron-lce estimate`.

Peaks include both gradients, but not hidden, weight and Megatron's `main_grad`. `tests/test_estimate.py` compares them
with measured peaks. Needs no torch.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatron_lce.core.call_plan import plan_call
from megatron_lce.core.plan import HeadSize, ScratchBytes, fp32_scratch_bytes

WORKSPACE_BYTES = 2**29  # the default of `workspace_bytes`, in a module that imports torch
CHUNK_COLUMNS = 128
UNFUSED, FUSED = "Megatron", "Megatron, fused cross-entropy"
TE = "Megatron, TransformerEngine's cross-entropy"
OURS, NOTHING_KEPT = "megatron-lce", "megatron-lce, logits_cache_bytes=0"
LITTLE_MIB = 1024  # a smaller saving matters little in a whole model
PER_TOKEN_BYTES = 64  # outputs and what backward needs of a row


@dataclass(frozen=True)
class HeadStep:
    """Forward and backward of one microbatch's head on one rank. The callers check the sizes."""

    tokens: int  # N, of the whole sequence: under sequence parallel each rank holds tokens / tp of hidden
    hidden_size: int  # H, a multiple of `ALIGNED_COLUMNS`
    columns: int  # this rank's rows of the weight, V / tp
    tp: int = 1
    sequence_parallel: bool = False
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # of hidden and weight
    main_grad: bool = False  # the weight gradient is added to Megatron's fp32 buffer (`gradient_accumulation_fusion`)
    entropy: bool = True
    ignored: float = 0.0  # share of the tokens whose label is `ignore_index`
    skip_ignored: bool = False  # ignored rows are left out, by their number
    workspace_bytes: int = WORKSPACE_BYTES

    def __str__(self) -> str:
        parallel = f"one rank of TP={self.tp}{' with sequence parallel' if self.gathers else ''}, "
        return f"{parallel * (self.tp > 1)}{self.tokens} tokens x {self.hidden_size} x {self.columns}, {self.dtype}"

    @property
    def gathers(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def own_hidden_bytes(self) -> int:
        """Bytes of the hidden states of this rank's tokens."""
        return self.tokens * self.hidden_size * self.itemsize // (self.tp if self.gathers else 1)

    @property
    def computed_tokens(self) -> int:
        return max(1, round(self.tokens * (1 - self.ignored))) if self.skip_ignored else self.tokens

    @property
    def is_sharded(self) -> bool:
        """Whether blocks of hidden states are gathered, and blocks of their gradient scattered, one after the other."""
        return self.gathers and not self.skip_ignored

    def copied_bytes(self, block_tokens: int) -> int:
        """Bytes of hidden states that are gathered, or selected where rows are skipped, while a block is computed."""
        row, n = self.hidden_size * self.itemsize, self.computed_tokens
        if self.is_sharded:
            return row * min(2 * block_tokens, n)
        gathered = self.tokens * (self.gathers and block_tokens < n)  # else freed when the last block is selected
        return row * (gathered + block_tokens) if self.skip_ignored else 0

    @property
    def size(self) -> HeadSize:
        bits32, H = self.itemsize == 4, self.hidden_size
        scratch = fp32_scratch_bytes(H, 2, CHUNK_COLUMNS) if bits32 else ScratchBytes(CHUNK_COLUMNS, caches=True)
        is_aligned, needs_acc = self.columns % 8 == 0, not bits32 and not self.main_grad
        return HeadSize(H, self.columns, self.itemsize, 3 + self.entropy, scratch, needs_acc, is_aligned)


class HeadCost(NamedTuple):
    """Cost of one step."""

    matmuls: float  # of tokens x hidden x columns each; 3 is the minimum
    peak_bytes: int  # largest allocation at any time, gradients included


def megatron(step: HeadStep, loss: str = UNFUSED) -> HeadCost:
    """Megatron's vocab-parallel cross-entropy: logits, and fp32 logits that become the softmax in place.

    `FUSED` (`cross_entropy_loss_fusion`) holds the fp32 logits and their exponentials at once. `TE`, of version 2.20,
    keeps the logits, and makes the gradient in a copy of them. Both are for 16-bit heads.
    """
    row, num_logits = step.hidden_size * step.itemsize, step.tokens * step.columns
    logits, softmax = step.itemsize * num_logits, 4 * num_logits
    unfused = softmax + (logits if step.itemsize == 2 else 0)
    in_loss = {UNFUSED: unfused, FUSED: unfused + softmax, TE: 2 * logits}[loss]
    hidden = (1 + step.gathers) * step.tokens * row + step.gathers * step.own_hidden_bytes
    return HeadCost(3, max(in_loss, logits + hidden + step.columns * row))


def ours(step: HeadStep) -> HeadCost:
    """What the default takes: all logits of up to 4 H tokens are kept, and longer steps' loss is a plain mean.

    With an entropy, of a policy's loss, upstream gradients differ, and longer steps recompute logits.
    """
    kept = per_token_cost(step, logits_cache_bytes=None)
    known = None if step.entropy or kept.matmuls < 4 * step.computed_tokens / step.tokens else known_loss(step)
    return known or kept


def per_token_cost(step: HeadStep, logits_cache_bytes: int | None = 0) -> HeadCost:
    """`linear_cross_entropy`, where upstream gradients come in backward, one a token."""
    size, n, columns, row = step.size, step.computed_tokens, step.columns, step.hidden_size * step.itemsize
    plan = plan_call(size, n, columns, step.workspace_bytes, logits_cache_bytes=logits_cache_bytes)
    cache = n * size.cache_bytes_per_token(columns) if plan.cache_tokens else 0
    block, is_whole = plan.block_tokens, plan.block_tokens >= n
    in_one_slab = bool(cache) or plan.slab_columns >= columns or step.itemsize == 4
    stats = size.stats_bytes.total(plan.stats_tokens, min(plan.stats_columns, columns))
    copied, whole, own = step.copied_bytes(block), step.tokens * row, step.own_hidden_bytes
    weight_grad = 0 if step.main_grad else columns * row
    weight_sum = 0 if is_whole or step.itemsize == 4 else 2 * weight_grad
    is_sharded = step.is_sharded
    grad, earlier = (block * row if is_sharded else n * row), (0 if is_whole else own * is_sharded)
    acc = grad if in_one_slab else 4 * block * step.hidden_size + (0 if is_whole or is_sharded else grad)
    cast = acc + (grad if not in_one_slab and (is_whole or is_sharded) else 0) + earlier
    slab = 0 if cache else size.slab_bytes.total(plan.slab_tokens, min(plan.slab_columns, columns))
    if not step.main_grad and step.itemsize == 2 and plan.slab_tokens < block and is_whole:
        slab += 4 * plan.slab_columns * step.hidden_size  # an fp32 sum over the tokens of a slab's columns
    sums = weight_sum or weight_grad
    in_block = sums + copied + cache + slab + acc + earlier
    casts = sums + (slab + copied if step.tp > 1 else 0) + cast  # a reduction starts before the last slab is freed
    scattered = (whole if step.skip_ignored else 0) + (own if step.gathers and is_whole else 0)
    reduction = sums + grad + earlier + scattered + (slab or cache) * step.gathers + block * row * step.skip_ignored
    kept = sums + (own if step.gathers else grad)
    at_end = max(reduction, kept + max(weight_grad if weight_sum else 0, 0 if is_whole else own * is_sharded))
    at_start = cache + max(copied + stats, n * row + whole * step.gathers if step.skip_ignored else 0)
    peak = max(at_start, in_block, casts, at_end)
    return HeadCost((3 if cache else 4) * n / step.tokens, peak + PER_TOKEN_BYTES * n)


def known_loss(step: HeadStep) -> HeadCost | None:
    """A known loss of the flag, and `linear_token_loss`: gradients are computed in forward, and scaled in backward.

    None: it would compute logits twice, because inputs are fp32, or the workspace holds too few tokens.
    """
    size, n, columns, row = step.size, step.computed_tokens, step.columns, step.hidden_size * step.itemsize
    in_fp32 = step.main_grad or step.dtype == "fp16"
    plan = plan_call(size, n, columns, step.workspace_bytes, known_loss=True, keeps_fp32_sum=in_fp32)
    if not plan.cache_tokens:
        return None
    block, is_whole = plan.block_tokens, plan.block_tokens >= n
    copied, whole, own = step.copied_bytes(block), step.tokens * row, step.own_hidden_bytes
    wide = 2 if step.dtype == "fp16" else 1
    unscaled = wide * (own if step.is_sharded else n * row)
    grad = wide * block * row if step.is_sharded else 0
    weight_sum = 4 * columns * step.hidden_size if in_fp32 or not is_whole else columns * row
    stats = size.stats_bytes.total(plan.stats_tokens, 0)
    cache = block * size.cache_bytes_per_token(columns)
    in_block = cache + weight_sum + unscaled + copied + max(stats, grad)
    casts = own * (wide - 1) + (columns * row if weight_sum > columns * row and not step.main_grad else 0)
    scattered = wide * ((whole if step.skip_ignored else 0) + own * step.gathers)
    scattered += (cache + block * row) * (step.gathers and step.skip_ignored)
    at_end = weight_sum + max(unscaled + scattered, (wide * own if step.gathers else unscaled) + casts)
    return HeadCost(3 * n / step.tokens, max(in_block, at_end) + PER_TOKEN_BYTES * n)


def estimate_table(step: HeadStep) -> list[dict[str, Any]]:
    """Return a row per implementation that runs this step: head, matmuls, peak_mib."""
    costs = {UNFUSED: megatron(step)}
    if step.itemsize == 2:  # in fp32 the fused one rounds the gradient to bf16: not comparable
        costs |= {FUSED: megatron(step, FUSED), TE: megatron(step, TE)}
    costs |= {OURS: ours(step), NOTHING_KEPT: per_token_cost(step)}
    if step.ignored:
        costs[f"{OURS}, {step.ignored:.0%} masked and skipped"] = ours(replace(step, skip_ignored=True))
    return [
        {"head": head, "matmuls": round(cost.matmuls, 2), "peak_mib": round(cost.peak_bytes / 2**20)}
        for head, cost in costs.items()
    ]


def verdict(rows: list[dict[str, Any]]) -> str:
    """Say what is gained over the rival with the lowest peak."""
    heads = {row["head"]: row for row in rows}
    lowest = min((loss for loss in (UNFUSED, FUSED, TE) if loss in heads), key=lambda loss: heads[loss]["peak_mib"])
    least, best = heads[lowest]["peak_mib"], rows[-1] if rows[-1]["head"] != NOTHING_KEPT else heads[OURS]
    saved = least - best["peak_mib"]
    if saved <= 0:
        return f"No memory is saved: the head peaks at {best['peak_mib']:,} MiB, and at {least:,} with {lowest}."
    little = " This matters little in a whole model." if saved < LITTLE_MIB else ""
    work = f", with {best['matmuls']:g} matmuls instead of 3" if best["matmuls"] != 3 else ""
    peak = f"The head's peak falls from {least:,} MiB ({lowest}) to {best['peak_mib']:,} ({best['head']}){work}."
    return peak + little


def format_estimates(title: str, rows: list[dict[str, Any]], notes: list[str]) -> str:
    """Return the rows as a table in plain text, then notes, and the verdict at the end."""
    width = max(len(row["head"]) for row in rows)
    lines = [title, "", f"{'head':<{width}}  matmuls (3 is the minimum)  peak MiB"]
    lines += [f"{row['head']:<{width}}{row['matmuls']:>28,}{row['peak_mib']:>10,}" for row in rows]
    lines += ["", "Peaks include both gradients, but not hidden and weight.", *notes, "", verdict(rows)]
    return "\n".join(lines)

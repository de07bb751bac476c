"""Estimated memory against measured memory: of committed GPU runs, and of a GPU at hand."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch

import megatron_lce
from benchmark import measure
from benchmark.publish import result
from benchmark.shapes import parse_shape
from megatron_lce.command.estimate import (
    FUSED,
    NOTHING_KEPT,
    OURS,
    TE,
    UNFUSED,
    HeadStep,
    estimate_table,
    known_loss,
    megatron,
    ours,
    per_token_cost,
)
from megatron_lce.core.statistics import row_counts
from tests.problems import make_problem

ALLOWED = 0.1
MIB = 2**20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALL = 2**62  # `logits_cache_bytes` that keeps the logits of any step
CACHED, TOKEN_LOSS, BY_DEFAULT = "all logits kept", "token loss", "per token"
HEADS = {loss: partial(megatron, loss=loss) for loss in (UNFUSED, FUSED, TE)} | {OURS: ours}
HEADS |= {BY_DEFAULT: partial(per_token_cost, logits_cache_bytes=None)}
HEADS |= {NOTHING_KEPT: per_token_cost, CACHED: partial(per_token_cost, logits_cache_bytes=ALL), TOKEN_LOSS: known_loss}
WAYS = {"ours-0": NOTHING_KEPT, "megatron": FUSED, "te": TE}
WAYS |= {"ours-token-640": TOKEN_LOSS, "ours-known-640": TOKEN_LOSS}


def peak_mib(way, step):
    return HEADS[way](step).peak_bytes / MIB


def test_heads_measured_on_one_gpu():
    found = 0
    ways = WAYS | {"ours": BY_DEFAULT}
    for record in result("heads")["times"] + result("memory")["memory"]:
        provider, mode = record["provider"], record["mode"]
        if record["status"] != "ok" or mode == "fwd" or provider not in ways:
            continue
        shape, workspace = parse_shape(record["shape"]), (640 if provider.endswith("640") else 512) * MIB
        tokens, entropy = record.get("tokens", shape.tokens), mode == "rl"
        step = HeadStep(tokens, shape.hidden, shape.vocab, entropy=entropy, workspace_bytes=workspace)
        assert peak_mib(ways[provider], step) == pytest.approx(record["peak_mib"], rel=ALLOWED), record
        found += 1
    assert found > 25


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_steps_of_a_megatron_gpt_measured_on_one_gpu(tokens):
    """The model's body takes the same in every variant: differences to native are the heads'."""
    step = HeadStep(tokens, 4096, 151936, entropy=False)
    variants = {"native": UNFUSED, "native-fused": FUSED, "te": TE, "ours": OURS, "ours-0": TOKEN_LOSS}
    records = [x for x in result("steps")["steps"] if x["tokens"] == tokens and x["masked"] == 0]
    measured = {record["variant"]: record["peak_mib"] for record in records}
    for variant, way in variants.items():
        difference = measured["native"] - measured[variant]
        assert peak_mib(UNFUSED, step) - peak_mib(way, step) == pytest.approx(difference, rel=ALLOWED), variant


class Sink:
    """A place for the weight's gradient as Megatron's: a buffer that was there, and zeros for autograd."""

    def __init__(self, weight):
        self.weight, self.main_grad = weight, torch.zeros(weight.shape, device=weight.device)
        weight.register_hook(torch.empty_like)  # the placeholder that DDP's hook drops

    def buffer(self):
        return self.main_grad

    def finish(self):
        return self.weight.new_zeros(()).expand_as(self.weight)


def call_of(step, way, device):
    """A real step of these sizes: forward and backward."""
    problem = make_problem(step.tokens, step.hidden_size, step.columns, device, DTYPES[step.dtype])
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    labels = problem.labels.clone()
    labels[: step.tokens - round(step.tokens * (1 - step.ignored))] = -100
    upstream = [problem.upstream.logprobs, problem.upstream.entropy][: 1 + step.entropy]
    keywords = {"weight_grad_sink": Sink(weight)} if step.main_grad else {}
    keywords |= {"entropy": step.entropy, "workspace_bytes": step.workspace_bytes, "backend": "triton"}
    keywords |= {"skip_ignored": step.computed_tokens if step.skip_ignored else False}

    def call():
        cache_bytes = {CACHED: ALL, OURS: None}.get(way, 0)
        out = megatron_lce.linear_cross_entropy(hidden, weight, labels, logits_cache_bytes=cache_bytes, **keywords)
        return torch.autograd.grad([out.logprobs, out.entropy][: 1 + step.entropy], (hidden, weight), upstream)

    def loss(out, weights):
        return -weights * out.logprobs + (0.01 * out.entropy if step.entropy else 0.0)

    def token_loss():
        given = hidden, weight, labels, loss, problem.upstream.logprobs
        return torch.autograd.grad(megatron_lce.linear_token_loss(*given, **keywords).loss, (hidden, weight))

    return token_loss if way == TOKEN_LOSS else call


MEASURED_AT_TP = {  # MiB beyond the gradients, on H200s: `linear_cross_entropy`, `linear_token_loss`
    (2, False): (931, 1661),
    (2, True): (474, 1197),
    (4, False): (882, 1095),
    (4, True): (474, 716),
}


@pytest.mark.parametrize(("tp", "skip"), MEASURED_AT_TP)
def test_heads_measured_under_tensor_parallelism(tp, skip):
    """A policy update at 16,384 tokens under sequence parallelism, 60 % masked."""
    step = HeadStep(16384, 4096, 151936 // tp, tp, sequence_parallel=True, ignored=0.6, skip_ignored=skip)
    for way, mib in zip((NOTHING_KEPT, TOKEN_LOSS), MEASURED_AT_TP[tp, skip], strict=True):
        over_gradients = HEADS[way](step).peak_bytes - step.own_hidden_bytes - 2 * step.columns * step.hidden_size
        assert over_gradients / MIB == pytest.approx(mib, rel=ALLOWED)


GPU_STEPS = {
    "slabs": HeadStep(4096, 2048, 65536),
    "one slab": HeadStep(4096, 4096, 9496),
    "cut tokens": HeadStep(65536, 2048, 65536),
    "fp32": HeadStep(4096, 1024, 32768, dtype="fp32"),
    "main_grad": HeadStep(16384, 4096, 37984, main_grad=True),
    "blocks of tokens": HeadStep(131072, 4096, 18992),
    "blocks of tokens, main_grad": HeadStep(131072, 4096, 18992, main_grad=True),
    "ignored rows skipped": HeadStep(16384, 4096, 37984, ignored=0.6, skip_ignored=True),
}
GPU_CALLS = {name: (NOTHING_KEPT, step) for name, step in GPU_STEPS.items()}
GPU_CALLS["all logits cached"] = CACHED, HeadStep(8192, 2048, 65536)
GPU_CALLS["a wide token loss"] = TOKEN_LOSS, HeadStep(8192, 2048, 65536)
GPU_CALLS["a long token loss"] = TOKEN_LOSS, HeadStep(131072, 4096, 18992)


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "step"), GPU_CALLS.values(), ids=list(GPU_CALLS))
def test_peak_of_a_step_on_a_gpu(way, step, device, usual_torch):
    call = call_of(step, way, device)
    call()  # compiles
    gc.collect()  # what other tests left must not be freed while this is measured
    assert HEADS[way](step).peak_bytes == pytest.approx(measure.peak_mib(call, device) * MIB, rel=ALLOWED)


def test_sizes_are_those_of_the_kernels(monkeypatch):
    tiles = pytest.importorskip("megatron_lce.backends.triton.tiles")
    monkeypatch.setattr(tiles, "has_ptx", lambda: True)
    for dtype in ("bf16", "fp32"):
        tensor = torch.empty(1, 72, dtype=DTYPES[dtype])
        assert tiles.scratch_bytes(tensor, tensor, False) == HeadStep(1, 72, 8, dtype=dtype).size.scratch
    for entropy in (False, True):
        num_extremes, _, num_stats = row_counts(entropy, False)
        assert HeadStep(1, 72, 8, entropy=entropy).size.stats_rows == num_stats + num_extremes - 2


def test_tokens_that_fit_in_one_block_and_no_blocks():
    """`linear_token_loss` computes the logits of more tokens twice: there is no row for it."""
    step = HeadStep(128, 64, 131072, workspace_bytes=2**23)
    assert known_loss(step) is not None
    assert known_loss(replace(step, tokens=4096)) is None
    assert known_loss(replace(step, dtype="fp32")) is None
    assert known_loss(replace(step, tokens=4096, workspace_bytes=2**29)) is not None


def test_rows_of_the_table():
    step = HeadStep(1024, 1024, 32768, ignored=0.6)
    assert {row["head"]: row["matmuls"] for row in estimate_table(step)} == {
        UNFUSED: 3,
        FUSED: 3,
        TE: 3,
        OURS: 3,
        NOTHING_KEPT: 4,
        f"{OURS}, 60% masked and skipped": 1.2,
    }
    in_fp32 = estimate_table(replace(step, dtype="fp32", ignored=0.0))
    assert [row["head"] for row in in_fp32] == [UNFUSED, OURS, NOTHING_KEPT]


def test_the_default_keeps_up_to_4_h_tokens_and_knows_a_mean_loss():
    step = HeadStep(4096, 1024, 32768, entropy=False)
    assert ours(step) == per_token_cost(step, ALL)
    longer = replace(step, tokens=4104)
    assert ours(longer) == known_loss(longer)
    assert ours(replace(longer, entropy=True)) == per_token_cost(replace(longer, entropy=True))

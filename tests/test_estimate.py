"""Estimated memory against measured memory: of committed GPU runs, of a GPU at hand, and of storages on a CPU."""

import gc
from dataclasses import replace

import pytest
import torch

import megatron_lce
from benchmark import measure
from benchmark.publish import result
from benchmark.shapes import parse_shape
from megatron_lce.command.dry_run import AllocatingBackend, Counter
from megatron_lce.command.estimate import estimate_table, largest_tokens, saved_mib, verdict
from megatron_lce.command.head_memory import FUSED, HEADS, OURS, TE, UNFUSED, UNLIMITED_CACHE, HeadStep
from megatron_lce.command.head_memory import KNOWN_LOSS as TOKEN_LOSS
from tests.live_bytes import peak_live_bytes
from tests.problems import make_problem

ALLOWED = 0.05
MIB = 2**20
WAYS = {"ours": OURS, "ours-cached": OURS, "megatron": FUSED, "ours-token-640": TOKEN_LOSS}


def measured_steps(records):
    """Records of runs that there is an estimate of, their ways and steps."""
    for record in records:
        provider, mode = record["provider"], record["mode"]
        if record["status"] != "ok" or mode == "fwd" or provider not in WAYS:
            continue
        shape = parse_shape(record["shape"])
        step = HeadStep(record.get("tokens", shape.tokens), shape.hidden, shape.vocab, entropy=mode == "rl")
        if provider == "ours-cached":
            step = replace(step, logits_cache_bytes=UNLIMITED_CACHE)
        if provider == "ours-token-640":
            step = replace(step, workspace_bytes=640 * MIB)
        yield record, HEADS[WAYS[provider]], step


def test_heads_measured_on_one_gpu():
    """Peaks, and times within 10 %, by the rate of the matmuls in the same run."""
    times = result("heads")["times"]
    found = list(measured_steps(times + result("memory")["memory"]))
    for record, estimate, step in found:
        assert estimate(step).peak_bytes / MIB == pytest.approx(record["peak_mib"], rel=ALLOWED), record
        if record in times:
            tflops = 3 * 2 * step.logits * step.hidden_size / (record["time_ms"] / record["over_products"]) / 1e9
            assert estimate(step).time_ms(step, tflops, 4.8) == pytest.approx(record["time_ms"], rel=0.1), record
    assert len(found) > 20


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_steps_of_a_megatron_gpt_measured_on_one_gpu(tokens):
    """The model's body takes the same in every variant: differences to native are the heads'."""
    plain = HeadStep(tokens, 4096, 151936, entropy=False)
    variants = {
        "native": (UNFUSED, plain),
        "native-fused": (FUSED, plain),
        "te": (TE, plain),
        "ours": (OURS, plain),
        "ours-cached": (OURS, replace(plain, logits_cache_bytes=UNLIMITED_CACHE)),
    }
    records = [x for x in result("steps")["steps"] if x["tokens"] == tokens and x["masked"] == 0]
    measured = {record["variant"]: record["peak_mib"] for record in records}
    estimated = {variant: HEADS[arguments[0]](arguments[1]).peak_bytes / MIB for variant, arguments in variants.items()}
    for variant in set(variants) - {"native"}:
        difference = measured["native"] - measured[variant]
        assert estimated["native"] - estimated[variant] == pytest.approx(difference, rel=ALLOWED), variant


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
    problem = make_problem(step.tokens, step.hidden_size, step.columns, device, step.dtype)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    labels = problem.labels.clone()
    labels[: step.tokens - round(step.tokens * (1 - step.ignored))] = -100
    upstream = [problem.upstream.logprobs, problem.upstream.entropy][: 1 + step.entropy]
    keywords = {"weight_grad_sink": Sink(weight)} if step.main_grad else {}
    keywords |= {"entropy": step.entropy, "workspace_bytes": step.workspace_bytes, "backend": "triton"}
    keywords |= {"skip_ignored": step.computed_tokens if step.skip_ignored else False}

    def call():
        cache = step.logits_cache_bytes
        out = megatron_lce.linear_cross_entropy(hidden, weight, labels, logits_cache_bytes=cache, **keywords)
        return torch.autograd.grad([out.logprobs, out.entropy][: 1 + step.entropy], (hidden, weight), upstream)

    def loss(out, weights):
        return -weights * out.logprobs + (0.01 * out.entropy if step.entropy else 0.0)

    def token_loss():
        given = hidden, weight, labels, loss, problem.upstream.logprobs
        return torch.autograd.grad(megatron_lce.linear_token_loss(*given, **keywords).loss, (hidden, weight))

    return call if way == OURS else token_loss


def check_on_a_gpu(step, way, call, device):
    call()  # compiles
    gc.collect()  # what other tests left must not be freed while this is measured
    assert HEADS[way](step).peak_bytes == pytest.approx(measure.peak_mib(call, device) * MIB, rel=ALLOWED)


@pytest.fixture
def on_a_cpu(monkeypatch, usual_torch):
    """The Triton backend's allocations, without the fp32 copies that products take on a CPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr("megatron_lce.backends.triton.primitives.matmul", lambda *operands, accumulate: None)
    monkeypatch.setattr("megatron_lce.command.dry_run.AllocatingBackend.matmul", lambda *operands, accumulate: None)


SLABS = HeadStep(256, 128, 1024, workspace_bytes=2**20)
CPU_STEPS = {
    "slabs": (OURS, SLABS),
    "rows skipped, an odd vocabulary": (OURS, replace(SLABS, columns=511, ignored=0.5, skip_ignored=True)),
    "main_grad, no entropy, cut tokens": (OURS, replace(SLABS, main_grad=True, entropy=False, workspace_bytes=400_000)),
    "fp32": (OURS, replace(SLABS, dtype=torch.float32)),
    "everything cached": (OURS, replace(SLABS, tokens=130, entropy=False, logits_cache_bytes=2**30)),
    "a part cached": (OURS, replace(SLABS, tokens=130, logits_cache_bytes=160_000)),
    "known loss, blocks": (TOKEN_LOSS, HeadStep(400, 32, 1024, workspace_bytes=400_000)),
    "known loss, fp16, rows skipped": (TOKEN_LOSS, replace(SLABS, dtype=torch.float16, ignored=0.5, skip_ignored=True)),
    "known loss, main_grad": (TOKEN_LOSS, replace(SLABS, main_grad=True)),
}


@pytest.mark.parametrize(("way", "step"), CPU_STEPS.values(), ids=list(CPU_STEPS))
def test_a_dry_run_allocates_what_the_triton_backend_does(way, step, on_a_cpu):
    peak, _ = peak_live_bytes(call_of(step, way, torch.device("cpu")))
    assert HEADS[way](step).peak_bytes == pytest.approx(peak, rel=0.01)


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
    for way, mib in zip((OURS, TOKEN_LOSS), MEASURED_AT_TP[tp, skip], strict=True):
        over_gradients = HEADS[way](step).peak_bytes - step.own_hidden_bytes - step.weight_bytes
        assert over_gradients / MIB == pytest.approx(mib, rel=ALLOWED)


def test_the_documented_numbers_come_out():
    """Measured on an H200 to 0.1 %."""
    for step, mib in (
        (HeadStep(8192, 4096, 151936), 1580),
        (HeadStep(16384, 4096, 18992, entropy=False, logits_cache_bytes=UNLIMITED_CACHE), 999),
        (HeadStep(131072, 4096, 151936), 4268),
    ):
        assert HEADS[OURS](step).peak_bytes / MIB == pytest.approx(mib, abs=1)
    with torch.inference_mode():  # of the caller
        assert HEADS[OURS](step).peak_bytes / MIB == pytest.approx(mib, abs=1)


def test_the_torch_backend_keeps_no_logits():
    """`explain` says what runs on this machine."""
    step = replace(SLABS, backend="torch", logits_cache_bytes=UNLIMITED_CACHE)
    assert HEADS[OURS](step).matmuls == pytest.approx(4, abs=1e-3)
    assert HEADS[OURS](step).kept_bytes < 64 * step.tokens
    assert [row["head"] for row in estimate_table(step)] == [UNFUSED, FUSED, TE, OURS]


GPU_STEPS = {
    "slabs": HeadStep(4096, 2048, 65536),
    "one slab": HeadStep(4096, 4096, 9496),
    "cut tokens": HeadStep(65536, 2048, 65536),
    "fp32": HeadStep(4096, 1024, 32768, dtype=torch.float32),
    "half of the logits kept": HeadStep(8192, 2048, 65536, logits_cache_bytes=512 * MIB),
    "main_grad": HeadStep(16384, 4096, 37984, main_grad=True),
    "blocks of tokens": HeadStep(131072, 4096, 18992),
    "blocks of tokens, main_grad": HeadStep(131072, 4096, 18992, main_grad=True),
    "ignored rows skipped": HeadStep(16384, 4096, 37984, ignored=0.6, skip_ignored=True),
}
GPU_CALLS = {name: (OURS, step) for name, step in GPU_STEPS.items()}
GPU_CALLS["a wide token loss"] = TOKEN_LOSS, HeadStep(8192, 2048, 65536)
GPU_CALLS["a long token loss"] = TOKEN_LOSS, HeadStep(131072, 4096, 18992)


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "step"), GPU_CALLS.values(), ids=list(GPU_CALLS))
def test_peak_of_a_step_on_a_gpu(way, step, device, usual_torch):
    check_on_a_gpu(step, way, call_of(step, way, device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [UNFUSED, FUSED])
def test_peak_of_megatrons_own_losses_on_a_gpu(way, device, usual_torch):
    """On one rank: the plain product, and the loss on its logits."""
    pytest.importorskip("megatron.core")
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from tests import megatron_world

    step = HeadStep(4096, 2048, 65536)
    problem = make_problem(step.tokens, step.hidden_size, step.columns, device, torch.bfloat16)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    with megatron_world.world():
        group = torch.distributed.group.WORLD

        def call():
            logits = hidden @ weight.T
            if way == FUSED:
                loss = fused_vocab_parallel_cross_entropy(logits, problem.labels, group)
            else:
                loss = vocab_parallel_cross_entropy(logits, problem.labels)
            del logits  # the model's frame that held them is gone when backward runs
            return torch.autograd.grad(loss, (hidden, weight), problem.upstream.logprobs)

        check_on_a_gpu(step, way, call, device)


def test_costs_are_those_of_the_kernels(monkeypatch):
    tiles = pytest.importorskip("megatron_lce.backends.triton.tiles")
    monkeypatch.setattr(tiles, "has_ptx", lambda: True)
    for tensor in (torch.empty(1, 72, dtype=torch.bfloat16), torch.empty(1, 72, dtype=torch.float32)):
        assert tiles.scratch_bytes(tensor, tensor, False) == AllocatingBackend(Counter()).scratch_bytes(
            tensor, tensor, False
        )


@pytest.mark.parametrize("way", [UNFUSED, OURS])
def test_the_largest_token_count_fits_and_a_larger_one_does_not(way):
    step, memory = HeadStep(1, 2048, 65536), 3 * 2**29
    tokens = largest_tokens(way, step, memory)
    assert HEADS[way](replace(step, tokens=tokens)).peak_bytes <= memory
    assert HEADS[way](replace(step, tokens=tokens + tokens // 100 + 128)).peak_bytes > memory
    assert largest_tokens(way, step, 2**20) == 0  # the weight's gradient alone is larger


def test_tokens_that_fit_in_one_block_and_no_blocks():
    """`linear_token_loss` computes the logits of more tokens twice: there is no row for it."""
    step = HeadStep(128, 64, 131072, workspace_bytes=2**23)
    assert largest_tokens(TOKEN_LOSS, step, 80 * 2**30) == 128
    assert HEADS[TOKEN_LOSS](replace(step, tokens=4096)) is None
    assert HEADS[TOKEN_LOSS](replace(step, dtype=torch.float32)) is None
    assert HEADS[TOKEN_LOSS](replace(step, tokens=4096, workspace_bytes=2**29)) is not None


def test_rows_of_the_table():
    step = HeadStep(1024, 1024, 32768, ignored=0.6)
    rows = estimate_table(step, cache_bytes=2**24, speeds=(500.0, 3.35), memory_bytes=2**30)
    matmuls = {row["head"]: row["matmuls"] for row in rows}
    assert matmuls == {
        UNFUSED: 3,
        FUSED: 3,
        TE: 3,
        OURS: 4,
        TOKEN_LOSS: 3,
        f"{OURS}, cache of 16 MiB": 3.76,
        f"{OURS}, all logits cached": 3,
        f"{OURS}, 60% masked and skipped": 1.6,
        f"{TOKEN_LOSS}, 60% masked and skipped": 1.2,
    }
    in_fp32 = estimate_table(replace(step, dtype=torch.float32, ignored=0.0))
    assert [row["head"] for row in in_fp32] == [UNFUSED, OURS]


LONG = HeadStep(16384, 4096, 75968, tp=2, sequence_parallel=True)
RECOMMENDED = (
    "The head's peak falls from 11.6 GiB (Megatron, fused; 7.0 GiB unfused, 4.6 GiB with TransformerEngine's) to "
    "1.5 GiB, or to 2.2 GiB with known_loss=True. Recommended: megatron-lce, known_loss=True (with a loss of your own: "
    "linear_token_loss)."
)


@pytest.mark.parametrize(
    ("step", "budget", "told"),
    [
        (LONG, None, RECOMMENDED),
        (LONG, 2 * 2**30, "Recommended: megatron-lce."),
        (LONG, 2**30, "No row fits into 1.0 GiB."),
        (HeadStep(8192, 4096, 37984, tp=4), None, "Fusing helps little here: at best Megatron peaks"),
        (
            HeadStep(1024, 4096, 18992, tp=8),
            None,
            "Fusing saves no memory here: the head peaks at 194 MiB, and at 193 MiB without it (Megatron)",
        ),
        (HeadStep(8192, 2048, 65536, dtype=torch.float32), None, "GiB (Megatron, unfused) to"),
    ],
)
def test_the_verdict(step, budget, told):
    rows = estimate_table(step)
    assert told in verdict(rows, budget)
    assert ("Recommended" in verdict(rows)) == (saved_mib(rows) > 0)

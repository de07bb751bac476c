"""The backends' functions of divergences, on given products of two shards of a vocabulary, against fp64."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_lce.backends.choice import load_backend
from megatron_lce.core.divergence_types import (
    DIVERGENCE_ROWS,
    KINDS,
    SOFTMAX_ROWS,
    Heads,
    divergences_in_nats,
    gradient_terms,
    merged_softmaxes,
)
from megatron_lce.core.lm_head import LMHead, RowInputs
from megatron_lce.core.plan import slab_row_stride
from megatron_lce.core.statistics import LN_2
from tests.jsd_oracle import divergences_of_products
from tests.oracle import TIMES_EAGER_FP32, largest_error, relative_error

TOKENS = 12
SHARDS = (slice(0, 1100), slice(1100, 1300))  # one of several chunks and, in Triton, of another block than the other's
IGNORED, BROKEN, NO_UPSTREAM = 2, 3, 4
COMBINATIONS = [kinds for n in (1, 2, 4) for kinds in itertools.combinations(KINDS, n)]


def normal(*shape: int, std: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * std


def run(
    backend: str,
    products: Tensor,  # [2, N, V]
    upstream: dict[str, Tensor],
    kinds: Sequence[str],
    beta: float = 0.5,
    temperature: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Divergences in nats, and the gradient of the student's products: what core does with two ranks."""
    device, n = products.device, products.shape[1]
    functions = load_backend(backend, device)
    temperature = torch.ones(n, device=device) if temperature is None else temperature
    to_nats = torch.full((n,), LN_2, device=device)
    to_nats[IGNORED] = 0.0
    head = LMHead(products[0], products.new_empty(0), temperature, 1.0, softcap)
    rows = RowInputs(torch.zeros(n, dtype=torch.int32, device=device), head.logits_factor / temperature, to_nats)
    heads = Heads(head, head, (rows.scale, rows.scale), beta, tuple(kinds))
    shards, stats = [], []
    for columns in SHARDS:
        width = columns.stop - columns.start
        shard = products.new_empty(2, n, slab_row_stride(width))[:, :, :width].copy_(products[:, :, columns])
        shards.append(shard)
        stats.append(products.new_zeros(DIVERGENCE_ROWS, n))
        functions.divergence_softmaxes(heads, shard, stats[-1])
    softmaxes = merged_softmaxes(torch.stack([part[:SOFTMAX_ROWS] for part in stats]))
    for shard, part in zip(shards, stats, strict=True):
        part[:SOFTMAX_ROWS] = softmaxes
        functions.divergence_sums(heads, shard, part)
    merged = torch.cat([softmaxes, torch.stack([part[SOFTMAX_ROWS:] for part in stats]).sum(dim=0)])
    outputs, to_nats = divergences_in_nats(merged, rows, kinds, beta)
    terms = gradient_terms(upstream, merged, to_nats, rows.scale, heads.student, beta)
    heads, gradients = heads._replace(kinds=tuple(upstream), terms=terms), []
    for shard in shards:
        stride = shard.stride(1)
        gradient = products.new_empty(n, stride)[:, : shard.shape[2]]
        functions.divergence_grad_logits(heads, shard, merged, gradient)
        gradients.append(gradient)
    return {kind: getattr(outputs, kind) for kind in kinds}, torch.cat(gradients, dim=1)


def exact(products, upstream, kinds, dtype=torch.float64, temperature=1.0, softcap=None, beta=0.5):
    labels = torch.zeros(products.shape[1], dtype=torch.int64, device=products.device)
    labels[IGNORED] = -100
    student, teacher = (p.clone().requires_grad_() for p in products.to(dtype))
    caps = {"student_softcap": softcap, "teacher_softcap": softcap}
    keywords = {"labels": labels, "temperature": temperature, "beta": beta} | caps
    found = divergences_of_products(student, teacher, **keywords)
    losses = {kind: found[kind].detach() for kind in kinds}
    sum((found[kind] * gradient.to(dtype)).sum() for kind, gradient in upstream.items()).backward()
    return losses, student.grad


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kinds", COMBINATIONS, ids="+".join)
def test_divergences_and_gradients_match_fp64(kinds, softcap, backend, device):
    products = normal(2, TOKENS, 1300).to(device)
    products[:, 5, 7] += 60.0  # a column that both heads are sure of
    products[1, 6] *= 100.0  # a teacher that is one-hot
    products[0, 7] = products[1, 7]
    products[1, 8, :1200] = -1e30  # no probability in the first shard
    products[0, 9, :1200] = -1e3
    weights = normal(len(kinds), TOKENS).to(device)
    upstream = dict(zip(kinds, weights, strict=True))
    for given in upstream.values():
        given[NO_UPSTREAM] = 0.0
    if len(kinds) == 4:
        del upstream["jsd"]  # a divergence without a gradient
    temperature = torch.linspace(0.5, 4.0, TOKENS, device=device)
    keywords = {"beta": 0.3, "temperature": temperature, "softcap": softcap}
    losses, gradient = run(backend, products, upstream, kinds, **keywords)
    expected, exact_gradient = exact(products, upstream, kinds, **keywords)
    in_fp32, eager_gradient = exact(products, upstream, kinds, torch.float32, **keywords)
    largest = (products[:, :8].abs().amax() if softcap is None else softcap) / temperature.amin()
    floor = 2 * torch.finfo(torch.float32).eps * float(largest)
    for kind in kinds:
        scale = 1.0 + expected[kind]  # the divergences of rows 6, 8 and 9 may be large
        error = largest_error(losses[kind] / scale, expected[kind] / scale)
        allowed = TIMES_EAGER_FP32 * max(largest_error(in_fp32[kind] / scale, expected[kind] / scale), floor)
        assert error <= allowed, kind
    allowed = TIMES_EAGER_FP32 * max(relative_error(eager_gradient, exact_gradient), floor)
    assert relative_error(gradient, exact_gradient) <= allowed
    assert not gradient[[IGNORED, NO_UPSTREAM]].any()
    # Of equal heads, to the last digit.
    assert not gradient[7].any() or set(upstream) != {"tv"}
    assert losses.get("tv", torch.zeros(TOKENS))[7] == 0


@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-6])
def test_a_small_total_variation_keeps_its_digits(apart, backend, device):
    """Its error is that of two sums of exponentials; one minus a sum of minima has three times as much."""
    products = normal(2, TOKENS, 1300).to(device)
    products[1] = products[0] + apart * products[1]
    upstream = {"tv": torch.ones(TOKENS, device=device)}
    losses, _ = run(backend, products, upstream, ["tv"])
    expected, _ = exact(products, upstream, ["tv"])
    assert 0.1 * apart < expected["tv"][0] < apart
    assert largest_error(losses["tv"], expected["tv"]) <= torch.finfo(torch.float32).eps * (1 + apart)

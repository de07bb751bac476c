"""What `run_fuzz.py` draws: one call of an operation, as a few numbers that its tensors follow from."""

import math
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import harness  # noqa: F401  (finds the package, when started by hand from anywhere)
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from megatron_lce.core.options import DIFFERENTIABLE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_DTYPES = DTYPES | {"fp64": torch.float64}
LAYOUTS = ("strided", "shifted", "sliced", "transposed")
MOST_TOKENS_ALONE = 12
MOST_LOGITS = 20_000  # tokens x columns: what Triton's interpreter does in well under a second

SCALES = st.sampled_from([1.0, 1.0, 0.25, -1.5, 0.0])
SOFTCAPS = st.sampled_from([None, None, 0.5, 5.0, 30.0, 1e4])
# One line a keyword. What an oracle takes as well is handed to it under the same name.
COMMON: dict[str, st.SearchStrategy] = {
    "temperature": st.sampled_from([1.0, 1.0, 0.3, 2.5, 100.0, "per token", "per token, some unusable"]),
    "ignore_index": st.sampled_from([-100, -100, -1, 0, 3, 2**40]),
    "sequence_parallel": st.booleans(),
    "workspace_bytes": st.sampled_from([2**29, 2**29, 2**29, 2**18, 2**16, 1]),
    "skip_ignored": st.sampled_from([False, False, True, "count"]),
}
CROSS_ENTROPY = COMMON | {
    "logits_scale": SCALES,
    "softcap": SOFTCAPS,
    "entropy": st.booleans(),
    "telemetry": st.booleans(),
    "logits_dtype": st.sampled_from([None, None, torch.bfloat16]),
    "candidates": st.sampled_from([None, None, 1, 4, 30]),  # how many a token
    "skip_ignored": st.sampled_from([False, False, True, "count", "miscount"]),
    "reduce_grad_hidden": st.sampled_from([True, True, True, False]),
    "logits_cache_bytes": st.sampled_from([0, 0, 1, 3000, 40_000, 2**30]),
}
JSD = COMMON | {
    "beta": st.sampled_from([0, 1, 0.5, 0.1, 0.9, 1e-3]),
    "student_logits_scale": SCALES,
    "teacher_logits_scale": SCALES,
    "student_softcap": SOFTCAPS,
    "teacher_softcap": SOFTCAPS,
}


@dataclass(frozen=True)
class Case:
    """Of `linear_cross_entropy` and `linear_token_loss`; `shards` has as many ranks as the case runs on."""

    seed: int
    members: tuple[int, ...]  # of the team: those ranks, in this order
    shape: tuple[int, ...]  # of labels
    hidden_size: int
    shards: tuple[int, ...]  # columns of each rank
    reversed: bool  # the first rank has the last columns
    pass_vocab_start: bool
    padding: int  # columns at the end that are no vocabulary
    dtype: str
    fp32_weight: bool  # beside hidden of that dtype
    layout: str  # of every tensor in memory
    default_dtype: str  # torch's
    pending: bool  # every tensor is one that a functional collective is still filling
    logit_std: float
    offset: float  # of all logits, about
    ignored: float  # share of the rows
    unowned: bool  # some rows have a label that nobody owns
    upstream: tuple[str, ...]  # outputs that take part in the loss
    poison: str  # "nan", "inf" or "-inf" as the upstream gradient at ignored rows and padding; "": finite
    tail: int  # of `linear_logits_at`: 0: ids are [..., K]; else CSR, with this many ids behind the last offset
    keywords: dict[str, Any]


@dataclass(frozen=True)
class JsdCase(Case):
    """Of `linear_jsd`; what `Case` says of hidden and weight goes for both heads."""

    teacher_size: int
    teacher_dtype: str
    weighted: bool  # the weights of the tokens are known in forward


class Tensors(NamedTuple):
    """A case's tensors, whole, the same on every rank; both heads' where there are two."""

    heads: tuple[tuple[Tensor, Tensor], ...]  # hidden [..., H], weight [V, H]
    labels: Tensor
    upstream: dict[str, Tensor | None]
    poisoned: dict[str, Tensor | None]  # the same for the operation, with the case's poison where an output is 0
    keywords: dict[str, Any]  # the case's, its words replaced by what they stand for


@st.composite
def cases(draw: st.DrawFn, operation: str, ranks: int, team: int) -> Case:
    """Valid calls, but for a workspace that may be too small, and options that exclude each other."""
    keywords = {name: draw(values) for name, values in (JSD if operation == "linear_jsd" else CROSS_ENTROPY).items()}
    if operation == "linear_token_loss":
        del keywords["logits_cache_bytes"]
    if operation == "linear_logits_at":
        names = ("entropy", "telemetry", "logits_dtype", "skip_ignored", "reduce_grad_hidden", "logits_cache_bytes")
        keywords = {name: value for name, value in keywords.items() if name not in names}
        keywords["candidates"] = draw(st.sampled_from([1, 2, 5, 30, 150]))
    tokens = draw(st.sampled_from([0, 1, 2, 5, 12, 33, 64, 130, 150]))
    if tokens > MOST_TOKENS_ALONE:  # the smallest workspace holds a token at a time
        keywords["workspace_bytes"] = max(keywords["workspace_bytes"], 2**18)
    shards = draw(_shards(ranks, max(1, MOST_LOGITS // max(tokens, 1) // ranks)))
    outputs = ["logprobs", "lse", *(["entropy"] if keywords.get("entropy", False) else [])]
    outputs += ["mean_logit"] if keywords.get("telemetry", False) else []
    outputs += ["candidate_logprobs"] if keywords.get("candidates") else []
    shape = draw(st.sampled_from([(tokens,), (tokens, 1), (2, tokens // 2), (tokens // 3, 3)]))
    if keywords["sequence_parallel"]:
        shape = (-(-shape[0] // ranks) * ranks, *shape[1:])
    fields = {
        "seed": draw(st.integers(0, 2**16)),
        "members": draw(st.sampled_from(list(combinations(range(team), ranks)))),
        "shape": shape,
        "hidden_size": draw(st.sampled_from([1, 2, 8, 13, 24, 64, 100, 300])),
        "shards": shards,
        "reversed": draw(st.booleans()),
        "pass_vocab_start": draw(st.booleans()),
        "padding": draw(st.sampled_from([0, 0, 1, shards[-1], sum(shards) - 1])),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "fp32_weight": operation != "linear_jsd" and draw(st.sampled_from([False, False, True])),
        "layout": draw(st.sampled_from(["contiguous", "contiguous", *LAYOUTS])),
        "default_dtype": draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16", "fp64"])),
        "pending": draw(st.booleans()),
        "logit_std": draw(st.sampled_from([2.0, 2.0, 0.0, 0.01, 20.0, 300.0])),
        "offset": draw(st.sampled_from([0.0, 0.0, 30.0, -1e3, 1e4])),
        "ignored": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "unowned": draw(st.booleans()),
        "upstream": tuple(sorted(draw(st.sets(st.sampled_from(outputs), min_size=1)))),
        "poison": draw(st.sampled_from(["", "", "nan", "inf", "-inf"])),
        "tail": draw(st.sampled_from([0, 0, 1, 7])) if operation == "linear_logits_at" else 0,
        "keywords": keywords,
    }
    if operation == "linear_logits_at":
        fields["upstream"] = ("candidate_logprobs", "logprobs")  # of the logits, and of `support_logprobs`
    if operation != "linear_jsd":
        return Case(**fields)
    return JsdCase(
        **fields,
        teacher_size=draw(st.sampled_from([1, 8, 40])),
        teacher_dtype=draw(st.sampled_from(list(DTYPES))),
        weighted=draw(st.booleans()),
    )


@st.composite
def _shards(draw: st.DrawFn, ranks: int, most: int) -> tuple[int, ...]:
    """Columns of each rank: all equal, or each its own; multiples of 128 are cut without a change of bits."""
    columns = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 256, 257, 384, 640]), st.integers(1, 700))
    size = columns.map(lambda number: min(number, most))
    if draw(st.booleans()):
        return (draw(size),) * ranks
    return tuple(draw(size) for _ in range(ranks))


def starts_of(case: Case) -> list[int]:
    """The first column of each rank."""
    order = list(reversed(case.shards)) if case.reversed else list(case.shards)
    starts = [0, *accumulate(order)][:-1]
    return list(reversed(starts)) if case.reversed else starts


def vocab_size_of(case: Case) -> int | None:
    return sum(case.shards) - min(case.padding, sum(case.shards) - 1) if case.padding else None


def build(case: Case, device: torch.device) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)
    sizes = [(case.hidden_size, case.dtype)]
    if isinstance(case, JsdCase):
        sizes.append((case.teacher_size, case.teacher_dtype))
    heads = tuple(_head(case, size, DTYPES[dtype], generator, device) for size, dtype in sizes)
    valid = vocab_size_of(case) or sum(case.shards)
    keywords = {name: value for name, value in case.keywords.items() if value is not None}
    ignore_index = keywords["ignore_index"]
    labels = torch.randint(valid, case.shape, generator=generator)
    if case.unowned and not isinstance(case, JsdCase):
        nobody = torch.tensor([-1, valid, sum(case.shards), 2**40, -(2**63)])
        some = torch.rand(case.shape, generator=generator) < 0.2
        labels = torch.where(some, nobody[torch.randint(len(nobody), case.shape, generator=generator)], labels)
    labels = torch.where(torch.rand(case.shape, generator=generator) < case.ignored, ignore_index, labels)
    if str(keywords["temperature"]).startswith("per token"):
        temperature = torch.rand(case.shape, generator=generator) * 2 + 0.3
        if "unusable" in keywords["temperature"]:
            wrong = torch.tensor([0.0, -1.0, float("nan"), float("inf")])[
                torch.randint(4, case.shape, generator=generator)
            ]
            temperature = torch.where(torch.rand(case.shape, generator=generator) < 0.2, wrong, temperature)
        keywords["temperature"] = temperature.to(device)
    if isinstance(keywords.get("skip_ignored"), str):
        count = int((labels != ignore_index).sum())
        right = keywords["skip_ignored"] == "count"
        keywords["skip_ignored"] = count if right else count - 1 if count else labels.numel()
    upstream = {
        name: torch.randn(case.shape, generator=generator).to(device) if name in case.upstream else None
        for name in DIFFERENTIABLE
    }
    if width := keywords.get("candidates"):
        ids = torch.randint(-1, valid, (*case.shape, width), generator=generator)
        ids[..., 0] = torch.where((labels >= 0) & (labels < valid), labels, ids[..., 0])
        keywords["candidates"] = ids.to(device)
        grad = torch.randn(ids.shape, generator=generator).to(device)
        upstream["candidate_logprobs"] = grad if "candidate_logprobs" in case.upstream else None
    labels = labels.to(device)
    return Tensors(heads, labels, upstream, _poisoned(case, upstream, labels, keywords), keywords)


def _poisoned(
    case: Case, upstream: dict[str, Tensor | None], labels: Tensor, keywords: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The upstream gradients with the case's poison at ignored rows and at padded candidates."""
    if not case.poison:
        return upstream
    ignored, ids = labels == keywords["ignore_index"], keywords.get("candidates")
    poisoned = dict(upstream)
    for name, gradient in upstream.items():
        if gradient is None:
            continue
        nothing = ignored
        if name == "candidate_logprobs":
            assert ids is not None
            nothing = ids < 0  # `linear_logits_at` has no ignored rows
            if "entropy" in keywords:
                nothing = nothing | ignored[..., None]
        poisoned[name] = gradient.masked_fill(nothing, float(case.poison))
    return poisoned


def _head(
    case: Case, hidden_size: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Hidden and weight whose products have the case's spread and offset, within what fp16 holds."""
    hidden = torch.randn(*case.shape, hidden_size, generator=generator)
    weight = torch.randn(sum(case.shards), hidden_size, generator=generator) * (case.logit_std / hidden_size**0.5)
    if case.offset and hidden_size > 1:
        hidden[..., 0] = abs(case.offset) ** 0.5
        weight[:, 0] = case.offset / abs(case.offset) ** 0.5
    if case.keywords.get("logits_dtype") is not None:  # fp32 is to hold the products, so that all round them alike
        hidden, weight = _on_a_grid(hidden, 31), _on_a_grid(weight, 127)
    return hidden.to(device, dtype), weight.to(device, torch.float32 if case.fp32_weight else dtype)


def _on_a_grid(tensor: Tensor, steps: int) -> Tensor:
    """Multiples, at most so many, of a power of two."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    step = 2.0 ** math.ceil(math.log2(largest / steps)) if largest else 1.0
    return (tensor / step).round() * step


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere in memory, by operations whose gradient is exact."""
    if layout == "strided":  # every second element of a wider tensor
        return torch.stack((tensor, tensor.detach()), dim=-1)[..., 0]
    if layout == "shifted":  # one element off any alignment
        return torch.cat((tensor.new_zeros(1), tensor.reshape(-1)))[1:].view(tensor.shape)
    if layout == "sliced":  # rows further apart than they are long, and nothing between them to be read
        poison = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -7)
        return torch.cat((tensor, poison), dim=-1)[..., : tensor.shape[-1]]
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


class _Pending(torch.autograd.Function):
    """What torch's functional collectives that have a gradient return."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return AsyncCollectiveTensor(tensor.view_as(tensor))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def as_drawn(case: Case, tensor: Tensor) -> Tensor:
    """The same numbers as the case has them."""
    tensor = laid_out(tensor, case.layout)
    return _Pending.apply(tensor) if case.pending else tensor

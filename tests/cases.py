"""One call of an operation on any number of ranks: what tables, random calls and single-rank tests are made of."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.oracle import Upstream, random_upstream

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SEQUENCE = 12  # divisible by 1, 2, 3 and 4 ranks
SOMEWHERE = ("per token", "per token, some unusable")  # temperatures


def even(ranks: int) -> list[int]:
    return [20] * ranks


def uneven(ranks: int) -> list[int]:
    return [13 + 9 * (rank % 2) + rank for rank in range(ranks)]


class Ranks(NamedTuple):
    """Where a case runs."""

    backend: str
    group: ProcessGroup | None
    device: torch.device

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def number(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


@dataclass(frozen=True)
class Case:
    """One call, as a few numbers that its tensors follow from; of `linear_jsd` they go for both heads.

    Tables leave `shards` and `vocab_size` to the number of ranks, which `on` tells.
    """

    operation: str = "linear_cross_entropy"
    name: str = ""
    seed: int = 1234
    members: tuple[int, ...] = ()  # ranks of a random search that take part, in this order
    shape: tuple[int, ...] = (SEQUENCE, 1)  # of labels
    hidden_size: int = 24
    shards: tuple[int, ...] | Callable[[int], list[int]] = even  # columns of each rank
    vocab_size: int | Callable[[int], int] | None = None  # the columns behind it are padding
    reversed: bool = False  # the first rank has the last columns
    pass_vocab_start: bool = False  # also where equal shards need none
    dtype: torch.dtype = FP32
    fp32_weight: bool = False  # beside hidden of that dtype
    teacher_size: int = 40
    teacher_dtype: torch.dtype | None = None  # None: the student's
    weighted: bool = False  # the weights of the tokens' divergences are known in forward
    layout: str = "contiguous"  # of every tensor in memory
    default_dtype: torch.dtype = FP32  # torch's
    pending: bool = False  # every tensor is one that a functional collective is still filling
    logit_std: float = 6**0.5
    offset: float = 0.0  # of all logits, about
    ignored: float = 0.0  # share of the rows
    idle: float = 0.0  # share of the rows without an upstream gradient
    unowned: bool = False  # some rows have a label that nobody owns
    upstream: tuple[str, ...] | None = None  # outputs that take part in the loss; None: all there are
    poison: str = ""  # "nan", "inf" or "-inf" as the upstream gradient at ignored rows and padding; "": finite
    tail: int = 0  # of `linear_logits_at`: 0: ids are [..., K]; else CSR, with this many ids behind the last offset
    bits: bool = False  # outputs are compared with those of other calls
    wide_block: int | None = None  # how few tokens a block of backward's outer loop may hold
    change: Callable[["Whole"], None] | None = None  # edits the tensors in place
    keywords: dict[str, Any] = field(default_factory=dict)  # as an oracle takes them, but for some words

    def on(self, ranks: int) -> "Case":
        sizes = tuple(self.shards(ranks)) if callable(self.shards) else self.shards
        return replace(
            self, shards=sizes, vocab_size=self.vocab_size(ranks) if callable(self.vocab_size) else self.vocab_size
        )

    @property
    def starts(self) -> list[int]:
        """The first column of each rank."""
        order = -1 if self.reversed else 1
        return [0, *accumulate(self.shards[::order])][:-1][::order]

    @property
    def columns(self) -> int:
        """Of the vocabulary."""
        return self.vocab_size or sum(self.shards)


def case(name: str = "", **words: Any) -> Case:
    """A line of a table: fields of `Case`, and keywords of the call."""
    fields = {word: words.pop(word) for word in list(words) if word in Case.__dataclass_fields__}
    return Case(name=name, **fields, keywords=words)


class Whole(NamedTuple):
    """A case's tensors, whole, the same on every rank; both heads' where there are two."""

    case: Case
    heads: tuple[tuple[Tensor, Tensor], ...]  # hidden [..., H], weight [V, H]
    labels: Tensor
    upstream: Upstream
    poisoned: Upstream  # the same for the operation, with the case's poison where an output is 0
    keywords: dict[str, Any]  # the case's, its words replaced by what they stand for

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Upstream]:
        """Of an oracle of one head."""
        return *self.heads[0], self.labels, self.upstream


class Share:
    """A case on this rank: the whole, and which rows of hidden and columns of the vocabulary this rank holds."""

    def __init__(self, case: Case, ranks: Ranks, **changes: Any) -> None:
        self.ranks, self.case = ranks, case.on(ranks.number)
        self.whole = build(self.case, ranks.device)
        of_backend = {n: v[ranks.backend] for n, v in self.whole.keywords.items() if isinstance(v, dict)}
        self.whole.keywords.update(of_backend | changes)
        start, length = self.case.starts[ranks.rank], self.case.shape[0] // ranks.number
        self.columns, self.rows = slice(start, start + self.case.shards[ranks.rank]), slice(None)
        if self.whole.keywords.get("sequence_parallel"):
            self.rows = slice(ranks.rank * length, (ranks.rank + 1) * length)
        self.hidden, self.weight, self.labels, self.upstream = self.whole.inputs
        self.parts: dict[str, Any] = {"hidden_rows": self.rows, "weight_rows": self.columns}
        ends = zip(self.case.starts, self.case.shards, strict=True)
        self.shards = [slice(start, start + size) for start, size in ends]  # of all ranks
        in_fp32 = case.dtype == FP16 and (case.operation == "linear_token_loss" or case.weighted)
        if ranks.number > 1 and case.dtype != FP32 and not in_fp32:
            self.parts["shards"] = self.shards  # hidden's gradient is summed in 16 bits
        must_pass = case.pass_vocab_start or case.reversed or len(set(self.case.shards)) > 1
        self.keywords: dict[str, Any] = self.whole.keywords | {
            "tp_group": ranks.group,
            "vocab_start": start if must_pass else None,
            "vocab_size": self.case.vocab_size,
            "backend": ranks.backend,
        }

    @property
    def heads(self) -> list[Tensor]:
        """Hidden and weight of each head, this rank's part."""
        return [part for hidden, weight in self.whole.heads for part in (hidden[self.rows], weight[self.columns])]

    def drawn(self, tree: Any) -> Any:
        """Tensors as the case has them: laid out, and still to be waited for."""
        if isinstance(tree, dict):
            return {name: self.drawn(value) for name, value in tree.items()}
        if not isinstance(tree, Tensor):
            return tree
        tensor = laid_out(tree, self.case.layout)
        return Pending.apply(tensor) if self.case.pending else tensor


def build(case: Case, device: torch.device) -> Whole:
    generator = torch.Generator().manual_seed(case.seed)
    heads = [make_head(case, case.hidden_size, case.dtype, generator, device)]
    if case.operation == "linear_jsd":
        heads.append(make_head(case, case.teacher_size, case.teacher_dtype or case.dtype, generator, device))
    keywords = {name: value for name, value in case.keywords.items() if value is not None}
    ignore_index = keywords.get("ignore_index", -100)
    labels = torch.randint(case.columns, case.shape, generator=generator)
    upstream = random_upstream(case.shape, generator, entropy=keywords.get("entropy", True))
    if case.unowned and case.operation != "linear_jsd":
        nobody = torch.tensor([-1, case.columns, sum(case.shards), 2**31 + 3, 2**40, -(2**63)])
        labels = strewn(labels, nobody, generator)
    if case.ignored:
        labels = torch.where(torch.rand(case.shape, generator=generator) < case.ignored, ignore_index, labels)
    for name in ("temperature", "teacher_temperature"):
        if (kind := keywords.get(name)) not in SOMEWHERE:
            continue
        temperature = torch.rand(case.shape, generator=generator) * 2 + 0.3
        wrong = torch.tensor([0.0, -1.0, math.nan, math.inf, -math.inf])
        temperature = temperature if kind == SOMEWHERE[0] else strewn(temperature, wrong, generator)
        keywords[name] = temperature.to(device)
    if isinstance(kind := keywords.get("skip_ignored"), str):
        count = int((labels != ignore_index).sum())
        keywords["skip_ignored"] = count if kind == "count" else count - 1 if count else labels.numel()
    if width := keywords.get("candidates"):
        ids = torch.randint(-1, case.columns, (*case.shape, width), generator=generator)
        ids[..., 0] = torch.where((labels >= 0) & (labels < case.columns), labels, ids[..., 0])
        upstream = upstream._replace(candidate_logprobs=torch.randn(ids.shape, generator=generator))
        keywords["candidates"] = ids.to(device)
    if case.idle:
        idle = torch.rand(case.shape, generator=generator) < case.idle
        shapes = (None if u is None else (*idle.shape, *[1] * (u.dim() - idle.dim())) for u in upstream)
        upstream = Upstream(
            *(u if u is None else u.masked_fill(idle.view(s), 0.0) for u, s in zip(upstream, shapes, strict=True))
        )
    of_outputs = upstream._asdict().items()
    upstream = Upstream(
        **{n: u.to(device) for n, u in of_outputs if u is not None and n in (case.upstream or Upstream._fields)}
    )
    labels = labels.to(device)
    poisoned = poison(case, upstream, labels == ignore_index, keywords.get("candidates"))
    whole = Whole(case, tuple(heads), labels, upstream, poisoned, keywords)
    if case.change is not None:
        case.change(whole)
    return whole


def strewn(tensor: Tensor, values: Tensor, generator: torch.Generator) -> Tensor:
    """A third of the numbers replaced by the values in turn."""
    places = torch.randperm(tensor.numel(), generator=generator)[: -(-tensor.numel() // 3)]
    tensor = tensor.clone()
    tensor.view(-1)[places] = values[torch.arange(len(places)) % len(values)]
    return tensor


def poison(case: Case, upstream: Upstream, ignored: Tensor, ids: Tensor | None) -> Upstream:
    """The upstream gradients with the case's poison at ignored rows and at padded candidates."""
    if not case.poison:
        return upstream
    rows = upstream._asdict()
    nothing = dict.fromkeys(rows, ignored)
    if ids is not None:  # `linear_logits_at` has no ignored rows
        of_rows = torch.zeros_like(ignored) if case.operation == "linear_logits_at" else ignored
        nothing["candidate_logprobs"] = (ids < 0) | of_rows[..., None]
    value = float(case.poison)
    return Upstream(**{n: None if u is None else u.masked_fill(nothing[n], value) for n, u in rows.items()})


def make_head(
    case: Case, hidden_size: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Hidden and weight whose products have the case's spread and offset, within what fp16 holds."""
    hidden = torch.randn(*case.shape, hidden_size, generator=generator)
    weight = torch.randn(sum(case.shards), hidden_size, generator=generator) * (case.logit_std / hidden_size**0.5)
    if case.offset and hidden_size > 1:
        hidden[..., 0] = abs(case.offset) ** 0.5
        weight[:, 0] = case.offset / abs(case.offset) ** 0.5
    if case.keywords.get("logits_dtype") is not None:  # fp32 is to hold the products, so that all round them alike
        hidden, weight = on_a_grid(hidden, 31), on_a_grid(weight, 127)
    return hidden.to(device, dtype), weight.to(device, FP32 if case.fp32_weight else dtype)


def on_a_grid(tensor: Tensor, steps: int) -> Tensor:
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
        nothing = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else -7)
        return torch.cat((tensor, nothing), dim=-1)[..., : tensor.shape[-1]]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" else tensor


class Pending(torch.autograd.Function):
    """What torch's functional collectives that have a gradient return."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return AsyncCollectiveTensor(tensor.view_as(tensor))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

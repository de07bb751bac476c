"""One call of a model's output layer, and the fused operations on its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_lce.checks import validation
from megatron_lce.checks.together import laying_out, refuse, refusing
from megatron_lce.checks.validation import check_scalar
from megatron_lce.core.options import IGNORE_INDEX
from megatron_lce.megatron.captured_mtp import later_labels
from megatron_lce.megatron.gtp import is_gtp_sharded, with_whole_weight
from megatron_lce.megatron.heads import own_softcap
from megatron_lce.megatron.main_grad import main_grad_sink

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

T = TypeVar("T")
_PER_TOKEN = {"labels": 2, "temperature": 2, "teacher_temperature": 2, "candidates": 3, "ids": 3}


class StoredHead(NamedTuple):
    """A teacher of whose forward pass only the hidden states were stored, as `linear_divergence` takes it.

        teacher_head = megatron_lce.StoredHead(hidden, weight)

    Its scale and softcap are keywords: `teacher_logits_scale`, `teacher_softcap`.
    """

    hidden: Tensor  # [b, s, H], of the whole sequence; behind the teacher's last norm
    weight: Tensor  # [V/tp, H], this rank's rows of the vocabulary

    def __repr__(self) -> str:
        parts = (
            f"{name} {list(part.shape)} {part.dtype} on {part.device}"
            if isinstance(part, Tensor)
            else f"{name} {type(part).__name__}"
            for name, part in self._asdict().items()
        )
        return f"StoredHead({', '.join(parts)})"


class HeadCall:
    """One call of a model's output layer: all that determines its logits."""

    def __init__(self, head: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None):
        device = hidden.device.type
        self.head = head
        self.hidden = hidden  # [s, b, H], under sequence parallel this rank's [s/tp, b, H]
        self.weight: Tensor = head.weight if weight is None else weight  # [V/tp, H]: a tied embedding's is given
        self.sequence_parallel = bool(head.sequence_parallel)  # in inference Megatron sets another for a while
        shards = head.tp_group.size() if self.sequence_parallel else 1
        # The shape of labels as Megatron passes them.
        self.batch_and_sequence = hidden.shape[1], hidden.shape[0] * shards
        self.versions = tensor_version(hidden), tensor_version(self.weight)
        self.autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.with_gradient = torch.is_grad_enabled()  # hidden may have a graph
        self.logits_scale = 1.0
        self.depth = 0  # of multi-token prediction; 0: the main head
        self.ends = torch.empty(0, dtype=torch.int64)  # [s], see `sequence_ends`, where MTP heads are captured

    def scaled(self, factor: float) -> HeadCall:
        call = copy.copy(self)
        call.logits_scale *= factor
        return call

    def run(self, operation: Callable[..., T], labels: Any, *others: Any, **keywords: Any) -> T:
        """Run an operation on this hidden and weight; labels, tensors per token and results are [b, s]."""

        def run_on(weight: Tensor) -> T:
            of_rows = self.sequence_first("labels", self.labels_of_rows(labels, keywords, self.depth))
            return operation(self.hidden, weight, of_rows, *others, **self.keywords(keywords))

        with laying_out():
            gathers = is_gtp_sharded(self.head)
            return batch_first(with_whole_weight(self.weight, run_on) if gathers else run_on(self.weight))

    @property
    def columns(self) -> int:
        """V/tp, also of a weight that is sharded further."""
        return self.head.output_size_per_partition if is_gtp_sharded(self.head) else self.weight.shape[0]

    def labels_of_rows(self, labels: Any, keywords: Mapping[str, Any], shift: int) -> Any:
        """Return the labels [b, s] of the tokens that the rows predict, given those of rows `shift` further on."""
        # Others are refused later.
        sound = isinstance(labels, Tensor) and tuple(labels.shape) == self.batch_and_sequence
        if shift == 0 or not sound:
            return labels
        return later_labels(labels, self.ends, shift, keywords.get("ignore_index", IGNORE_INDEX))

    def check_teacher(self, teacher: Any) -> None:
        name = "teacher_head"
        if isinstance(teacher, HeadCall):
            teacher.check_unchanged()
            wanted = f"predict no later token than depth {self.depth}"
            validation.require(self.depth >= teacher.depth, name, wanted, f"depth {teacher.depth}")
            ranks, own_ranks = (dist.get_process_group_ranks(call.head.tp_group) for call in (teacher, self))
            pairs = [
                ("sequence_parallel", self.sequence_parallel, teacher.sequence_parallel),
                ("tokens [b, s]", self.batch_and_sequence, teacher.batch_and_sequence),
                ("ranks in tp_group", own_ranks, ranks),
            ]
        elif isinstance(teacher, StoredHead):
            name = "teacher_head.hidden"
            validation.check_tensor(name, teacher.hidden)
            pairs = [("tokens [b, s]", self.batch_and_sequence, tuple(teacher.hidden.shape[:2]))]
        else:
            raise TypeError(f"{name} must be a captured head or a StoredHead, got {type(teacher).__name__}")
        for words, own, got in pairs:
            validation.require(got == own, name, f"have the student's {words}, {own}", got)

    def compared_with(self, teacher: Any, options: Mapping[str, Any]) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """Return a teacher's hidden, [s, b, H] or this rank's [s/tp, b, H], and weight, and a divergence's keywords.

        Rows without one of the same token are ignored. What a refused teacher has in place of its tensors makes the
        call one of a new kind, as it is on the other ranks.
        """
        forms, depth = self.form(options, "student_"), 0
        hidden, weight = getattr(teacher, "hidden", teacher), getattr(teacher, "weight", teacher)
        if isinstance(teacher, HeadCall):
            forms, depth = forms | teacher.form(options, "teacher_"), teacher.depth
        elif isinstance(hidden, Tensor) and tuple(hidden.shape[:2]) == self.batch_and_sequence:  # others are refused
            hidden = transpose_batch_sequence(hidden)
            if self.sequence_parallel:
                hidden = hidden.chunk(self.head.tp_group.size())[self.head.tp_group.rank()]
        shift, labels, further = self.depth - depth, options.get("labels"), self.depth
        if labels is None and shift > 0:
            ignores_none, further = int(options.get("ignore_index", IGNORE_INDEX) == 0), shift
            labels = self.hidden.new_full(self.batch_and_sequence, ignores_none, dtype=torch.int64)
        labels = self.labels_of_rows(labels, options, further)
        given = self.call_keywords({**options, **forms, "labels": labels})
        return (hidden, weight), given | {"_teacher_shift": shift}

    def keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caller's keywords combined with the head's scale and softcap, for an operation on one head."""
        keywords = self.call_keywords(given) | self.form(given)
        scale, temperature = keywords["logits_scale"], keywords.get("temperature", 1.0)
        if own_softcap(self.head) is None or scale == 1.0:
            return keywords
        with refusing():  # the scale comes after the head, so after its cap
            check_scalar("logits_scale", scale, positive=True)
            if not isinstance(temperature, Tensor):
                check_scalar("temperature", temperature, positive=True)
                temperature /= scale
            elif temperature.is_floating_point():  # others are refused later
                temperature = temperature.float() / scale  # 16 bits would round the quotient
        return keywords | {"logits_scale": 1.0, "temperature": temperature}

    def call_keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caller's keywords, with [b, s] tensors as [s, b], and the keywords that the head fixes."""
        fixed_by_head = {"tp_group", "sequence_parallel", "vocab_start", "reduce_grad_hidden", "weight_grad_sink"}
        if fixed := fixed_by_head & given.keys():
            refuse(TypeError(f"{', '.join(sorted(fixed))} must not be given: the captured head fixes them"))
            given = {name: value for name, value in given.items() if name not in fixed}
        self.check_unchanged()
        keywords = {n: self.sequence_first(n, value) if n in _PER_TOKEN else value for n, value in given.items()}
        return keywords | {
            "tp_group": self.head.tp_group,
            "sequence_parallel": self.sequence_parallel,
            "weight_grad_sink": main_grad_sink(self.weight, self.head),
        }

    def form(self, given: Mapping[str, Any], whose: str = "") -> dict[str, Any]:
        """Return the caller's scale and softcap combined with the head's own; `whose`: "student_", say."""
        factor, softcap = given.get(f"{whose}logits_scale", 1.0), given.get(f"{whose}softcap")
        own, scale = own_softcap(self.head), 1.0
        with refusing():
            check_scalar(f"{whose}logits_scale", factor)
            own_softcap(self.head, softcap)
            scale = factor * self.logits_scale
            if whose and own is not None and scale != 1.0:
                raise ValueError(f"{whose}logits_scale must be 1 where the head has a softcap before it, got {scale}")
        return {f"{whose}logits_scale": scale, f"{whose}softcap": softcap if own is None else own}

    def sequence_first(self, name: str, per_token: Any) -> Any:
        """Return a tensor [b, s, ...] as [s, b, ...], and anything else unchanged."""
        if not isinstance(per_token, Tensor):
            return per_token
        shape, dims = tuple(per_token.shape), _PER_TOKEN.get(name)
        if shape[:2] != self.batch_and_sequence or len(shape) != (dims or len(shape)) or (dims == 3 and shape[2] == 0):
            form = f"[b, s, K], {self.batch_and_sequence} first" if dims == 3 else f"[b, s], {self.batch_and_sequence}"
            refuse(ValueError(f"{name} must be {form} for this hidden, got {shape}"))
            return per_token
        return transpose_batch_sequence(per_token)

    def keep_inference_tensors(self) -> None:
        """Copy tensors of inference mode, which have no version that tells of changes in place."""
        self.hidden, self.weight = (t.clone() if t.is_inference() else t for t in (self.hidden, self.weight))
        self.versions = tensor_version(self.hidden), tensor_version(self.weight)

    def check_unchanged(self) -> None:
        """Refuse hidden or weight if it has changed since the forward pass."""
        for name, tensor, version in zip(("hidden", "weight"), (self.hidden, self.weight), self.versions, strict=True):
            if tensor_version(tensor) != version:
                refuse(RuntimeError(f"the LM head's {name} was changed in place after the forward pass"))
            if not torch.compiler.is_compiling() and tensor.numel() and not tensor.untyped_storage().size():
                refuse(RuntimeError(f"the LM head's {name} was freed, as by FSDP, after the forward pass"))


def tensor_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def batch_first(result: T) -> T:
    """Return the result of an operation with each of its tensors [s, b, ...] as [b, s, ...]."""
    return tree_map_only(Tensor, lambda part: transpose_batch_sequence(part) if part.dim() > 1 else part, result)


def csr_sequence_first(
    ids: Tensor, offsets: Tensor, batch_and_sequence: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return CSR over tokens [b, s] as CSR over [s, b], and each id's place in the former; None: the same places."""
    batch, sequence = batch_and_sequence
    sound = isinstance(offsets, Tensor) and tuple(offsets.shape) == (batch * sequence + 1,)
    if batch == 1 or not sound or not isinstance(ids, Tensor) or ids.numel() == 0:  # wrong ones are refused later
        return ids, offsets, None
    row = torch.arange(batch * sequence, dtype=torch.int64, device=offsets.device).view(batch, sequence).T.reshape(-1)
    new = torch.cat([offsets[:1], offsets[:1] + offsets.diff()[row].cumsum(0)])
    place = torch.arange(ids.shape[0], dtype=torch.int64, device=offsets.device)
    new_row = torch.searchsorted(new[1:].contiguous(), place, right=True).clamp_(max=row.shape[0] - 1)
    permutation = (place + (offsets[:-1][row] - new[:-1])[new_row]).clamp_(0, ids.shape[0] - 1)
    return ids[permutation], new, permutation


def transpose_batch_sequence(per_token: Tensor) -> Tensor:
    return per_token.transpose(0, 1).contiguous()

"""One call of a model's output layer, and the fused operations on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from megatron_lce.checks.validation import check_number
from megatron_lce.megatron.heads import check_softcap, logits_dtype_of, softcap_of
from megatron_lce.megatron.main_grad import main_grad_sink

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

T = TypeVar("T")
_PER_TOKEN = {"labels": 2, "temperature": 2, "token_weights": 2, "teacher_temperature": 2, "candidates": 3, "ids": 3}


@dataclass(frozen=True)
class HeadCall:
    """One call of a model's output layer: all that determines its logits."""

    hidden: Tensor  # [s, b, H], under sequence parallel this rank's [s/tp, b, H]
    weight: Tensor  # [V/tp, H]
    head: ColumnParallelLinear
    sequence_parallel: bool  # when the head was called: in inference Megatron sets another for a while
    versions: tuple[int, int]  # of hidden and weight when the head was called
    autocast_dtype: torch.dtype | None  # None: autocast was off
    with_gradient: bool  # hidden may have a graph
    logits_scale: float = 1.0

    @classmethod
    def of(cls, head: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None) -> HeadCall:
        """Return the call; `weight` is the tied embedding's, or None for the head's own."""
        weight, device = head.weight if weight is None else weight, hidden.device.type
        return cls(
            hidden=hidden,
            weight=weight,
            head=head,
            sequence_parallel=bool(head.sequence_parallel),
            versions=(version_of(hidden), version_of(weight)),
            autocast_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            with_gradient=torch.is_grad_enabled(),
        )

    @property
    def tp_group(self) -> ProcessGroup:
        return self.head.tp_group

    @property
    def tokens(self) -> tuple[int, int]:
        """(b, s), the shape of labels as Megatron passes them."""
        shards = self.tp_group.size() if self.sequence_parallel else 1
        return self.hidden.shape[1], self.hidden.shape[0] * shards

    @property
    def ranks(self) -> list[int]:
        return torch.distributed.get_process_group_ranks(self.tp_group)

    def run(self, operation: Callable[..., T], labels: Tensor, *others: Any, **keywords: Any) -> T:
        """Run an operation on this hidden and weight; labels, tensors per token and results are [b, s]."""
        keywords, labels = self.keywords(keywords), self.sequence_first("labels", labels)
        return batch_first(operation(self.hidden, self.weight, labels, *others, **keywords))

    def keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caller's keywords combined with the head's scale and softcap, for an operation on one head."""
        keywords = self.call_keywords(given)
        temperature, logits_scale = keywords.get("temperature", 1.0), keywords.get("logits_scale", 1.0)
        check_number("logits_scale", logits_scale)
        check_softcap(self.head, keywords.get("softcap"))
        logits_scale *= self.logits_scale
        softcap = softcap_of(self.head)
        if softcap is None:
            return keywords | {"logits_scale": logits_scale}
        if logits_scale != 1.0:  # after the head, so after its cap
            check_number("logits_scale", logits_scale, positive=True)
            if not isinstance(temperature, Tensor):
                check_number("temperature", temperature, positive=True)
                temperature /= logits_scale
            elif temperature.is_floating_point():  # others are refused later
                temperature = temperature.float() / logits_scale  # 16 bits would round the quotient
        return keywords | {"softcap": softcap, "logits_scale": 1.0, "temperature": temperature}

    def call_keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caller's keywords, with [b, s] tensors as [s, b], and the keywords that the head fixes."""
        self.check_unchanged()
        keywords = {n: self.sequence_first(n, value) if n in _PER_TOKEN else value for n, value in given.items()}
        return keywords | {
            "tp_group": self.tp_group,
            "sequence_parallel": self.sequence_parallel,
            "weight_grad_sink": main_grad_sink(self.weight, self.head),
        }

    def form(self, role: str, keywords: dict[str, Any]) -> dict[str, Any]:
        """Take one head's scale and softcap of a divergence out of the caller's keywords."""
        logits_scale, softcap = keywords.pop(f"{role}_logits_scale", 1.0), keywords.pop(f"{role}_softcap", None)
        check_number(f"{role}_logits_scale", logits_scale)
        check_softcap(self.head, softcap)
        own, scale = softcap_of(self.head), logits_scale * self.logits_scale
        if own is not None and scale != 1.0:
            raise ValueError(f"{role}_logits_scale must be 1 where the head has a softcap before it, got {scale}")
        return {f"{role}_logits_scale": scale, f"{role}_softcap": softcap if own is None else own}

    def sequence_first(self, name: str, per_token: Any) -> Any:
        """Return a tensor [b, s, ...] as [s, b, ...], and anything else unchanged."""
        if not isinstance(per_token, Tensor):
            return per_token
        shape, dims = tuple(per_token.shape), _PER_TOKEN.get(name)
        if shape[:2] != self.tokens or len(shape) != (dims or len(shape)) or (dims == 3 and shape[2] == 0):
            form = f"[b, s, K], {self.tokens} first" if dims == 3 else f"[b, s], {self.tokens}"
            raise ValueError(f"{name} must be {form} for this hidden, got {shape}")
        return swap(per_token)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of the logits that Megatron's head returns."""
        return logits_dtype_of(self.head) or self.autocast_dtype or self.hidden.dtype

    def check_unchanged(self) -> None:
        """Raise if hidden or weight has changed since the forward pass."""
        for name, tensor, version in zip(("hidden", "weight"), (self.hidden, self.weight), self.versions, strict=True):
            if version_of(tensor) != version:
                raise RuntimeError(f"the LM head's {name} was changed in place after the forward pass")
            if not torch.compiler.is_compiling() and tensor.numel() and not tensor.untyped_storage().size():
                raise RuntimeError(f"the LM head's {name} was freed, as by FSDP, after the forward pass")


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def check_not_fixed(keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that the head fixes."""
    fixed_by_head = {"tp_group", "sequence_parallel", "vocab_start", "reduce_grad_hidden", "weight_grad_sink"}
    fixed = fixed_by_head & keywords.keys()
    if fixed:
        raise TypeError(f"{', '.join(sorted(fixed))} must not be given: the captured head fixes them")


def batch_first(result: T) -> T:
    """Return the result of an operation with each of its tensors [s, b, ...] as [b, s, ...]."""
    return tree_map_only(Tensor, lambda part: swap(part) if part.dim() > 1 else part, result)


def csr_sequence_first(ids: Tensor, offsets: Tensor, tokens: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return CSR over tokens [b, s] as CSR over [s, b], and each id's place in the former; None: the same places."""
    batch, sequence = tokens
    sound = isinstance(offsets, Tensor) and tuple(offsets.shape) == (batch * sequence + 1,)
    if batch == 1 or not sound or not isinstance(ids, Tensor) or ids.numel() == 0:  # wrong ones are refused later
        return ids, offsets, None
    row = torch.arange(batch * sequence, dtype=torch.int64, device=offsets.device).view(batch, sequence).T.reshape(-1)
    new = torch.cat([offsets[:1], offsets[:1] + offsets.diff()[row].cumsum(0)])
    place = torch.arange(ids.shape[0], dtype=torch.int64, device=offsets.device)
    new_row = torch.searchsorted(new[1:].contiguous(), place, right=True).clamp_(max=row.shape[0] - 1)
    places = (place + (offsets[:-1][row] - new[:-1])[new_row]).clamp_(0, ids.shape[0] - 1)
    return ids[places], new, places


def swap(per_token: Tensor) -> Tensor:
    return per_token.transpose(0, 1).contiguous()

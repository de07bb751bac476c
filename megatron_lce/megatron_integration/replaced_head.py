"""A model's head and loss, whose methods stand in place of Megatron's while they are open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_lce.megatron_integration.method_overrides import argument_names, open_override, with_labels
from megatron_lce.megatron_integration.output_hooks import keep_hooks_off_uncomputed_logits

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import ColumnParallelLinear


class ReplacedHead(ABC):
    """It replaces an output layer's forward and a model's loss, and sees where each pass begins and ends."""

    def __init__(self, language_model: LanguageModule):
        self.language_model = language_model
        self.head: ColumnParallelLinear = language_model.output_layer
        self.mtp_layers: int = language_model.config.mtp_num_layers or 0
        self.mtp_losses_left = 0  # in this pass, in front of the main one
        self.in_pass: nn.Module | None = None  # the model whose forward runs; a shallow copy has the original's hooks
        keep_hooks_off_uncomputed_logits(self.head)
        self._hooks = (
            language_model.register_forward_pre_hook(self._start_pass, with_kwargs=True),
            language_model.register_forward_hook(self._end_pass, always_call=True),
        )
        self.overrides = (
            open_override(self.head, "forward", self),
            open_override(language_model, "compute_language_model_loss", self),
        )

    def close(self) -> None:
        for override in self.overrides:
            override.close(self)
        for hook in self._hooks:
            hook.remove()

    @abstractmethod
    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **of_loss: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """In place of the output layer's.

        With `output_cross_entropy_loss` among `of_loss` it is LinearCrossEntropyModule's, of Megatron's dev branch: the
        loss at once, of the labels, the reduction and the ignore_index there. Other heads have no such argument.
        """

    @abstractmethod
    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """In place of LanguageModule's, for the main loss and for MTP's: labels [b, s] to loss [b, s]."""

    @abstractmethod
    def start_pass(self, given: dict[str, Any], takes_labels: bool) -> Tensor | None:
        """In front of the model's forward with the arguments `given`: the labels it is to have instead, or None."""

    def _start_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        names = argument_names(type(model).forward)
        self.in_pass, self.mtp_losses_left = model, self.mtp_layers
        labels = self.start_pass(dict(zip(names, args, strict=False)) | kwargs, "labels" in names)
        return None if labels is None else with_labels(names, args, kwargs, labels)

    def _end_pass(self, *_: Any) -> None:
        self.in_pass = None

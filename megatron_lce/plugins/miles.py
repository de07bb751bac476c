"""miles: logprobs, entropy and the SFT loss without logits.

    --custom-megatron-init-path megatron_lce.plugins.miles.install

Only tokens of responses are computed. A critic, a `custom_loss`, the true on-policy mode and `allgather_cp` keep their
logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lce.plugins.capturing import captured_if, rows_of
from megatron_lce.plugins.replacing import Plugin
from megatron_lce.plugins.targets import found

PROCESSORS = "miles.backends.training_utils.loss_hub.logit_processors"
MODEL = "miles.backends.megatron_utils.model"
LOG_PROBS = f"{PROCESSORS}:get_log_probs_and_entropy"
LOSSES = "policy_loss", "sft_loss"  # those that read logprobs and entropy only


def log_probs_and_entropy(own: Callable[..., Any]) -> Callable[..., Any]:
    """miles' function of logits; for a captured head ours, of the rows that miles takes of logits."""
    get_responses = own.__globals__["get_responses"]

    def ours(
        logits: Tensor,
        *,
        args: Any,
        with_entropy: bool = False,
        entropy_requires_grad: bool = True,
        non_loss_data: bool = True,
        **of_batch: Any,
    ) -> dict[str, list[Tensor]]:
        head = getattr(logits, "lm_head", None)
        if head is None:
            keywords = {"with_entropy": with_entropy, "entropy_requires_grad": entropy_requires_grad}
            return own(logits, args=args, non_loss_data=non_loss_data, **keywords, **of_batch)
        numbers = rows_of(head)
        chunks = list(get_responses(numbers.float()[..., None], args=args, **of_batch))
        parts, tokens = [rows[:, 0].long() for rows, _ in chunks], torch.cat([tokens for _, tokens in chunks])
        counted = torch.cat(parts)
        labels = torch.full_like(numbers.flatten(), -100).index_copy(0, counted, tokens).view_as(numbers)
        temperature = args.rollout_temperature if args.rollout_temperature > 0 else 1.0
        out = head.linear_cross_entropy(labels, temperature, entropy=with_entropy, skip_ignored=len(counted))
        found = {"log_probs": out.logprobs}
        if with_entropy:
            found["entropy"] = out.entropy if entropy_requires_grad else out.entropy.detach()
        return {name: [values.flatten()[rows] for rows in parts] for name, values in found.items()}

    return ours


def takes_head(args: Any) -> bool:
    return not (args.true_on_policy_mode or args.allgather_cp)


plugin = Plugin(
    "miles",
    {
        LOG_PROBS: log_probs_and_entropy,
        f"{MODEL}:forward_only": captured_if(lambda x: takes_head(x["args"]) and x["f"] is found(LOG_PROBS)),
        f"{MODEL}:train_one_step": captured_if(lambda x: takes_head(x["args"]) and x["args"].loss_type in LOSSES),
    },
    f"{PROCESSORS}:get_responses",
)
install, uninstall = plugin.install, plugin.uninstall
install()

"""slime: logprobs, entropy, replay of top-p and the SFT loss without logits.

    --custom-megatron-init-path megatron_lce.plugins.slime.install

Only tokens of responses are computed. A critic and a `custom_loss` keep their logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lce.plugins.capturing import captured_if, check_calls, rebound, rows_of
from megatron_lce.plugins.replacing import Plugin
from megatron_lce.plugins.targets import found

PACKAGE = "slime.backends.megatron_utils"
LOG_PROBS = f"{PACKAGE}.loss:get_log_probs_and_entropy"
LOSSES = "policy_loss", "sft_loss"  # those that read logprobs and entropy only


def log_probs_and_entropy(own: Callable[..., Any]) -> Callable[..., Any]:
    """slime's own function of logits, in which our function of a captured head takes the place of the arithmetic."""
    of_slime = own.__globals__
    check_calls(own, "calculate_log_probs_and_entropy", "_build_topp_keep_mask", "_extract_per_sample")
    check_calls(of_slime["_build_topp_keep_mask"], "_fill_topp_mask_rows")

    def ours(logits: Tensor, *, args: Any, total_lengths: Any, response_lengths: Any, **keywords: Any) -> Any:
        keywords |= {"args": args, "total_lengths": total_lengths, "response_lengths": response_lengths}
        head = getattr(logits, "lm_head", None)
        if head is None:
            return own(logits, **keywords)
        numbers = rows_of(head)[0]
        parts, _ = of_slime["_extract_per_sample"](numbers, None, total_lengths, response_lengths, args.allgather_cp)
        counted, temperature = torch.cat(parts), getattr(args, "rollout_temperature", 1.0)
        sets: list[list[int] | None] = [None] * len(numbers)  # None: the whole vocabulary

        def keep(mask: Tensor, ids: list, offsets: list, first: int, row: int, count: int, *_: int) -> None:
            for i in range(first, min(first + count, len(offsets) - 1)):
                sets[row + i - first] = ids[offsets[i] : offsets[i + 1]]

        def calculate(_: Tensor, tokens: Tensor, group: Any, **of: Any) -> tuple[Tensor, Tensor | None]:
            labels, entropy = torch.full_like(tokens, -100).index_copy(0, counted, tokens[counted])[None], None
            if of["with_entropy"] or of["log_prob_keep_mask"] is None:
                options = {"entropy": of["with_entropy"], "skip_ignored": len(counted)}
                out = head.linear_cross_entropy(labels, temperature, **options)
                log_probs, entropy = out.logprobs, out.entropy[0] if of["with_entropy"] else None
            if of["log_prob_keep_mask"] is not None:  # the label is always kept
                pairs = zip(sets, tokens.tolist(), strict=True)
                kept = [[] if ids is None else [*ids, token] for ids, token in pairs]
                ids = torch.tensor([i for ids in kept for i in ids], dtype=torch.long, device=tokens.device)
                ends = torch.tensor([0, *map(len, kept)], dtype=torch.long, device=tokens.device).cumsum(0)
                log_probs = head.support_logprobs(labels, ids, ends, temperature=temperature)
            return log_probs[0, :, None], entropy if entropy is None or of["with_entropy_grad"] else entropy.detach()

        mask = rebound(of_slime["_build_topp_keep_mask"], _fill_topp_mask_rows=keep)
        run = rebound(own, calculate_log_probs_and_entropy=calculate, _build_topp_keep_mask=mask)
        return run(numbers.float()[None, :, None], **keywords)

    return ours


plugin = Plugin(
    "slime",
    {
        LOG_PROBS: log_probs_and_entropy,
        f"{PACKAGE}.model:forward_only": captured_if(lambda given: given["f"] is found(LOG_PROBS)),
        f"{PACKAGE}.model:train_one_step": captured_if(lambda given: given["args"].loss_type in LOSSES),
    },
)
install, uninstall = plugin.install, plugin.uninstall
install()

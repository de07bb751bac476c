"""slime: logprobs, entropy, replay of top-p and the SFT loss of response tokens, without logits.

--custom-megatron-init-path megatron_lce.plugins.slime.install
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_lce.plugins.captured_steps import Responses, captured_if, reads_log_probs
from megatron_lce.plugins.patching import Plugin

LOSS, MODEL = "slime.backends.megatron_utils.loss", "slime.backends.megatron_utils.model"


def log_probs_and_entropy(original: Any, logits: Any, *, args: Any, **batch: Any) -> Any:
    if not hasattr(logits, "lm_head"):
        return original(logits, args=args, **batch)
    batch.pop("non_loss_data", None)
    entropy, entropy_grad = batch.pop("with_entropy", False), getattr(args, "entropy_coef", 0.0) != 0
    ids, offsets = batch.pop("top_p_token_ids", None), batch.pop("top_p_token_offsets", None)
    head, temperature, of_slime = logits.lm_head, getattr(args, "rollout_temperature", 1.0), original.__globals__
    of_tokens = functools.partial(Responses, head, of_slime["get_responses"], args=args, apply_temperature=False)
    responses = of_tokens(**batch)
    values = {}
    if entropy or ids is None:
        values = responses.log_probs_and_entropy(temperature, entropy, entropy_grad)
    if ids is not None:
        samples = zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)
        steps = [torch.ones_like(tokens).cumsum(0) + length - len(tokens) for tokens, length in samples]  # from 1
        sets = top_p_sets(responses, of_tokens(**batch | {"unconcat_tokens": steps}).tokens, ids, offsets)
        log_probs = head.support_logprobs(responses.labels, *sets, temperature=temperature)
        values["log_probs"] = responses.by_sample(log_probs)
    if args.allgather_cp:
        lengths = {name: batch[name] for name in ("total_lengths", "response_lengths")}
        of_slime["_allgather_cp_redistribute"](values, logits_local_len=responses.labels.numel(), **lengths)
    return torch.empty(0, dtype=torch.float32, device=logits.device), values


def top_p_sets(responses: Responses, steps: list[Tensor], ids: Any, offsets: Any) -> tuple[Tensor, Tensor]:
    """Returns the recorded ids and the label of each token, as CSR. A token without a record gets the empty set."""
    sets: list[list[int]] = [[]] * responses.labels.numel()
    for i, sample in enumerate(zip(responses.token_index, steps, responses.tokens, strict=True)):
        recorded, ends = (torch.as_tensor(given[i], dtype=torch.int64).tolist() for given in (ids, offsets))
        for row, step, token in torch.stack(sample, 1).tolist():
            if step < len(ends):
                sets[row] = [*recorded[ends[step - 1] : ends[step]], token]
    device = responses.labels.device
    flat = torch.tensor([*itertools.chain(*sets)], dtype=torch.int64, device=device)
    return flat, torch.tensor([0, *map(len, sets)], dtype=torch.int64, device=device).cumsum(0)


step = captured_if(reads_log_probs)
BATCH = "args, unconcat_tokens, total_lengths, response_lengths"
OPTIONS = "with_entropy, non_loss_data, top_p_token_ids, top_p_token_offsets"
replacements = {f"{MODEL}:forward_only(f, args, model, ...)": step, f"{MODEL}:train_one_step(args, model, ...)": step}
replacements[f"{LOSS}:get_log_probs_and_entropy(logits, {BATCH}, {OPTIONS})"] = log_probs_and_entropy
needs = f"{LOSS}:get_responses(logits, {BATCH}, apply_temperature)"
redistribute = f"{LOSS}:_allgather_cp_redistribute(res, logits_local_len, total_lengths, response_lengths)"
plugin = Plugin("slime", replacements, needs, redistribute)
install, uninstall = plugin.install, plugin.uninstall
install()

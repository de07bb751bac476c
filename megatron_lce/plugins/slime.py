"""slime: logprobs, entropy, replay of top-p and the SFT loss of response tokens, without logits."""

import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_lce.plugins.captured_steps import BATCH, Responses, reads_log_probs, steps_of
from megatron_lce.plugins.patching import Table, installed


def log_probs_and_entropy(call: Any) -> Any:
    if not hasattr(call.logits, "lm_head"):
        return call.run()
    args, ids, entropy = call.args, call.top_p_token_ids, call.with_entropy
    temperature, entropy_grad = getattr(args, "rollout_temperature", 1.0), getattr(args, "entropy_coef", 0.0) != 0
    responses, values = Responses(call, apply_temperature=False), {}
    if entropy or ids is None:
        values = responses.log_probs_and_entropy(temperature, entropy, entropy_grad)
    if ids is not None:
        samples = zip(call.unconcat_tokens, call.response_lengths, strict=True)
        numbers = [torch.ones_like(tokens).cumsum(0) + length - len(tokens) for tokens, length in samples]  # from 1
        steps = Responses(call, apply_temperature=False, unconcat_tokens=numbers).tokens
        sets = top_p_sets(responses, steps, ids, call.top_p_token_offsets)
        log_probs = responses.head.support_logprobs(responses.labels, *sets, temperature=temperature)
        values["log_probs"] = responses.by_sample(log_probs)
    if args.allgather_cp:
        lengths = {"total_lengths": call.total_lengths, "response_lengths": call.response_lengths}
        redistribute = call.original.__globals__["_allgather_cp_redistribute"]
        redistribute(values, logits_local_len=responses.labels.numel(), **lengths)
    return torch.empty(0, dtype=torch.float32, device=call.logits.device), values


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


LOSS = "slime.backends.megatron_utils.loss"
OPTIONS = "with_entropy, non_loss_data, top_p_token_ids, top_p_token_offsets"
functions: Table = {
    **steps_of("slime", reads_log_probs),
    f"{LOSS}:get_log_probs_and_entropy(logits, {BATCH}, {OPTIONS})": log_probs_and_entropy,
    f"{LOSS}:get_responses(logits, {BATCH}, apply_temperature)": None,
    f"{LOSS}:_allgather_cp_redistribute(res, logits_local_len, total_lengths, response_lengths)": None,
}
plugin, install, uninstall = installed("slime", "0.3.1, main", functions)

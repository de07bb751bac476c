"""miles: logprobs, entropy and the SFT loss of response tokens, without logits.

--custom-megatron-init-path megatron_lce.plugins.miles.install
"""

from typing import Any

from megatron_lce.plugins.captured_steps import Responses, captured_if, reads_log_probs
from megatron_lce.plugins.patching import Plugin

PROCESSORS = "miles.backends.training_utils.loss_hub.logit_processors"
MODEL = "miles.backends.megatron_utils.model"


def log_probs_and_entropy(original: Any, logits: Any, *, args: Any, **batch: Any) -> Any:
    if not hasattr(logits, "lm_head"):
        return original(logits, args=args, **batch)
    batch.pop("non_loss_data", None)
    entropy, entropy_grad = batch.pop("with_entropy", False), batch.pop("entropy_requires_grad", True)
    responses = Responses(logits.lm_head, original.__globals__["get_responses"], args=args, **batch)
    temperature = args.rollout_temperature if args.rollout_temperature > 0 else 1.0
    return responses.log_probs_and_entropy(temperature, entropy, entropy_grad)


@captured_if
def step(given: Any) -> bool:
    return reads_log_probs(given) and not (given["args"].true_on_policy_mode or given["args"].allgather_cp)


BATCH = "args, unconcat_tokens, total_lengths, response_lengths"
OPTIONS = "with_entropy, entropy_requires_grad, non_loss_data"
replacements = {f"{MODEL}:forward_only(f, args, model, ...)": step, f"{MODEL}:train_one_step(args, model, ...)": step}
of_logits = f"{PROCESSORS}:get_log_probs_and_entropy(logits, {BATCH}, {OPTIONS}, max_seq_lens)"
replacements[of_logits] = log_probs_and_entropy
plugin = Plugin("miles", replacements, f"{PROCESSORS}:get_responses(logits, {BATCH}, max_seq_lens)")
install, uninstall = plugin.install, plugin.uninstall
install()

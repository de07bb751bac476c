"""miles: logprobs, entropy and the SFT loss of response tokens, without logits."""

from typing import Any

from megatron_lce.plugins.captured_steps import BATCH, Responses, reads_log_probs, steps_of
from megatron_lce.plugins.patching import Table, installed


def log_probs_and_entropy(call: Any) -> Any:
    if not hasattr(call.logits, "lm_head"):
        return call.run()
    temperature = call.args.rollout_temperature if call.args.rollout_temperature > 0 else 1.0
    responses = Responses(call, max_seq_lens=call.max_seq_lens)
    return responses.log_probs_and_entropy(temperature, call.with_entropy, call.entropy_requires_grad)


def should_capture(call: Any) -> bool:
    return reads_log_probs(call) and not (call.args.true_on_policy_mode or call.args.allgather_cp)


PROCESSORS = "miles.backends.training_utils.loss_hub.logit_processors"
OPTIONS = "with_entropy, entropy_requires_grad, non_loss_data, max_seq_lens"
functions: Table = {
    **steps_of("miles", should_capture),
    f"{PROCESSORS}:get_log_probs_and_entropy(logits, {BATCH}, {OPTIONS})": log_probs_and_entropy,
    f"{PROCESSORS}:get_responses(logits, {BATCH}, max_seq_lens)": None,
}
plugin, install, uninstall = installed("miles", "0.1.0, main", functions)

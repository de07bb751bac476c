"""ms-swift: GRPO's logprobs and entropy, and old and reference policies' logprobs, of unmasked tokens, without logits.

--external_plugins lce.py  # a file with the line `import megatron_lce.plugins.ms_swift`
"""

from typing import Any

import torch
from torch import Tensor

from megatron_lce.plugins.capturing import captured_if
from megatron_lce.plugins.replacing import Plugin

TRAINERS = "swift.megatron.trainers"


def logps_and_entropy(own: Any, logits: Any, labels: Tensor, compute_entropy: bool = False, **rest: Any) -> Any:
    if not hasattr(logits, "lm_head"):
        return own(logits, labels, compute_entropy, **rest)
    temperature = 1 / float(logits)  # ms-swift divided the 1 below by it
    out = logits.lm_head.linear_cross_entropy(labels, temperature, entropy=compute_entropy, skip_ignored=True)
    return out.logprobs, out.entropy


step = captured_if(lambda given: True, instead=lambda hidden: torch.ones((), dtype=torch.float64, device="cpu"))
LOGPS = "compute_logps_and_entropy_from_logits(logits, labels, compute_entropy, entropy_chunk_size)"
replacements = {f"{TRAINERS}.utils:compute_per_token_logps_fn(model, ...)": step}
replacements[f"{TRAINERS}.grpo_trainer:MegatronGRPOTrainer.forward_step(self, data_iterator, model)"] = step
replacements[f"{TRAINERS}.vocab_parallel_utils:{LOGPS}"] = logps_and_entropy
plugin = Plugin("swift", replacements)
install, uninstall = plugin.install, plugin.uninstall
install()

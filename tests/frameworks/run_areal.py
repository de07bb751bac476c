"""AReaL's logprobs from hidden states with the plugin, against its own of logits.

torchrun --nproc-per-node 2 tests/frameworks/run.py areal FOLDER      # FOLDER/areal
"""

from pathlib import Path

import torch.distributed as dist
from comparing import LABELS, POSITIONS, TEMPERATURE, TOKENS, cases, compare_with_plugin
from stand_ins import packages_without_their_init, stand_in
from torch import Tensor, nn

from megatron_lce import capture_lm_head


def program(folder: Path) -> None:
    packages_without_their_init(folder, "areal.infra", "areal.models.mcore", "areal.utils.functional")
    stand_in("areal.infra.platforms", is_npu_available=False)
    from areal.models.mcore import vocab_parallel_head
    from areal.utils.functional import vocab_parallel

    from megatron_lce.plugins import areal

    group = dist.group.WORLD

    def fused(model: nn.Module) -> dict[str, Tensor]:
        """What AReaL's engine does with the hidden states that its model returns."""
        vocab_parallel_head.replace_output_layer_with_areal_lm_head(model, fp32_output=True)
        with capture_lm_head(model) as head:
            model(TOKENS, POSITIONS, None)
        out = vocab_parallel_head.chunked_lm_head_logprobs_entropy(
            model.output_layer, head.hidden, head.weight, LABELS.T.contiguous(), temperature=TEMPERATURE, chunk_size=4
        )
        return {name: value.T for name, value in out._asdict().items()}

    def unfused(model: nn.Module) -> dict[str, Tensor]:
        logits = model(TOKENS, POSITIONS, None)
        smallest, largest = logits.detach().amin(-1), logits.detach().amax(-1)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        total, squares = logits.detach().sum(-1), logits.detach().square().sum(-1)
        for of_shard in (total, squares):
            dist.all_reduce(of_shard)
        logprobs, entropy = vocab_parallel.gather_logprobs_entropy(logits, LABELS, TEMPERATURE, group)
        return {
            "logprobs": logprobs,
            "entropy": entropy,
            "vocab_min_logits": smallest,
            "vocab_max_logits": largest,
            "vocab_mean_logits": total / (logits.shape[-1] * group.size()),
            "vocab_norm_logits": squares.sqrt(),
        }

    for case in cases():
        compare_with_plugin(f"AReaL, {case.name}", case, areal, fused, unfused)

"""NeMo-RL's logprobs from hidden states, with the diff of docs/recipes, against its logprobs from logits.

torchrun --nproc-per-node 2 tests/frameworks/run_nemo_rl.py FOLDER      # FOLDER/nemo_rl: with the diff applied
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from comparing import VOCABULARY, cases, compare, main
from stand_ins import packages_without_their_init
from torch import Tensor, nn

from megatron_lce import capture_lm_head


def tokens_of() -> Tensor:
    return torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


def program() -> None:
    packages_without_their_init(Path(sys.argv[1]), "nemo_rl", "nemo_rl.distributed", "nemo_rl.algorithms")
    from nemo_rl.distributed import model_utils

    tokens, positions = tokens_of(), torch.arange(12)[None]
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    shard = SimpleNamespace(
        vocab_start_index=VOCABULARY // ranks * rank, vocab_end_index=VOCABULARY // ranks * (rank + 1)
    )

    def fused(model: nn.Module) -> dict[str, Tensor]:
        """NeMo-RL's own forward of GPTModel gives the function these; of which Megatron it is, is another matter."""
        with capture_lm_head(model) as head:
            model(tokens, positions, None)
        logprobs = model_utils.from_parallel_hidden_states_to_logprobs(
            head.hidden, head.weight, None, tokens, tp_group=group, chunk_size=4, **vars(shard)
        )
        return {"logprobs": logprobs}

    def unfused(model: nn.Module) -> dict[str, Tensor]:
        logits = model(tokens, positions, None)
        return {"logprobs": model_utils.from_parallel_logits_to_logprobs(logits, tokens, tp_group=group, **vars(shard))}

    for case in cases():
        compare(f"NeMo-RL, {case.name}", case, fused, unfused)


if __name__ == "__main__":
    main(program)

"""slime's logprobs and entropy, with the diff of docs/recipes, against slime's own of logits.

    torchrun --nproc-per-node 2 tests/frameworks/run_slime.py OWN FUSED  # OWN/slime: as it is, FUSED/slime: with diffs

Stand-ins: a whitening of advantages, a loader of functions by name, and a type that only annotates.
"""

import gc
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from comparing import VOCABULARY, cases, compare, main
from stand_ins import packages_without_their_init, stand_in
from torch import Tensor, nn

LENGTHS, RESPONSES = [7, 4, 9], [3, 2, 5]  # of the sequences, and of the answers that they end with


def import_loss(folder: Path) -> ModuleType:
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]
    packages_without_their_init(folder, "slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils")
    stand_in("slime.utils.distributed_utils", distributed_masked_whiten=None)
    stand_in("slime.utils.misc", load_function=None)
    stand_in("slime.utils.types", RolloutBatch=dict)
    from slime.backends.megatron_utils import loss

    return loss


def program() -> None:
    own, fused = (import_loss(Path(folder)) for folder in sys.argv[1:])
    tokens = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    args = Namespace(rollout_temperature=0.7, log_probs_chunk_size=-1, allgather_cp=False, entropy_coef=0.1)
    batch = {
        "args": args,
        "unconcat_tokens": list(tokens.split(LENGTHS)),
        "total_lengths": LENGTHS,
        "response_lengths": RESPONSES,
        "with_entropy": True,
    }
    inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens))[None], "attention_mask": None}

    def outputs(loss: ModuleType, call: Any) -> Any:
        def of(model: nn.Module) -> dict[str, Tensor]:
            _, found = loss.get_log_probs_and_entropy(call(model), **batch)
            return {name: torch.cat(parts) for name, parts in found.items()}

        return of

    gc.disable()  # what a microbatch leaves behind must go without the collector
    output = fused.call_model(cases()[0].build(), inputs, True)
    hidden = weakref.ref(output.lm_head.hidden)
    del output
    assert hidden() is None, "the captured hidden states outlive the microbatch"
    gc.enable()

    for case in cases():
        with_head = outputs(fused, lambda model: fused.call_model(model, inputs, True))
        with_logits = outputs(own, lambda model: model(**inputs))
        compare(f"slime, {case.name}", case, with_head, with_logits)


if __name__ == "__main__":
    main(program)

"""Cases on one rank, as run_parity.py has them on several: ids of the vocabulary, and token losses of any output.

`linear_logits_at`, `support_logprobs` and `linear_topk` are compared over the same ids: repeated, padded, the label's;
sets hold from none to all of a row's.
"""

import pytest
import torch

from tests.cases import BF16, Ranks, case
from tests.checks import check_case
from tests.findings import Asserted

FP16 = torch.float16
PER_TOKEN = {"temperature": "per token"}
AT, WIDE = {"operation": "linear_logits_at"}, {"operation": "linear_logits_at", "hidden_size": 64, "dtype": BF16}
IDS = [
    case("one id", **AT, shape=(5,), shards=(90,), candidates=1),
    case(
        "scaled, odd rows",
        **AT,
        shape=(3, 4),
        hidden_size=520,
        shards=(90,),
        candidates=7,
        temperature=0.7,
        logits_scale=1.3,
    ),
    case(
        "negative scale",
        **AT,
        shape=(3, 2),
        hidden_size=300,
        shards=(1000,),
        candidates=5,
        logits_scale=-1.3,
        temperature=0.7,
    ),
    case("a small workspace", **AT, shape=(3, 4), hidden_size=520, shards=(90,), candidates=7, workspace_bytes=1),
    case("bf16, softcap", **WIDE, shape=(9,), shards=(90,), candidates=40, softcap=3.0, **PER_TOKEN),
    case("bf16, chunks", **WIDE, shape=(7,), shards=(1500,), candidates=3, softcap=3.0, workspace_bytes=1),
    case("bf16, negative", **WIDE, shape=(5,), shards=(1500,), candidates=3, logits_scale=-0.7, softcap=3.0),
    case("the whole vocabulary", **WIDE, shape=(2, 2), shards=(300,), candidates=300),
    case(
        "fp16, odd rows", **AT, shape=(2, 3), hidden_size=13, shards=(90,), candidates=33, dtype=FP16, workspace_bytes=1
    ),
    case("long sets", **AT, shape=(6,), hidden_size=40, shards=(70,), candidates=150, tail=3, dtype=BF16, **PER_TOKEN),
    case("long sets, fp32", **AT, shape=(6,), hidden_size=40, shards=(70,), candidates=150, tail=3, **PER_TOKEN),
    case("softcap", **AT, shape=(3, 2), hidden_size=40, shards=(90,), candidates=9, softcap=3.0, **PER_TOKEN),
    case("an fp32 weight", **AT, shape=(6,), hidden_size=40, shards=(70,), candidates=9, dtype=BF16, fp32_weight=True),
]


LOSS, ROUNDED = {"operation": "linear_token_loss"}, {"logits_dtype": BF16}
MASKED = {"shape": (150, 2), "hidden_size": 64, "shards": (300,), "ignored": 0.4}
TOKEN_LOSSES = [
    case("loss of candidates", **LOSS, **MASKED, candidates=5),
    case("loss of candidates, bf16", **LOSS, **MASKED, candidates=5, dtype=BF16, workspace_bytes=400_000),
    case("loss of candidates, skipped", **LOSS, **MASKED, candidates=5, dtype=BF16, skip_ignored=True),
    case("loss of candidates, softcap", **LOSS, **MASKED, candidates=5, dtype=BF16, softcap=5.0),
    case("rounded", **LOSS, **ROUNDED, shape=(40,), shards=(300,)),
    case("rounded, bf16", **LOSS, **ROUNDED, shape=(40,), shards=(300,), dtype=BF16),
    case("an fp32 weight", **LOSS, shape=(40,), shards=(300,), dtype=BF16, fp32_weight=True, entropy=False),
    case("an fp32 weight, fp16", **LOSS, shape=(40,), shards=(300,), dtype=FP16, fp32_weight=True, entropy=False),
]


@pytest.mark.parametrize("one", [*IDS, *TOKEN_LOSSES], ids=lambda one: f"{one.operation}-{one.name}")
def test_values_and_gradients(one, backend, device):
    check_case(one, Ranks(backend, None, device), Asserted())

"""The errors of every operation beside `linear_cross_entropy` name the argument, what it must be and what it was."""

import math

import pytest
import torch
from torch import zeros

import megatron_lce
from megatron_lce.api.linear_topk import MAX_K


def ids(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


def nll(out, *_):
    return -out.logprobs


HEAD = {"hidden": zeros(4, 8), "weight": zeros(6, 8)}
HEADS = {"student_hidden": zeros(4, 2, 8), "student_weight": zeros(20, 8)}
HEADS |= {"teacher_hidden": zeros(4, 2, 12), "teacher_weight": zeros(20, 12)}
CALLS = {  # operations and their right arguments
    "linear_cross_entropy": HEAD | {"labels": ids(4)},
    "linear_jsd": HEADS,
    "linear_divergence": HEADS,
    "linear_divergence_loss": HEADS | {"labels": ids(4, 2), "loss": nll},
    "linear_logits_at": HEAD | {"ids": ids(4, 2)},
    "linear_token_loss": HEAD | {"labels": ids(4), "loss": nll},
    "linear_topk": HEAD | {"k": 2},
    "support_logprobs": HEAD | {"labels": ids(4), "ids": ids(4), "offsets": torch.arange(5)},
    "topk_divergence": {"student_logprobs": zeros(2, 3), "teacher_logprobs": zeros(2, 3)},
}
TENSOR, POSITIVE = "must be a torch.Tensor, got", "must be positive and finite, got"
OF_JSD = [
    ({"student_hidden": None}, TypeError, f"student_hidden {TENSOR} NoneType"),
    ({"teacher_weight": [1]}, TypeError, f"teacher_weight {TENSOR} list"),
    ({"student_weight": zeros(20, 8).half()}, TypeError, "student_weight must have student_hidden's dtype"),
    ({"teacher_hidden": zeros(4, 2, 12).double()}, TypeError, "teacher_hidden must be float32, bfloat16 or"),
    ({"teacher_weight": zeros(20, 8)}, ValueError, "teacher_hidden and teacher_weight must agree on H"),
    ({"teacher_weight": zeros(9, 12)}, ValueError, "teacher_weight must hold as many rows of the vocabulary as"),
    ({"teacher_hidden": zeros(3, 2, 12)}, ValueError, "teacher_hidden must have student_hidden's shape but"),
    ({"labels": ids(4)}, ValueError, "labels must have student_hidden's shape without H, (4, 2)"),
    ({"beta": 1.5}, ValueError, "beta must lie in [0, 1], got 1.5"),
    ({"beta": math.nan}, ValueError, "beta must be finite, got nan"),
    ({"beta": "0.5"}, TypeError, "beta must be a float, got str"),
    ({"temperature": 0.0}, ValueError, f"temperature {POSITIVE} 0.0"),
    ({"temperature": zeros(3)}, ValueError, "temperature must be a float or have labels' shape, (4, 2)"),
    ({"teacher_temperature": 0.0}, ValueError, f"teacher_temperature {POSITIVE} 0.0"),
    ({"teacher_temperature": zeros(3)}, ValueError, "teacher_temperature must be a float or have labels' shape"),
    ({"return_student": 1}, TypeError, "return_student must be a bool, got int"),
    ({"return_student": True}, ValueError, "labels must be given for return_student, got None"),
    ({"student_logits_scale": "2"}, TypeError, "student_logits_scale must be a float, got str"),
    ({"teacher_logits_scale": math.inf}, ValueError, "teacher_logits_scale must be finite, got inf"),
    ({"student_softcap": 0.0}, ValueError, f"student_softcap {POSITIVE} 0.0"),
    ({"teacher_softcap": True}, TypeError, "teacher_softcap must be a float, got bool"),
    (
        {"teacher_softcap": 1e38, "teacher_temperature": 0.3},
        ValueError,
        "teacher_softcap / teacher_temperature must be a number that fp32 holds, got 1e+38 / 0.3",
    ),
    ({"student_logits_scale": 1e38, "temperature": 0.3}, ValueError, "student_logits_scale / temperature must be"),
    ({"token_weights": zeros(4, 2)}, TypeError, "linear_divergence has no keyword token_weights"),
    ({"skip_ignored": 9}, ValueError, "skip_ignored must be at least 0 and at most the number of rows, 8, got 9"),
    ({"backend": "reference"}, ValueError, "backend must be 'auto', 'triton' or 'torch', got 'reference'"),
]
OF_DIVERGENCE = [
    ({"kinds": "tv"}, TypeError, "kinds must be a sequence of names, got str"),
    ({"kinds": ()}, ValueError, "kinds must name at least one divergence, got ()"),
    ({"kinds": ("tv", "kl")}, ValueError, "kinds must be 'forward_kl', 'reverse_kl', 'tv' or 'jsd', got 'kl'"),
    ({"reduce_grad_hidden": False}, TypeError, "linear_divergence has no keyword reduce_grad_hidden"),
]
OF_DIVERGENCE_LOSS = [
    ({"loss": torch.ones(5)}, TypeError, "loss must be a function of the outputs and of per_token, got Tensor"),
    ({"labels": ids(4)}, ValueError, "labels must have student_hidden's shape without H, (4, 2)"),
    ({"kinds": ("kl",)}, ValueError, "kinds must be 'forward_kl', 'reverse_kl', 'tv' or 'jsd', got 'kl'"),
    ({"logits_cache_bytes": 1}, TypeError, "linear_divergence_loss has no keyword logits_cache_bytes"),
]
OF_TOKEN_LOSS = [
    ({"loss": torch.ones(5)}, TypeError, "loss must be a function of the outputs and of per_token, got Tensor"),
    ({"per_token": torch.ones(3)}, ValueError, "per_token[0] must have labels' shape first, (4,), got (3,)"),
    ({"per_token": 1.0}, TypeError, f"per_token[0] {TENSOR} float"),
    ({"per_token": torch.ones(4, requires_grad=True)}, ValueError, "per_token[0] must not require grad"),
    ({"logits_cache_bytes": 1}, TypeError, "linear_token_loss has no keyword logits_cache_bytes: it keeps logits wi"),
]
FALLING = torch.tensor([0, 5, 3, 4, 4])
OF_IDS = [
    ({"ids": [1]}, TypeError, f"ids {TENSOR} list"),
    ({"ids": ids(4, 2).int()}, TypeError, "ids must be int64, got torch.int32"),
    ({"ids": None}, TypeError, "ids must be a torch.Tensor, got NoneType"),
    ({"ids": ids(3, 2)}, ValueError, "ids must be [..., K] with the tokens' shape"),
    ({"ids": ids(4, 0)}, ValueError, "ids must be [..., K] with the tokens' shape"),
    ({"offsets": ids(5)}, ValueError, "ids must be [M] beside offsets"),
    ({"ids": ids(8), "offsets": ids(4)}, ValueError, "offsets must be [N + 1] for the 4 tokens, got (4,)"),
    ({"ids": ids(8), "offsets": FALLING}, ValueError, "offsets must not fall, got 3 after 5"),
    ({"entropy": True}, TypeError, "linear_logits_at has no keyword entropy"),
]
OF_SUPPORT = [
    ({"labels": ids(3)}, ValueError, "labels must have hidden's shape without H, (4,), got (3,)"),
    ({"offsets": None}, TypeError, f"offsets {TENSOR} NoneType"),
    ({"offsets": FALLING}, ValueError, "offsets must not fall, got 3 after 5"),
    ({"candidates": None}, TypeError, "support_logprobs has no keyword candidates"),
]
OF_TOPK = [
    ({"k": 0}, ValueError, "k must be at least 1, got 0"),
    ({"k": MAX_K + 1}, ValueError, "k must be at most 1024, got 1025"),
    ({"k": 2.0}, TypeError, "k must be an int, got float"),
    ({"k": 7}, ValueError, "k must be at most the 6 ids of the vocabulary, got 7: is tp_group missing?"),
    ({"k": 6, "vocab_size": 5}, ValueError, "k must be at most the 5 ids of the vocabulary, got 6: is tp_group"),
    ({"labels": 1}, TypeError, "linear_topk has no keyword labels"),
    ({"workspace_bytes": 10}, ValueError, "workspace_bytes must be at least "),
]
OF_TOPK_DIVERGENCE = [
    ({"kind": "kl"}, ValueError, "kind must be 'forward', 'reverse' or 'jsd', got 'kl'"),
    ({"tail": ""}, ValueError, "tail must be 'drop', 'bin' or 'renormalise', got ''"),
    ({"beta": 2.0}, ValueError, "beta must lie in [0, 1], got 2.0"),
    ({"kind": "jsd", "beta": math.nan}, ValueError, "beta must be finite, got nan"),
    ({"teacher_logprobs": zeros(2, 4)}, ValueError, "student_logprobs and teacher_logprobs must have one shape"),
]
OF_CANDIDATES = [
    ({"candidates": [1]}, TypeError, f"candidates {TENSOR} list"),
    ({"candidates": ids(4, 2).int()}, TypeError, "candidates must be int64, got torch.int32"),
    ({"candidates": ids(4)}, ValueError, "candidates must be [..., K] with labels' shape, (4,), first"),
    ({"candidates": ids(4, 0)}, ValueError, "candidates must be [..., K] with labels' shape"),
]
TABLES = {
    "linear_jsd": OF_JSD,
    "linear_divergence": OF_DIVERGENCE,
    "linear_divergence_loss": OF_DIVERGENCE_LOSS,
    "linear_token_loss": OF_TOKEN_LOSS,
    "linear_logits_at": OF_IDS,
    "support_logprobs": OF_SUPPORT,
    "linear_topk": OF_TOPK,
    "topk_divergence": OF_TOPK_DIVERGENCE,
    "linear_cross_entropy": OF_CANDIDATES,
}
ERRORS = [(name, *line) for name, lines in TABLES.items() for line in lines]


@pytest.mark.parametrize(("name", "changes", "error", "message"), ERRORS, ids=[f"{e[0]}-{e[3][:40]}" for e in ERRORS])
def test_errors_name_the_argument(name, changes, error, message):
    arguments = CALLS[name] | changes
    of_places = ("hidden", "weight", "labels", "loss", "per_token") if "per_token" in changes else ()
    by_place = [arguments.pop(key) for key in of_places]
    with pytest.raises(error) as raised:
        getattr(megatron_lce, name)(*by_place, **arguments)
    assert str(raised.value).startswith(message)

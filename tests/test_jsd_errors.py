"""The errors of `linear_jsd` name the argument, what it must be and what it was."""

import math

import pytest
import torch

from megatron_lce import linear_jsd
from tests.jsd_oracle import JsdInputs
from tests.jsd_problems import make_inputs


def wrong(**changes):
    """Valid arguments with some of them replaced."""
    inputs = make_inputs((4, 2), 8, 12, 20, torch.device("cpu"))
    arguments = {**dict(zip(JsdInputs._fields[:4], inputs[:4], strict=True)), "backend": "torch"}
    return {**arguments, **{name: change(inputs) if callable(change) else change for name, change in changes.items()}}


ERRORS = [
    (TypeError, {"student_hidden": None}, r"student_hidden must be a torch.Tensor, got NoneType"),
    (TypeError, {"teacher_weight": [1]}, r"teacher_weight must be a torch.Tensor, got list"),
    (
        TypeError,
        {"student_weight": lambda i: i.student_weight.half()},
        r"student_weight must have student_hidden's dtype",
    ),
    (
        TypeError,
        {"teacher_hidden": lambda i: i.teacher_hidden.double()},
        r"teacher_hidden must be float32, bfloat16 or",
    ),
    (ValueError, {"teacher_weight": lambda i: i.student_weight}, r"teacher_hidden and teacher_weight must agree on H"),
    (
        ValueError,
        {"teacher_weight": lambda i: i.teacher_weight[:9]},
        r"teacher_weight must hold as many rows .* 20, got 9",
    ),
    (
        ValueError,
        {"teacher_hidden": lambda i: i.teacher_hidden[:3]},
        r"teacher_hidden must have student_hidden's shape but",
    ),
    (
        ValueError,
        {"labels": torch.zeros(4, dtype=torch.int64)},
        r"labels must have student_hidden's shape without H, \(4, 2\)",
    ),
    (TypeError, {"labels": torch.zeros(4, 2)}, r"labels must be int64, got torch.float32"),
    (ValueError, {"beta": 1.5}, r"beta must lie in \[0, 1\], got 1.5"),
    (ValueError, {"beta": -0.1}, r"beta must lie in \[0, 1\], got -0.1"),
    (ValueError, {"beta": math.nan}, r"beta must be finite, got nan"),
    (TypeError, {"beta": "0.5"}, r"beta must be a float, got str"),
    (ValueError, {"temperature": 0.0}, r"temperature must be positive and finite, got 0.0"),
    (ValueError, {"temperature": torch.ones(3)}, r"temperature must be a float or have labels' shape, \(4, 2\)"),
    (ValueError, {"temperature": torch.ones(4, 2, requires_grad=True)}, r"temperature must not require grad"),
    (ValueError, {"teacher_temperature": 0.0}, r"teacher_temperature must be positive and finite, got 0.0"),
    (ValueError, {"teacher_temperature": torch.ones(3)}, r"teacher_temperature must be a float or have labels' shape"),
    (TypeError, {"return_student": 1}, r"return_student must be a bool, got int"),
    (TypeError, {"student_logits_scale": "2"}, r"student_logits_scale must be a float, got str"),
    (ValueError, {"teacher_logits_scale": math.inf}, r"teacher_logits_scale must be finite, got inf"),
    (ValueError, {"student_softcap": 0.0}, r"student_softcap must be positive and finite, got 0.0"),
    (TypeError, {"teacher_softcap": True}, r"teacher_softcap must be a float, got bool"),
    (TypeError, {"token_weights": 1.0}, r"token_weights must be a torch.Tensor, got float"),
    (
        TypeError,
        {"token_weights": torch.ones(4, 2).long()},
        r"token_weights must be a floating tensor, got torch.int64",
    ),
    (ValueError, {"token_weights": torch.ones(8)}, r"token_weights must have labels' shape, \(4, 2\), got \(8,\)"),
    (ValueError, {"token_weights": torch.ones(4, 2, requires_grad=True)}, r"token_weights must not require grad"),
    (TypeError, {"skip_ignored": 2.0}, r"skip_ignored must be a bool or an int, got float"),
    (ValueError, {"skip_ignored": 9}, r"skip_ignored must be at least 0 and at most the number of rows, 8, got 9"),
    (TypeError, {"ignore_index": 1.0}, r"ignore_index must be an int, got float"),
    (ValueError, {"vocab_start": -1}, r"vocab_start must be at least 0, got -1"),
    (ValueError, {"vocab_size": 0}, r"vocab_size must be at least 1, got 0"),
    (TypeError, {"workspace_bytes": 1e9}, r"workspace_bytes must be an int, got float"),
    (TypeError, {"tp_group": 3}, r"tp_group must be a torch.distributed.ProcessGroup or None, got int"),
    (
        ValueError,
        {"backend": "reference"},
        r"backend must be 'auto', 'triton' or 'torch' for linear_jsd, got 'reference'",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), ERRORS, ids=[message[:50] for *_, message in ERRORS])
def test_errors_name_the_argument(kind, changes, message):
    with pytest.raises(kind, match=message):
        linear_jsd(**wrong(**changes))

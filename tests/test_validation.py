"""Every message names the argument, what it must be and what it was; `check_labels`."""

import math
import re
import warnings
from dataclasses import fields
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import megatron_lce
from megatron_lce.backends import choice
from megatron_lce.backends.choice import load_backend
from megatron_lce.checks import together, validation
from megatron_lce.core.options import Options
from tests.problems import make_problem

TOKENS, HIDDEN_SIZE, COLUMNS = 4, 8, 20


def inputs(**overrides):
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "hidden": torch.randn(TOKENS, HIDDEN_SIZE, generator=generator),
        "weight": torch.randn(COLUMNS, HIDDEN_SIZE, generator=generator),
        "labels": torch.randint(COLUMNS, (TOKENS,), generator=generator),
        "backend": "torch",
    }
    return arguments | overrides


LONG = {"dtype": torch.int64}
WRONG_KINDS = {  # what arguments must be, and what they are not
    "a torch.Tensor": {"hidden": [[1.0]], "weight": [None], "labels": [3]},
    "a float": {"temperature": ["1", True, Fraction(1), None], "softcap": ["30"], "logits_scale": [zeros(1)]},
    "an int": {"ignore_index": [-100.0, None], "vocab_start": [0.0], "vocab_size": [True]}
    | {"logits_cache_bytes": [1e9], "workspace_bytes": [2.0**29]},
    "a bool": {"entropy": [0.01], "telemetry": [2], "sequence_parallel": ["yes"], "reduce_grad_hidden": [None]},
    "a bool or an int": {"skip_ignored": ["yes", 2.0, None]},
}
WRONG_NUMBERS = {
    "positive and finite": {"temperature": [0.0, -2, math.nan, math.inf], "softcap": [0.0, -30.0]},
    "a number that fp32 holds": {"softcap": [1e39], "logits_scale": [1e39], "temperature": [1e-39]},
    "at least 0": {"vocab_start": [-1], "logits_cache_bytes": [-1], "workspace_bytes": [-1]},
    "at least 0 and at most the number of rows, 4": {"skip_ignored": [-1, 5]},
    'a bool or "mean_logit"': {"telemetry": ["mean"]},
    "torch.bfloat16 or None": {"logits_dtype": [torch.float32, torch.float16, "bfloat16"]},
}


def rows(error, table, of_value):
    """What is passed, the error, and what its message must hold: the name, what it must be, what it was."""
    return [
        ({name: value}, error, name, f"must be {required}", of_value(value))
        for required, arguments in table.items()
        for name, values in arguments.items()
        for value in values
    ]


BAD = [
    *rows(TypeError, WRONG_KINDS, lambda value: type(value).__name__),
    *rows(ValueError, WRONG_NUMBERS, str),
    ({"hidden": zeros(4, 8).double()}, TypeError, "hidden", "float32, bfloat16 or float16", "float64"),
    ({"weight": zeros(20, 8).half()}, TypeError, "weight", "hidden's dtype, torch.float32", "float16"),
    ({"weight": zeros(20, 8, device="meta")}, ValueError, "weight", "hidden's device, cpu", "meta"),
    ({"hidden": torch.tensor(1.0)}, ValueError, "hidden", "must be [..., H]", "scalar"),
    ({"weight": zeros(8)}, ValueError, "weight", "must be [V_local, H]", "(8,)"),
    ({"weight": zeros(2, 10, 8)}, ValueError, "weight", "must be [V_local, H]", "(2, 10, 8)"),
    ({"weight": zeros(0, 8)}, ValueError, "weight", "at least one row of the vocabulary", "(0, 8)"),
    ({"weight": zeros(20, 7)}, ValueError, "hidden and weight", "must agree on H", "(4, 8) and (20, 7)"),
    ({"hidden": zeros(4, 0), "weight": zeros(20, 0)}, ValueError, "hidden", "H of at least 1", "(4, 0)"),
    ({"labels": zeros(4, dtype=torch.int32)}, TypeError, "labels", "must be int64", "int32"),
    ({"labels": zeros(4)}, TypeError, "labels", "must be int64", "float32"),
    ({"labels": zeros(4, device="meta", **LONG)}, ValueError, "labels", "hidden's device, cpu", "meta"),
    ({"labels": zeros(5, **LONG)}, ValueError, "labels", "hidden's shape without H, (4,)", "(5,)"),
    ({"labels": zeros(2, 2, **LONG)}, ValueError, "labels", "hidden's shape without H, (4,)", "(2, 2)"),
    ({"temperature": zeros(4, **LONG)}, TypeError, "temperature", "a float or a floating tensor", "int64"),
    ({"temperature": zeros(3)}, ValueError, "temperature", "labels' shape, (4,)", "(3,)"),
    ({"temperature": zeros(4, 1)}, ValueError, "temperature", "labels' shape, (4,)", "(4, 1)"),
    ({"temperature": zeros(4, device="meta")}, ValueError, "temperature", "labels' device, cpu", "meta"),
    ({"temperature": zeros(4, requires_grad=True)}, ValueError, "temperature", "not require grad", "True"),
    ({"temperature": 10**400}, ValueError, "temperature", "a number that fp32 holds", "1329 bits"),
    ({"softcap": 1e38, "temperature": 0.3}, ValueError, "softcap / temperature", "fp32 holds", "1e+38 / 0.3"),
    ({"logits_scale": -1e38, "temperature": 0.3}, ValueError, "logits_scale / temp", "fp32 holds", "-1e+38 / 0.3"),
    ({"logits_scale": 1e38, "softcap": 1e-3}, ValueError, "logits_scale / softcap", "fp32 holds", "1e+38 / 0.001"),
    ({"logits_scale": math.inf}, ValueError, "logits_scale", "finite", "inf"),
    ({"ignore_index": 2**70}, ValueError, "ignore_index", "a number that int64 holds", str(2**70)),
    ({"vocab_size": 0}, ValueError, "vocab_size", "at least 1", "0"),
    ({"vocab_size": 21}, ValueError, "vocab_size", "at most the 20 columns of all shards", "21: is tp_group"),
    ({"vocab_start": 2**31 - 19}, ValueError, "vocab_start", "at most 2147483628, so that ids fit int32", "2147483629"),
    ({"tp_group": "tp"}, TypeError, "tp_group", "ProcessGroup or None", "str"),
    ({"backend": "cuda"}, ValueError, "backend", "'auto', 'triton' or 'torch'", "'cuda'"),
]


@pytest.mark.parametrize(
    ("overrides", "error", "name", "required", "given"),
    BAD,
    ids=[f"{row[2]}-{row[4]}".replace(" ", "_") for row in BAD],
)
def test_message(overrides, error, name, required, given):
    with pytest.raises(error) as raised:
        megatron_lce.linear_cross_entropy(**inputs(**overrides))
    message = str(raised.value)
    assert message.startswith(name)
    assert required in message
    assert given in message.split("got")[1]


REFUSED_PLACEMENTS = [  # of hidden and weight, further keywords, and what is said
    (None, Shard(0), {}, "hidden and weight must both be DTensors or neither, got a plain tensor and a DTensor"),
    (Replicate(), None, {}, "hidden and weight must both be DTensors or neither, got a DTensor and a plain tensor"),
    (Replicate(), Shard(1), {}, "weight must be placed as Shard(0)"),
    (Shard(1), Shard(0), {}, "hidden must be placed as Replicate(), or Shard(0)"),
    (Replicate(), Shard(0), {"vocab_start": 0}, "vocab_start must be None beside DTensors"),
    (Replicate(), Shard(0), {"sequence_parallel": True}, "sequence_parallel must be False beside DTensors"),
    (Replicate(), Shard(0), {"reduce_grad_hidden": False}, "reduce_grad_hidden must be True beside DTensors"),
]


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("hidden", "weight", "keywords", "expected"), REFUSED_PLACEMENTS)
def test_placements_that_are_no_heads(hidden, weight, keywords, expected, mesh):
    given = inputs(**keywords)
    for name, placement in (("hidden", hidden), ("weight", weight)):
        if placement is not None:
            given[name] = distribute_tensor(given[name], mesh, [placement])
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        megatron_lce.linear_cross_entropy(**given)


def test_other_calls_take_no_dtensor(mesh):
    weight = distribute_tensor(torch.ones(COLUMNS, HIDDEN_SIZE), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"weight must be this rank.s own torch\.Tensor, got a DTensor"):
        megatron_lce.linear_token_loss(**inputs(weight=weight), loss=lambda out: out.logprobs)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_torchs_call_takes_dtensors(mesh, label_smoothing):
    hidden, weight = torch.randn(4, HIDDEN_SIZE), torch.randn(COLUMNS, HIDDEN_SIZE)
    tensors = distribute_tensor(hidden, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(0)])
    loss, expected = (
        megatron_lce.compat.torch_linear_cross_entropy(*head, zeros(4, **LONG), label_smoothing=label_smoothing)
        for head in (tensors, (hidden, weight))
    )
    assert torch.equal(loss, expected)


def test_sequence_parallel_needs_a_sequence():
    with pytest.raises(ValueError, match=r"hidden must be \[s/tp, \.\.\., H\] under sequence_parallel, got one dim"):
        validation.check_head(zeros(8), zeros(20, 8), shards=2)


def test_a_gpu_without_triton_is_told_once(monkeypatch):
    monkeypatch.setattr("megatron_lce.backends.choice._triton_installed", lambda: False)
    with pytest.warns(UserWarning, match="torch backend, which is slower: triton is not installed"):
        load_backend("auto", torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_backend("auto", torch.device("cuda"))


@pytest.fixture
def amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    choice._warn_once.cache_clear()
    return torch.device("cuda")


def test_auto_is_torch_on_an_amd_gpu(amd):
    with pytest.warns(UserWarning, match="torch backend, which is slower: nobody has run its kernels on an AMD GPU"):
        assert load_backend("auto", amd).__name__ == "megatron_lce.backends.torch.primitives"
    assert choice.describe_backend("auto", amd).startswith("torch, not triton: nobody has run its kernels")


def test_triton_may_be_asked_for_on_an_amd_gpu(amd):
    pytest.importorskip("triton")
    with pytest.warns(UserWarning, match="nobody has run the Triton kernels on an AMD GPU: .* use backend='torch'"):
        assert load_backend("triton", amd).__name__ == "megatron_lce.backends.triton.primitives"
    assert choice.describe_backend("triton", amd) == "triton"


def test_triton_on_cpu_tensors_without_its_interpreter(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"got 'triton', but CPU tensors need Triton's interpreter \(TRITON_INTERP"):
        megatron_lce.linear_cross_entropy(**inputs(backend="triton"))
    assert megatron_lce.linear_cross_entropy(**inputs(backend="auto")).logprobs.isfinite().all()


def test_triton_on_a_device_it_does_not_know():
    arguments = {name: tensor.to("meta") for name, tensor in inputs().items() if name != "backend"}
    pytest.importorskip("triton")
    message = "backend must be one that can run here, got 'triton', but Triton does not run on device type 'meta'"
    with pytest.raises(ValueError, match=message):
        megatron_lce.linear_cross_entropy(**arguments, backend="triton")


def test_check_labels_passes_valid_and_ignored_ones(device):
    megatron_lce.check_labels(torch.tensor([[0, 9], [-100, 5]], device=device), 10)
    megatron_lce.check_labels(torch.tensor([0, 9, -1], device=device), 10, ignore_index=-1)
    megatron_lce.check_labels(torch.empty(0, dtype=torch.int64, device=device), 10)


def test_check_labels_counts_and_shows_the_first_offender(device):
    labels = torch.tensor([[0, 9, -100], [5, 10, 3], [-1, 2, 77]], device=device)
    expected = (
        r"labels must lie in \[0, 10\) or equal ignore_index \(-100\), got 3 that do not; the first is 10 at \(1, 1\)"
    )
    with pytest.raises(ValueError, match=expected):
        megatron_lce.check_labels(labels, 10)
    with pytest.raises(ValueError, match=r"ignore_index \(-1\), got 3 that do not; the first is -100 at \(0, 2\)"):
        megatron_lce.check_labels(labels, 10, ignore_index=-1)


def test_check_labels_names_what_is_no_label():
    for labels, vocab_size, error, message in (
        ([1, 2], 3, TypeError, "labels must be a torch.Tensor, got list"),
        (torch.tensor([0.5, torch.nan]), 3, TypeError, "labels must be int64, got torch.float32"),
        (torch.tensor([1]), 3.0, TypeError, "vocab_size must be an int, got float"),
        (torch.tensor([1]), -1, ValueError, "vocab_size must be at least 1, got -1"),
    ):
        with pytest.raises(error, match=message):
            megatron_lce.check_labels(labels, vocab_size)


def test_ranks_describe_a_configuration_in_one_order(device):
    """Not in that of a set of strings, which differs from process to process: the ranks of a group compare them."""
    problem = make_problem(3, 24, 31, device)
    described = list(together._describe(*problem[:3], Options()))
    assert described[:4] == ["hidden", "weight", "labels", "gradients"]
    assert described[4:] == [field.name for field in fields(Options) if field.name not in ("tp_group", "vocab_start")]


CALL = inputs()
HEAD = CALL["hidden"], CALL["weight"]
WITHIN_TRANSFORMS = {  # a call with the argument of that name, without a dimension that a transform adds
    "hidden": lambda hidden: megatron_lce.linear_cross_entropy(**CALL | {"hidden": hidden}).logprobs.sum(),
    "temperature": lambda given: megatron_lce.linear_cross_entropy(**CALL, temperature=given).logprobs,
    "teacher_temperature": lambda given: megatron_lce.linear_jsd(*HEAD, *HEAD, teacher_temperature=given),
}


@pytest.mark.parametrize("name", WITHIN_TRANSFORMS)
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_of_torch_func_are_refused_in_our_words(transform, name):
    given = CALL["hidden"] if name == "hidden" else torch.ones(TOKENS)
    batch = given if transform is torch.func.grad else given.expand(3, *given.shape)
    with pytest.raises(TypeError, match=rf"{name} must be a plain tensor, got one inside a transform of torch\.func"):
        transform(WITHIN_TRANSFORMS[name])(batch)

"""Other projects' calls: the same results from the same arguments, and reasons where they cannot be had."""

import functools
import inspect
import math
import re

import pytest
import torch
from torch import zeros

from megatron_lce import compat
from tests.problems import logits_of, make_problem, with_gradients

FP32, BF16 = torch.float32, torch.bfloat16
PROJECTS = {"areal": compat.areal_linear_cross_entropy, "verl": compat.verl_linear_cross_entropy}


@pytest.fixture(params=PROJECTS)
def project(request):
    return PROJECTS[request.param]


OF_VERLS = "temperature=1.0, reduction='none', dist_process_group=None"
SIGNATURES = {
    compat.verl_linear_cross_entropy: OF_VERLS,
    compat.areal_linear_cross_entropy: f"{OF_VERLS}, return_max_logits=False",
}


@pytest.mark.parametrize(("call", "own"), SIGNATURES.items())
def test_the_calls_have_their_projects_signatures(call, own):
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(call).parameters.values()]
    further = "*, skip_ignored=False, reduce_grad_hidden=None"
    assert str(inspect.Signature(parameters)) == f"(hidden, weight, labels, {own}, {further})"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_logprobs_entropy_and_gradients(reduction, temperature, project, device):
    problem = make_problem((3, 5), 24, 70, device)

    def exact(hidden, weight):
        distribution = torch.distributions.Categorical(logits=hidden.flatten(0, 1) @ weight.T / temperature)
        values = distribution.log_prob(problem.labels.reshape(-1)), distribution.entropy()
        return values if reduction == "none" else [getattr(value, reduction)() for value in values]

    upstream = (torch.tensor(2.0), torch.tensor(-0.5))
    if reduction == "none":
        upstream = [grad.flatten() for grad in problem.upstream[:2]]
    actual = with_gradients(
        problem, lambda h, w: project(h, w, problem.labels, temperature, reduction, None), upstream=upstream
    )
    expected = with_gradients(problem, exact, torch.float64, upstream)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[2:], expected[2:], rtol=1e-5, atol=1e-6)


def test_shapes_as_megatron_workers_pass_them(project, device):
    """hidden [s, 1, H] beside labels [1, s], and a temperature per token."""
    problem = make_problem((7, 1), 24, 70, device)
    temperature = torch.linspace(0.5, 2.0, 7, device=device)
    flat, _ = project(problem.hidden[:, 0], problem.weight, problem.labels[:, 0], temperature)
    megatron, _ = project(problem.hidden, problem.weight, problem.labels.T, temperature[None])
    assert torch.equal(flat, megatron)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_temperature_of_one_element_is_every_tokens(shape, project, device):
    problem = make_problem((7, 1), 24, 70, device)
    actual = project(*problem[:3], torch.full(shape, 0.7, device=device))
    assert torch.equal(actual[0], project(*problem[:3], 0.7)[0])
    with pytest.raises(ValueError, match=r"temperature must be a float or have labels' shape, \(7,\), got \(3,\)"):
        project(*problem[:3], torch.ones(3, device=device))


def test_padding_may_have_no_temperature(project, device):
    """Rows filled up with zeros, in front of a label that is ignored: no NaN, nowhere."""
    problem = make_problem(7, 24, 70, device)
    hidden, weight = (t.detach().clone().requires_grad_() for t in problem[:2])
    labels = problem.labels.clone()
    labels[[2, 6]] = -100
    temperature = torch.full((7,), 0.7, device=device)
    expected = project(hidden, weight, labels, temperature)
    temperature[2], temperature[6] = 0.0, torch.nan
    actual = project(hidden, weight, labels, temperature)
    assert torch.equal(torch.stack(actual), torch.stack(expected))
    sum(actual).sum().backward()
    assert not hidden.grad.isnan().any()
    assert not weight.grad.isnan().any()


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.float32, torch.float64], ids=str)
def test_areals_largest_logit_is_that_before_the_temperature(temperature, device):
    problem = make_problem((3, 5), 24, 70, device)
    if isinstance(temperature, torch.dtype):
        temperature = torch.linspace(0.5, 2.0, 15, device=device).view(3, 5).to(temperature)
    two = compat.areal_linear_cross_entropy(*problem[:3], temperature)
    three = compat.areal_linear_cross_entropy(*problem[:3], temperature, "none", None, return_max_logits=True)
    assert torch.equal(torch.stack(two), torch.stack(three[:2]))
    torch.testing.assert_close(three[2], logits_of(problem).amax(-1).float(), rtol=1e-6, atol=1e-6)
    assert not three[2].requires_grad


@pytest.mark.parametrize("call", PROJECTS.values())
def test_labels_in_another_order_are_refused(call, device):
    problem = make_problem((7, 2), 24, 70, device)
    for labels, shape in ((problem.labels.T, r"\(2, 7\)"), (problem.labels.reshape(-1)[1:], r"\(13,\)")):
        with pytest.raises(ValueError, match=rf"labels must have hidden's order of rows, \(7, 2\), got {shape}"):
            call(problem.hidden, problem.weight, labels)


@pytest.mark.parametrize("label", [-1, -100, -7])
def test_negative_labels_are_ignored_rows(label, project, device):
    problem = make_problem(7, 24, 70, device)
    labels = problem.labels.int()
    labels[2] = label
    logprobs, entropy = project(problem.hidden, problem.weight, labels)
    assert logprobs.eq(0).nonzero().flatten().tolist() == entropy.eq(0).nonzero().flatten().tolist() == [2]


CALLS = {
    "verl": compat.verl_linear_cross_entropy,
    "areal": functools.partial(compat.areal_linear_cross_entropy, return_max_logits=True),
    "torch": functools.partial(compat.torch_linear_cross_entropy, reduction="none"),
    "torch, smoothed": functools.partial(compat.torch_linear_cross_entropy, reduction="none", label_smoothing=0.1),
}


@pytest.mark.parametrize("call", CALLS)
def test_ignored_rows_are_skipped_and_nothing_else_changes(call, device):
    problem = make_problem(12, 24, 70, device)
    labels = problem.labels.clone()
    labels[::3] = -100
    found = []
    for skip in (False, True, 8):
        hidden, weight = (t.detach().clone().requires_grad_() for t in problem[:2])
        results = CALLS[call](hidden, weight, labels, skip_ignored=skip)
        results = results if isinstance(results, tuple) else (results,)
        sum(torch.sin(result).sum() for result in results).backward()
        found.append([*(result.detach() for result in results), hidden.grad, weight.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-6)
    wrong = CALLS[call](*problem[:2], labels, skip_ignored=7)
    assert all(result.isnan().all() for result in (wrong if isinstance(wrong, tuple) else (wrong,)))


LONG = {"dtype": torch.int64}
UNSUPPORTED = NotImplementedError
OF_THE_HEAD = [  # argument, what is passed, the error, and what is said of it
    ("hidden", None, TypeError, "hidden must be a torch.Tensor, got NoneType"),
    ("hidden", [[1.0] * 24] * 7, TypeError, "hidden must be a torch.Tensor, got list"),
    ("hidden", torch.tensor(1.0), ValueError, r"hidden must be \[..., H\], got a scalar"),
    ("hidden", zeros(7, 24).double(), TypeError, "hidden must be float32, bfloat16 or float16, got torch.float64"),
    ("weight", None, TypeError, "weight must be a torch.Tensor, got NoneType"),
    ("weight", zeros(70, 24, dtype=BF16), TypeError, "weight must have hidden's dtype, torch.float32, got .*bfloat16"),
    ("labels", None, TypeError, "labels must be a torch.Tensor, got NoneType"),
    ("labels", [1] * 7, TypeError, "labels must be a torch.Tensor, got list"),
    ("labels", zeros(7, dtype=torch.bool), TypeError, "labels must be int64, got torch.bool"),
    ("labels", zeros(7, device="meta", **LONG), ValueError, "labels must be on hidden's device, cpu, got meta"),
    ("skip_ignored", 8, ValueError, "skip_ignored must be .* at most the number of rows, 7, got 8"),
    *(("reduction", r, ValueError, f"reduction must be 'none', 'sum' or 'mean', got {r!r}") for r in ("max", None)),
]
FLOATS = ("labels", zeros(7), TypeError, "labels must be int64, got torch.float32")  # would be cut off to integers
OF_VERL = [
    ("temperature", "1", TypeError, "temperature must be a float, got str"),
    ("temperature", zeros(7, **LONG), TypeError, "temperature must be a float or a floating tensor, got .*int64"),
    ("reduce_grad_hidden", "x", TypeError, "reduce_grad_hidden must be a bool, got str"),
    ("dist_process_group", "x", TypeError, "dist_process_group must be a .*ProcessGroup or None, got str"),
]
OF_AREAL = [*OF_VERL, ("return_max_logits", 1, TypeError, "return_max_logits must be a bool")]
OF_TORCH = [
    ("tp_group", 3, TypeError, "tp_group must be a torch.distributed.ProcessGroup or None, got int"),
    ("ignore_index", "a", TypeError, "ignore_index must be an int, got str"),
    ("input", zeros(7, 23), ValueError, r"input and linear_weight must agree on H, got \(7, 23\) and \(70, 24\)"),
    ("target", zeros(7, dtype=torch.int32), TypeError, "target must be int64, got torch.int32"),
    ("target", zeros(6, **LONG), ValueError, r"target must have input's shape without H, \(7,\), got \(6,\) for input"),
    ("label_smoothing", "a", TypeError, "label_smoothing must be a float, got str"),
    ("label_smoothing", 1.5, ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
    ("weight", [1.0] * 70, TypeError, "weight must be a torch.Tensor, got list"),
    ("weight", zeros(69), ValueError, r"weight must be floating \[70\] on .* got torch.float32 \(69,\) on"),
    ("weight", zeros(70).requires_grad_(), ValueError, "weight must not require grad: it gets no gradient; .*=True"),
    ("linear_bias", zeros(70), UNSUPPORTED, "linear_bias must be None: the fused head does not support a bias"),
    (
        "options",
        object(),
        UNSUPPORTED,
        "options must be None: this head does not chunk the batch; .* workspace_bytes of",
    ),
    ("target", zeros(7, 70), UNSUPPORTED, "target must be class ids: probabilities are not .*, got torch.float32"),
    ("linear_weight", zeros(70, 2, 24), UNSUPPORTED, r"linear_weight must be \[V, H\]: .* got \(70, 2, 24\)"),
]
SMOOTHED = ("weight", zeros(70), UNSUPPORTED, "weight must be None where label_smoothing is not 0")
IN_TORCHS_WORDS = {"hidden": "input", "weight": "linear_weight", "labels": "target"}


def in_torchs_words(name, value, error, message):
    renamed = re.sub("hidden|weight|labels", lambda found: IN_TORCHS_WORDS[found[0]], message)
    return IN_TORCHS_WORDS.get(name, name), value, error, renamed


OF_CALLS = {"verl": OF_VERL, "areal": OF_AREAL}
BAD = [(call, *row) for call, rows in OF_CALLS.items() for row in [*OF_THE_HEAD, FLOATS, *rows]]
BAD += [("torch", *row) for row in [*(in_torchs_words(*row) for row in OF_THE_HEAD), *OF_TORCH]]
BAD += [("torch, smoothed", *SMOOTHED)]


@pytest.mark.parametrize(
    ("call", "name", "value", "error", "message"), BAD, ids=[f"{i}-{row[0]}-{row[1]}" for i, row in enumerate(BAD)]
)
def test_messages_name_the_arguments_of_the_call_that_was_made(call, name, value, error, message):
    names = ("input", "linear_weight", "target") if call.startswith("torch") else ("hidden", "weight", "labels")
    problem = make_problem(7, 24, 70, torch.device("cpu"))
    arguments = dict(zip(names, problem[:3], strict=True))
    with pytest.raises(error, match=f"^{message}"):
        CALLS[call](**arguments | {name: value})


torch_lce = getattr(torch.nn.functional, "linear_cross_entropy", None)
needs_torch_lce = pytest.mark.skipif(torch_lce is None, reason="this torch has no linear_cross_entropy")


@needs_torch_lce
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("ignore_index", [-100, 3, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(9,), ()], ids=str)
def test_equals_torch(shape, reduction, ignore_index, ignored, dtype, device):
    problem = make_problem(shape, 24, 31, device, dtype)
    target = torch.where(problem.labels == 3, 4, problem.labels)
    if ignored != "none":
        rows = slice(None) if ignored == "all" or not shape else slice(0, 4)
        target[(rows if shape else ...)] = -100 if ignore_index is None else ignore_index
    keywords = {"reduction": reduction, "ignore_index": ignore_index}
    results = []
    for function in (compat.torch_linear_cross_entropy, torch_lce):
        hidden, weight = (t.detach().clone().requires_grad_() for t in problem[:2])
        loss = function(hidden, weight, target, **keywords)
        loss.backward(torch.ones_like(loss) * 1.5)
        results.append((loss.detach(), hidden.grad, weight.grad))
    actual, expected = results
    assert actual[0].dtype == expected[0].dtype == dtype
    # torch's own logits and gradients of them are rounded to the inputs' dtype; ours are not
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == FP32 else {"rtol": 4e-2, "atol": 4e-2}
    torch.testing.assert_close(actual[0], expected[0], equal_nan=True, **tolerance)
    if not expected[0].isnan().any():
        torch.testing.assert_close(actual[1:], expected[1:], **tolerance)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.0, True), (0.1, False), (1.0, False)])
def test_class_weights_and_label_smoothing(smoothing, weighted, reduction, ignored, device):
    problem = make_problem(19, 24, 31, device)
    target = problem.labels.clone()
    if ignored:
        target[::3] = -100
    weight = torch.rand(31, generator=torch.Generator().manual_seed(1)).to(device) if weighted else None
    keywords = {"reduction": reduction, "label_smoothing": smoothing}

    def ours(hidden, head):
        return compat.torch_linear_cross_entropy(hidden, head, target, weight=weight, **keywords)

    def exact(hidden, head):
        of_classes = None if weight is None else weight.double()
        return torch.nn.functional.cross_entropy(hidden @ head.T, target, weight=of_classes, **keywords)

    actual, expected = with_gradients(problem, ours), with_gradients(problem, exact, torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_mean_in_bf16_is_rounded_once(label_smoothing, device):
    problem = make_problem(9, 24, 31, device, BF16)
    exact = torch.nn.functional.cross_entropy(logits_of(problem), problem.labels, label_smoothing=label_smoothing)
    assert compat.torch_linear_cross_entropy(*problem[:3], label_smoothing=label_smoothing) == exact.to(BF16)


@needs_torch_lce
def test_every_keyword_of_torch_is_known():
    ours = inspect.signature(compat.torch_linear_cross_entropy).parameters
    assert set(inspect.signature(torch_lce).parameters) <= set(ours)


@pytest.mark.parametrize("skip_ignored", [True, 5])
def test_label_smoothing_takes_nothing_of_a_row_that_is_skipped(skip_ignored, device):
    problem = make_problem(7, 24, 70, device)
    problem.labels[[2, 6]] = -100

    def gradients(value):
        hidden, weight = (tensor.detach().clone() for tensor in problem[:2])
        hidden[2] = value
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        loss = compat.torch_linear_cross_entropy(
            *inputs, problem.labels, label_smoothing=0.1, skip_ignored=skip_ignored
        )
        return torch.autograd.grad(loss, inputs)

    for actual, expected in zip(gradients(math.nan), gradients(0.0), strict=True):
        assert torch.equal(actual, expected)

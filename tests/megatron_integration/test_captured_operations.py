"""What a captured head computes, against the model's own logits, and how long a capture holds it; first mistakes."""

import functools
import gc
import re
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from tests import megatron_world
from tests.megatron_world import VOCAB_SIZE, assert_refused, captured, state


def exact_logits(head):
    """[b, s, V] in fp64, with the model's graph."""
    return (head.hidden.double() @ head.weight.double().T).transpose(0, 1)


def assert_within_rounding(actual, exact, logits):
    """Differences are a few roundings in fp32 of numbers as large as the largest logit."""
    allowed = 8 * torch.finfo(torch.float32).eps * (1 + float(logits.detach().abs().max()))
    torch.testing.assert_close(actual.detach().double(), exact.detach(), rtol=0.0, atol=allowed)


def assert_gradients(model, loss, exact_loss):
    megatron_world.assert_gradients(model, loss, megatron_world.gradients(model, exact_loss, retain_graph=True))


def test_outputs_are_those_of_the_models_logits(model, device, tensors, labels):
    temperature = torch.linspace(0.5, 2, labels.numel(), device=device).view_as(labels)
    head = captured(model, tensors)
    out = head.linear_cross_entropy(labels, temperature, telemetry=True, backend="torch")
    logits = exact_logits(head) / temperature.double().unsqueeze(-1)
    distribution = torch.distributions.Categorical(logits=logits)
    logprobs, entropy, mean_logit = distribution.log_prob(labels), distribution.entropy(), logits.mean(-1)
    assert_within_rounding(out.logprobs, logprobs, logits)
    assert_within_rounding(out.entropy, entropy, logits)
    assert_within_rounding(out.lse, logits.logsumexp(-1), logits)
    assert_within_rounding(out.mean_logit, mean_logit, logits)
    assert torch.equal(out.argmax, model(*tensors).argmax(-1))

    upstream = torch.cos(torch.arange(labels.numel(), device=device)).view_as(labels)
    loss = (out.logprobs * upstream + out.entropy + out.mean_logit).sum()
    assert_gradients(model, loss, (logprobs * upstream + entropy + mean_logit).sum())


def test_some_ids_are_those_of_the_models_logits(model, device, tensors, labels):
    """[b, s] everywhere, three sequences beside one another, and offsets over the b * s tokens in that order."""
    head = captured(model, tensors)
    keywords = {"temperature": 0.7, "backend": "torch"}
    logits = exact_logits(head) / 0.7
    logprobs = logits.log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (*labels.shape, 4), generator=generator).to(device)
    at_ids = head.linear_logits_at(ids, **keywords)
    assert_within_rounding(at_ids, logits.gather(-1, ids), logits)
    candidates = head.linear_cross_entropy(labels, candidates=ids, **keywords).candidate_logprobs
    assert_within_rounding(candidates, logprobs.gather(-1, ids), logits)
    top = head.linear_topk(5, **keywords)
    values, best = logprobs.topk(5)
    assert_within_rounding(top.logprobs, values, logits)
    assert torch.equal(top.ids, best)
    counts = torch.randint(4, (labels.numel(),), generator=generator).to(device)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    rows = torch.arange(labels.numel(), device=device).repeat_interleave(counts)
    kept = torch.randint(VOCAB_SIZE, rows.shape, generator=generator).to(device)
    kept[offsets[:-1][counts > 0]] = labels.view(-1)[counts > 0]
    flat = logits.reshape(-1, VOCAB_SIZE)
    assert_within_rounding(head.linear_logits_at(kept, offsets, **keywords), flat[rows, kept], logits)
    left_out = (counts > 0)[:, None].repeat(1, VOCAB_SIZE)
    left_out[rows, kept] = False
    of_kept = flat.masked_fill(left_out, -torch.inf).log_softmax(-1).gather(1, labels.view(-1, 1)).view(labels.shape)
    found, entropy = head.support_logprobs(labels, kept, offsets, entropy=True, **keywords)
    assert_within_rounding(found, of_kept, logits)
    assert_within_rounding(entropy, -(logprobs.exp() * logprobs).sum(-1), logits)
    expected = of_kept.sum() + logprobs.gather(-1, ids).sum() + logits.gather(-1, ids).sum()
    assert_gradients(model, found.sum() + candidates.sum() + at_ids.sum(), expected)


def test_refusals_of_ids_name_them_as_the_caller_passed_them(model, device, tensors, labels):
    head = captured(model, tensors)
    offsets = torch.arange(labels.numel() + 1, device=device)
    for call in (head.linear_logits_at, functools.partial(head.support_logprobs, labels)):
        assert_refused(TypeError, r"ids must be a torch.Tensor, got list", call, [1, 2], offsets)
        not_tensor = r"offsets must be a torch.Tensor, got list"
        assert_refused(TypeError, not_tensor, call, labels.view(-1), offsets.tolist())
    assert_refused(TypeError, r"ids must be a torch.Tensor, got list", head.linear_logits_at, [1, 2])
    for wrong in (labels, labels[..., None].mT, labels[..., None][..., :0], labels[..., None, None]):
        message = r"must be \[b, s, K\], \(3, 23\) first for this hidden, got " + re.escape(str(tuple(wrong.shape)))
        assert_refused(ValueError, f"candidates {message}", head.linear_cross_entropy, labels, candidates=wrong)
        assert_refused(ValueError, f"ids {message}", head.linear_logits_at, wrong)


def test_hidden_goes_with_the_result(model, tensors):
    """And with its graph all activations: nothing of a closed capture may hold itself until the collector comes."""
    gc.collect()
    gc.disable()
    try:
        head = captured(model, tensors)
        hidden = weakref.ref(head.hidden)
        del head
        assert hidden() is None
    finally:
        gc.enable()


def test_what_an_inference_engine_overwrites_is_copied(untied, tensors, labels):
    with torch.inference_mode(), capture_lm_head(untied) as head:
        buffer = untied.decoder.register_forward_hook(lambda module, args, hidden: hiddens.append(hidden))
        hiddens = []
        untied(*tensors)
        buffer.remove()
    expected = head.linear_cross_entropy(labels, backend="torch").logprobs
    with torch.inference_mode():
        hiddens[0].zero_()
    assert torch.equal(head.linear_cross_entropy(labels, backend="torch").logprobs, expected)


def test_a_capture_is_opened_again_inside_itself_and_after(untied, tensors):
    """Each `with` closes what it opened."""
    before = state(untied)
    capture = capture_lm_head(untied)
    for _ in range(2):
        with capture as outer:
            with capture as inner:
                untied(*tensors)
            assert inner.hidden is not None
            assert outer.hidden is None
            untied(*tensors)
        assert outer.hidden is not None
        assert state(untied) == before


@pytest.mark.parametrize("use", ["nothing", "hidden", "an operation", "an MTP head"])
def test_a_pass_that_is_lost_unused_is_told(use, device, tensors, labels):
    """Microbatches that are used one by one, as a schedule does, are not."""
    model = megatron_world.build(device, mtp_layers=1)
    uses = {
        "nothing": lambda head: repr(head),
        "hidden": lambda head: head.hidden.detach(),
        "an operation": lambda head: head.linear_cross_entropy(labels, backend="torch"),
        "an MTP head": lambda head: head.mtp_heads[0].linear_cross_entropy(labels, backend="torch"),
    }
    with warnings.catch_warnings(record=True) as told, capture_lm_head(model, mtp="capture") as head:
        warnings.simplefilter("always")
        for _ in range(2):
            model(*tensors)
            uses[use](head)
    message = "a forward pass inside capture_lm_head replaces another, which was not used"
    lost = [one.filename for one in told if str(one.message).startswith(message)]
    assert lost == [__file__] * (use == "nothing")


READINGS = {
    "mean": lambda logits, labels: logits.float().mean(),
    "sum": lambda logits, labels: logits.sum(),
    "cross_entropy": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "gather": lambda logits, labels: logits.float().log_softmax(-1).gather(-1, labels[..., None]),
    "sub": lambda logits, labels: logits - labels[..., None].float(),
    "argmax": lambda logits, labels: logits.argmax(-1),
}


@pytest.mark.parametrize("reading", READINGS)
def test_a_models_output_inside_a_capture_read_as_logits(untied, reading, tensors, labels):
    with capture_lm_head(untied) as head:
        returned = untied(*tensors)
    assert returned.transpose(0, 1).contiguous().float().detach().shape == (*labels.T.shape, 0)
    message = "inside capture_lm_head holds no logits: call head.linear_cross_entropy"
    assert_refused(RuntimeError, message, READINGS[reading], returned, labels)
    assert head.hidden is not None


def test_a_capture_without_with(untied):
    head = capture_lm_head(untied)
    for use in (lambda: head.linear_cross_entropy(None), lambda: head.hidden):
        assert_refused(AttributeError, r"before it is opened: `with capture_lm_head\(model\) as head:`", use)


@pytest.mark.parametrize("entry", [lambda model: capture_lm_head(model).__enter__(), enable_fused_linear_ce])
def test_a_model_that_is_not_megatrons(entry):
    message = "model must be or hold a megatron-core language model, got Linear; for other models "
    assert_refused(TypeError, message + r"\(Hugging Face, FSDP\) there are megatron_lce", entry, torch.nn.Linear(2, 2))

"""`capture_lm_head(model, mtp="capture")` on one rank; what needs several is in torchrun_tests/megatron_heads.py."""

import itertools
import types

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lce import StoredHead, capture_lm_head
from tests import megatron_world
from tests.jsd_oracle import jsd_of_products
from tests.megatron_world import BATCH, SEQUENCE

CONFIGS = [{}, *([{"mtp_detach_heads": True}] if hasattr(TransformerConfig, "mtp_detach_heads") else [])]


@pytest.fixture(autouse=True)
def _clean_tracker():
    MTPLossLoggingHelper.tracker.clear()  # sized for the first model
    yield
    MTPLossLoggingHelper.tracker.clear()


def captured(model, tensors, **arguments):
    with capture_lm_head(model, mtp="capture") as head:
        assert model(*tensors, **arguments).numel() == 0
    return head


def native_logits(model, tensors, labels):
    """Those of each depth, [b, s, V], as Megatron's own losses get them and then overwrite: the main head's last."""
    seen = []
    megatron_world.with_loss(model, lambda own, logits, labels: (seen.append(logits.clone()), own(labels, logits))[1])
    model(*tensors, labels=labels)
    del model.compute_language_model_loss
    return [logits.transpose(0, 1) for logits in seen]


def later(x, shift, fill):
    """Row t + shift in place of row t, [b, s, ...]."""
    return torch.cat([x[:, shift:], torch.full_like(x[:, :shift], fill)], dim=1)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_each_depth_learns_from_the_row_that_predicts_its_token(layers, tied, config, device, tensors, labels):
    """Logits are those of Megatron's own MTP losses, and gradients reach what they reach in an eager computation."""
    model = megatron_world.build(device, mtp_layers=layers, tied=tied)
    for name, value in config.items():
        setattr(model.config, name, value)
    labels = torch.where(labels % 7 == 0, -100, labels)
    *logits, main = native_logits(model, tensors, labels.clamp(min=0))
    head = captured(model, tensors)
    assert [len(head.mtp_heads), *(one.mtp_heads for one in head.mtp_heads)] == [layers, *[()] * layers]
    eager, ours = 0.0, 0.0
    for depth, (one, own) in enumerate(zip(head.mtp_heads, logits, strict=True), 1):
        torch.testing.assert_close((one.hidden @ one.weight.T).transpose(0, 1), own)
        of_row = later(labels, depth, -100)
        exact = jsd_of_products(own.double(), later(main.detach().double(), depth, 0.0), labels=of_row, beta=0.3)
        divergence = one.linear_jsd(head, labels=labels, beta=0.3, backend="torch")
        torch.testing.assert_close(divergence.double(), exact, rtol=1e-5, atol=1e-6)
        out = one.linear_cross_entropy(labels, backend="torch", entropy=False)
        nll = torch.nn.functional.cross_entropy(own.transpose(1, 2), of_row, reduction="none")
        torch.testing.assert_close(-out.logprobs, nll, rtol=1e-5, atol=1e-5)
        result = one.linear_token_loss(labels, lambda out: -out.logprobs, backend="torch")
        torch.testing.assert_close(result.loss, nll.sum(), rtol=1e-5, atol=1e-5)
        eager, ours = eager + exact.sum(), ours + divergence.sum()
        without = one.linear_jsd(head, backend="torch")
        assert (without[:, :-depth] > 0).all()
        assert not without[:, -depth:].any()
    expected = megatron_world.gradients(model, eager)
    assert all(torch.isfinite(gradient).all() for gradient in expected.values())
    megatron_world.assert_gradients(model, ours, expected)


def test_packed_sequences_end_at_their_bounds(device, tensors, labels):
    model = megatron_world.build(device, mtp_layers=2)
    bounds = [0, 4, 5, 15, 20]  # one shorter than a chain, and tokens behind the last
    packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32, device=device))
    with capture_lm_head(model, mtp="capture") as head:
        # The layers, which have no packed attention here, see one long sequence.
        start_pass = model.output_layer.forward.__self__.start_pass
        model.output_layer.forward.__self__.start_pass = lambda given, takes: start_pass(
            given | {"packed_seq_params": packed}, takes
        )
        model(*tensors)
    for depth, one in enumerate(head.mtp_heads, 1):
        partner = torch.zeros(SEQUENCE, dtype=torch.bool, device=device)
        for start, end in itertools.pairwise(bounds):
            partner[start : max(start, end - depth)] = True
        divergence = one.linear_jsd(head, backend="torch")
        assert torch.equal(divergence != 0, partner.expand(BATCH, -1))
        rows = head.mtp_heads[depth - 1].linear_cross_entropy(labels, backend="torch").logprobs
        assert torch.equal(rows != 0, partner.expand(BATCH, -1))
    assert torch.equal(head.chain_mask(), partner.expand(BATCH, -1))  # of the last depth
    some = labels.masked_fill(torch.arange(SEQUENCE, device=device) == 8, -100)
    expected = partner & ~torch.isin(torch.arange(SEQUENCE, device=device), torch.tensor([6, 7, 8], device=device))
    assert torch.equal(head.chain_mask(some), expected.expand(BATCH, -1))


def test_megatrons_own_mtp_loss_adds_nothing(device, tensors, labels):
    """Neither to gradients nor to its tracker, which logs on behind the capture."""
    model = megatron_world.build(device, mtp_layers=1).train()
    plain = megatron_world.build(device)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    model(*tensors, labels=labels)
    logged = {name: value.clone() for name, value in MTPLossLoggingHelper.tracker.items() if torch.is_tensor(value)}
    head = captured(model, tensors, labels=labels)
    found = {name: value for name, value in MTPLossLoggingHelper.tracker.items() if torch.is_tensor(value)}
    assert logged.keys() == found.keys() != set()
    assert all(torch.equal(found[name], value) for name, value in logged.items())
    of_plain = megatron_world.captured(plain, tensors).linear_cross_entropy(labels, backend="torch")
    expected = megatron_world.gradients(plain, -of_plain.logprobs.sum())
    out = head.linear_cross_entropy(labels, backend="torch")
    actual = megatron_world.gradients(model, -out.logprobs.sum())
    own = {name: actual.pop(name) for name in actual.keys() - expected.keys()}
    megatron_world.assert_same_gradients(actual, expected)
    assert own  # of the MTP layer, whose hidden states are a part of the decoder's tensor
    assert not any(gradient.any() for gradient in own.values())
    model(*tensors, labels=labels)
    assert any(not torch.equal(MTPLossLoggingHelper.tracker[name], value) for name, value in logged.items())


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_interrupted_pass_leaves_the_tracker(error, device, tensors):
    model, tracker = megatron_world.build(device, mtp_layers=1).train(), MTPLossLoggingHelper.tracker

    def interrupt(*_):
        assert MTPLossLoggingHelper.tracker is not tracker
        raise error

    model.output_layer.register_forward_pre_hook(interrupt)
    with pytest.raises(error), capture_lm_head(model, mtp="capture"), capture_lm_head(model, mtp="capture"):
        model(*tensors)
    assert MTPLossLoggingHelper.tracker is tracker


def test_mistakes_raise(device, tensors, labels):
    model = megatron_world.build(device, mtp_layers=2)
    with pytest.raises(ValueError, match="mtp must be 'loss' or 'capture', got 'heads'"):
        capture_lm_head(model, mtp="heads")
    head = captured(model, tensors)
    first, second = head.mtp_heads
    assert second.linear_jsd(first, backend="torch").count_nonzero() == BATCH * (SEQUENCE - 1)
    for teacher in (first, second):
        with pytest.raises(ValueError, match="teacher_head must predict no later token than depth 0, got depth"):
            head.linear_jsd(teacher)
    with pytest.raises(
        ValueError, match=r"labels must be \[b, s\], \(3, 23\), for this hidden|labels must be \[b, s\]"
    ):
        first.linear_jsd(head, labels=labels[:, 1:])
    with pytest.raises(ValueError, match=r"labels must be \[b, s\], \(3, 23\), got \(3, 22\)"):
        head.chain_mask(labels[:, 1:])
    model.config.context_parallel_size = 2
    with pytest.raises(ValueError, match="with mtp='capture' rows of one sequence must not lie on several ranks"):
        captured(model, tensors)
    with capture_lm_head(model) as head:  # the MTP losses alone roll over ranks
        pass


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize(("outer", "inner"), [("capture", "loss"), ("loss", "capture")])
def test_a_capture_inside_another_alone_decides_the_pass(outer, inner, labelled, device, tensors, labels):
    """Its MTP losses are of labels that the caller gave, and the outer one keeps what it captured before."""
    model, given = megatron_world.build(device, mtp_layers=1).train(), {"labels": labels} if labelled else {}

    def one_pass():
        MTPLossLoggingHelper.tracker.clear()
        try:
            with capture_lm_head(model, mtp=inner) as head:
                model(*tensors, **given)
        except AttributeError:  # some versions of Megatron need labels where there is MTP
            return None
        gradients = megatron_world.gradients(model, -head.linear_cross_entropy(labels, backend="torch").logprobs.sum())
        return gradients, [len(head.mtp_heads), "values" in MTPLossLoggingHelper.tracker]

    expected = one_pass()
    assert expected or (inner, labelled) == ("loss", False)
    with capture_lm_head(model, mtp=outer) as around:
        model(*tensors, labels=labels)
        before = around.hidden, around.mtp_heads
        found = one_pass()
    assert (around.hidden, around.mtp_heads) == before
    assert (found is None) == (expected is None)
    if found and expected:
        assert found[1] == expected[1]
        megatron_world.assert_same_gradients(found[0], expected[0])


def test_a_teacher_of_stored_hidden_states(device, tensors, labels):
    """The main head's own, stored, teach the MTP heads as the captured head does; a mistake names the argument."""
    model = megatron_world.build(device, mtp_layers=1)
    head = captured(model, tensors)
    stored = StoredHead(head.hidden.detach().transpose(0, 1), head.weight)
    kind = f"torch.float32 on {head.hidden.device}"
    assert repr(stored) == f"StoredHead(hidden [3, 23, 32] {kind}, weight [104, 32] {kind})"
    assert repr(StoredHead([1], None)) == "StoredHead(hidden list, weight NoneType)"
    (mtp_head,), options = head.mtp_heads, {"kinds": ("tv", "jsd"), "labels": labels, "backend": "torch"}
    for teacher_logits_scale in (1.0, 0.5):
        options["teacher_logits_scale"] = teacher_logits_scale
        expected, actual = (mtp_head.linear_divergence(teacher, **options) for teacher in (head, stored))
        assert torch.equal(actual.tv, expected.tv)
        assert torch.equal(actual.jsd, expected.jsd)
    for wrong, message in (
        (stored._replace(hidden=stored.hidden[:, 1:]), r"teacher_head.hidden must have the student's tokens \[b, s\]"),
        (stored._replace(hidden=[1]), "teacher_head.hidden must be a torch.Tensor, got list"),
        (stored._replace(weight=stored.weight[1:]), "teacher_weight must hold as many rows"),
        ((stored.hidden, stored.weight), "teacher_head must be a captured head or a StoredHead, got tuple"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            mtp_head.linear_divergence(wrong, **options)

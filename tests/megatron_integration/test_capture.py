"""`capture_lm_head` on one rank; what needs several is in torchrun_tests/run_megatron.py."""

import pytest
import torch

from megatron_lce import capture_lm_head, enable_fused_linear_ce
from tests import megatron_world
from tests.jsd_oracle import jsd_of_products
from tests.megatron_world import BATCH, SEQUENCE, assert_refused, captured, state


def test_hidden_is_the_very_tensor_and_weight_the_parameter_and_no_logits_are_made(model, tensors):
    given = []
    model.decoder.register_forward_hook(lambda module, args, hidden: given.append(hidden))
    with megatron_world.LogitsSpy() as spy, capture_lm_head(model) as head:
        returned = model(*tensors)
    assert spy.seen == []
    assert tuple(returned.shape) == (BATCH, SEQUENCE, 0)
    assert head.hidden is given[0]
    assert tuple(head.hidden.shape) == (SEQUENCE, BATCH, 32)
    tied = model.share_embeddings_and_output_weights
    assert head.weight is (model.embedding.word_embeddings.weight if tied else model.output_layer.weight)
    assert head.tp_group.size() == 1
    assert head.sequence_parallel is False


@pytest.fixture
def teacher(device):
    """Of another hidden size; its graph is nobody's."""
    return megatron_world.build(device, seed=7, hidden_size=48)


@pytest.mark.parametrize("beta", [0, 0.5])
def test_jsd_is_that_of_the_models_logits(model, teacher, device, beta, tensors, labels):
    labels = torch.where(labels % 5 == 0, -100, labels)
    temperature = torch.linspace(0.5, 2, labels.numel(), device=device).view_as(labels)
    keywords = {"labels": labels, "beta": beta, "temperature": temperature, "student_softcap": 2.0}
    keywords["teacher_temperature"] = temperature.flip(1)
    student_head, teacher_head = captured(model, tensors, 0.25), captured(teacher, tensors, 3.0)
    loss = student_head.linear_jsd(teacher_head, **keywords, teacher_logits_scale=0.5, backend="torch")
    scales = {"student_logits_scale": 0.25, "teacher_logits_scale": 1.5}
    exact = jsd_of_products(model(*tensors).double(), teacher(*tensors).detach().double(), **keywords, **scales)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    upstream = torch.cos(torch.arange(labels.numel(), device=device)).view_as(labels)
    keywords |= {"teacher_logits_scale": 0.5, "backend": "torch"}
    of_loss = teacher_head, keywords.pop("labels"), lambda out, weights: weights * out.jsd, upstream
    weighted = captured(model, tensors, 0.25).linear_divergence_loss(*of_loss, kinds=("jsd",), **keywords).loss
    expected = megatron_world.gradients(model, (exact * upstream).sum())
    for total in ((loss * upstream).sum(), weighted):
        megatron_world.assert_gradients(model, total, expected)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    student_head = captured(model, tensors, 0.25)
    out = student_head.linear_cross_entropy(labels, temperature=temperature, softcap=2.0, backend="torch")
    _, student = student_head.linear_jsd(teacher_head, labels=labels, **keywords, return_student=True)
    torch.testing.assert_close(student.logprobs, out.logprobs)
    torch.testing.assert_close(student.entropy, out.entropy)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("where", ["behind the pass", "in it"])
def test_an_exception_leaves_the_model_as_it_was(model, enabled, where, tensors, labels):
    handle = enable_fused_linear_ce(model, use_fused_linear_ce=enabled, backend="torch")
    before = state(model)
    expected = model(*tensors, labels=labels)
    hook = model.output_layer.register_forward_pre_hook(lambda *_: {}["of a hook"]) if where == "in it" else None

    def interrupted():
        model(*tensors)
        raise KeyError("of the caller")

    with pytest.raises(KeyError), capture_lm_head(model) as head:
        interrupted()
    if hook is not None:
        hook.remove()
    else:
        assert head.linear_cross_entropy(labels, backend="torch").logprobs.shape == labels.shape
    assert state(model) == before
    assert torch.equal(model(*tensors, labels=labels), expected)
    assert handle.enabled == enabled


def test_mtp_is_counted_anew_after_an_exception(device, tensors, labels):
    model = megatron_world.build(device, mtp_layers=2)
    with capture_lm_head(model) as head:
        compute_loss = model.compute_language_model_loss
        model.compute_language_model_loss = lambda labels, logits: compute_loss(labels, logits) / len(heads.pop())
        heads = [["first"]]
        with pytest.raises(IndexError):  # between two heads
            model(*tensors, labels=labels)
        model.compute_language_model_loss = compute_loss
        returned = model(*tensors, labels=labels)
    assert returned.numel() == 0
    assert head.linear_cross_entropy(labels, backend="torch").logprobs.shape == labels.shape


def test_hidden_without_its_graph_trains_nothing(model, teacher, tensors, labels):
    """Not the head alone either: nobody would see that the decoder is left out."""

    def results(head):
        yield head.linear_cross_entropy(labels, backend="torch").logprobs
        yield head.linear_jsd(teacher_head, backend="torch")

    with torch.no_grad():
        teacher_head, without_graph = captured(teacher, tensors), captured(model, tensors)
    for with_gradient, without in zip(results(captured(model, tensors)), results(without_graph), strict=True):
        assert torch.equal(with_gradient, without)
        assert (with_gradient.requires_grad, without.requires_grad) == (True, False)


@pytest.mark.parametrize("enabled", [False, True])
def test_captures_are_closed_last_in_first_out(untied, enabled, tensors, labels):
    """The last one opened gets the pass; in the end the model is its own again."""
    before = state(untied)
    handle = enable_fused_linear_ce(untied, use_fused_linear_ce=enabled, backend="torch")
    expected = untied(*tensors, labels=labels)
    captures = [capture_lm_head(untied) for _ in range(3)]
    heads = [capture.__enter__() for capture in captures]
    above = f"capture_lm_head has replaced {type(untied.output_layer).__name__}.forward after"
    while captures:
        hidden = [head.hidden for head in heads]
        assert untied(*tensors, labels=labels).numel() == 0
        got = [head.hidden is not old for head, old in zip(heads, hidden, strict=True)]
        assert got == [index == len(captures) - 1 for index in range(3)]
        inside = state(untied)
        for below in captures[:-1]:
            assert_refused(RuntimeError, f"{above} capture_lm_head: undo that first", below.__exit__)
        if enabled:
            assert_refused(RuntimeError, f"{above} enable_fused_linear_ce: undo that first", handle.remove)
        assert state(untied) == inside
        captures.pop().__exit__()
    assert torch.equal(untied(*tensors, labels=labels), expected)
    assert handle.enabled == enabled
    handle.remove()
    assert state(untied) == before


def test_a_head_whose_weight_changed_or_was_freed_since_is_refused(untied, tensors, labels):
    for change, message in (
        (lambda weight: weight.detach().add_(1.0), "changed in place after the forward pass"),
        (lambda weight: weight.untyped_storage().resize_(0), "freed, as by FSDP, after the forward pass"),
    ):
        head = captured(untied, tensors)
        change(untied.output_layer.weight)
        assert_refused(RuntimeError, f"the LM head's weight was {message}", head.linear_cross_entropy, labels)


@pytest.mark.filterwarnings("error:fused linear cross-entropy")
def test_a_stage_without_a_head(untied, tensors, labels):
    untied.post_process = False
    del untied.output_layer
    handle = enable_fused_linear_ce(untied, on_unsupported="raise")
    assert (handle.enabled, handle.reasons) == (False, ("this pipeline stage has no LM head",))
    with capture_lm_head(untied) as head:
        returned = untied(*tensors)
    assert tuple(returned.shape) == (SEQUENCE, BATCH, 32)
    assert head.hidden is None
    assert head.weight is None
    with pytest.raises(RuntimeError, match="nothing was captured: this pipeline stage has no LM head"):
        head.linear_cross_entropy(labels)


def test_errors(model, device, tensors, labels):
    with capture_lm_head(model) as unused:
        pass
    tokens, positions, mask = tensors
    head, shorter = captured(model, tensors), captured(model, (tokens[:, :4], positions[:, :4], mask))
    logprobs, jsd, no_pass = head.linear_cross_entropy, head.linear_jsd, "no forward pass has reached the head"
    assert_refused(RuntimeError, f"nothing was captured: {no_pass}", unused.linear_cross_entropy, labels)
    assert_refused(RuntimeError, f"nothing was captured of the teacher: {no_pass}", jsd, unused)
    fixed = {"vocab_start": 0, "sequence_parallel": False}
    assert_refused(TypeError, "sequence_parallel, vocab_start must not be given", logprobs, labels, **fixed)
    assert_refused(TypeError, "vocab_start must not be given", jsd, head, vocab_start=0)
    not_float = "teacher_logits_scale must be a float, got NoneType"
    assert_refused(TypeError, not_float, jsd, head, teacher_logits_scale=None)
    assert_refused(TypeError, "teacher_head must be a captured head or a StoredHead, got Tensor", jsd, labels)
    other_tokens = r"teacher_head must have the student's tokens .*, \(3, 23\), got \(3, 4\)"
    assert_refused(ValueError, other_tokens, jsd, shorter)
    shape = r"must be \[b, s\], \(3, 23\) for this hidden, got "
    assert_refused(ValueError, rf"labels {shape}\(23, 3\)", jsd, head, labels=labels.T)
    assert_refused(ValueError, rf"labels {shape}\(23, 3\)", logprobs, labels.T)
    temperature = torch.ones(3, device=device)
    assert_refused(ValueError, rf"temperature {shape}\(3,\)", logprobs, labels, temperature=temperature)
    assert_refused(TypeError, r"labels must be a torch.Tensor, got list", logprobs, [1])
    two = r"model must hold one LM head, got 2 \(GPTModel, GPTModel\)"
    assert_refused(ValueError, two, capture_lm_head([model, model]).__enter__)
    model.output_layer = torch.nn.Linear(32, 1)
    linear = "the LM head cannot be captured: output_layer is a Linear, which is no"
    assert_refused(ValueError, linear, capture_lm_head(model).__enter__)

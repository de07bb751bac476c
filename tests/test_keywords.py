"""The typed keywords name what the operations take, with the same types: nothing else ties them together."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import megatron_lce
from megatron_lce.api.model_loss import model_loss
from megatron_lce.core.options import Options

LABELS = {"ignore_index", "entropy", "telemetry", "candidates", "skip_ignored"}
CACHE = {"logits_cache_bytes"}
OF_DIVERGENCE = {"temperature", "tp_group", "sequence_parallel", "ignore_index", "vocab_start", "vocab_size"}
OF_DIVERGENCE |= {"skip_ignored", "workspace_bytes", "backend", "weight_grad_sink"}


def keyword_only(operation):
    """Types and defaults of an operation's own keywords, and the typed dict of the others."""
    parameters, hints = inspect.signature(operation).parameters.values(), get_type_hints(operation)
    own = {p.name: (hints[p.name], p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
    others = [hints[p.name].__args__[0] for p in parameters if p.kind is p.VAR_KEYWORD]
    return own, others


def but(types, names):
    return {name: hint for name, hint in types.items() if name not in names}


def test_options_and_typed_keywords_are_those_of_the_operations():
    types = get_type_hints(Options)
    own, _ = keyword_only(megatron_lce.linear_cross_entropy)
    assert own == {field.name: (types[field.name], field.default) for field in fields(Options)}
    of_model, (other,) = keyword_only(model_loss)
    assert get_type_hints(other) | {name: hint for name, (hint, _) in of_model.items()} == types

    of_logits = but(types, LABELS | CACHE)
    divergence = {name: hint for name, hint in types.items() if name in OF_DIVERGENCE} | {
        "beta": float,
        "return_student": bool,
        "teacher_temperature": types["temperature"] | None,
        **{f"{role}_logits_scale": float for role in ("student", "teacher")},
        **{f"{role}_softcap": float | None for role in ("student", "teacher")},
    }
    for name, expected in {
        "linear_topk": but(of_logits, {"reduce_grad_hidden", "weight_grad_sink"}),
        "linear_logits_at": of_logits,
        "support_logprobs": of_logits,
        "linear_token_loss": but(types, CACHE),
        "linear_cross_entropy": types,
        "linear_divergence": divergence,
        "linear_divergence_loss": divergence,
        "linear_jsd": divergence,
    }.items():
        own, others = keyword_only(getattr(megatron_lce, name))
        assert all(get_type_hints(other) == expected for other in others)
        assert name == "linear_cross_entropy" or others
        of_captured, (other,) = keyword_only(getattr(megatron_lce.CapturedHead, name))
        found = get_type_hints(other) | {keyword: hint for keyword, (hint, _) in of_captured.items()}
        assert found == (
            expected if name == "linear_cross_entropy" else expected | {k: hint for k, (hint, _) in own.items()}
        )

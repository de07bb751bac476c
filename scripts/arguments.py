"""The training programs' arguments, each described once, and how every `--help` is laid out."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it was written, and the default behind each option's text.

    A text that ends in "; None: what is then taken." has that as its default: nobody can type None. An empty default
    stands in the text itself.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, _, meaning = (action.help or "").partition("; None: ")
        if action.default not in (None, "") or action.help is None:
            return f"{text}. (default: %(default)s)" if meaning else super()._get_help_string(action)
        return f"{text}. (default: {meaning.removesuffix('.')})" if meaning else text


DTYPES = ("fp32", "bf16", "fp16")
TRANSFORMER_IMPLS = ("local", "transformer_engine")  # of Megatron's option
# Type or choices, default, help. An option that is True or False also has its `--no-` form.
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "use_fused_linear_ce": (bool, True, "Use the fused head; off: Megatron's logits."),
    "tp": (int, 1, "Tensor-parallel size; the other ranks are data-parallel."),
    "sequence_parallel": (bool, False, "Shard activations along the sequence too."),
    "device": (("cuda", "cpu"), None, "Device of all ranks; None: cuda where every rank has a GPU."),
    "dtype": (DTYPES, None, "Type of the weights; None: bf16 on cuda, fp32 on cpu."),
    "num_layers": (int, 2, "Transformer layers of the model."),
    "hidden_size": (int, 128, "Hidden size of the model."),
    "num_heads": (int, 4, "Attention heads of the model."),
    "tied": (bool, False, "Let the head share the embedding's weight."),
    "steps": (int, 50, "Steps to train."),
    "lr": (float, 1e-3, "Learning rate of Adam."),
    "seed": (int, 1234, "Seed of weights and data."),
    "num_microbatches": (int, 1, "Microbatches of each optimizer step on each data-parallel rank."),
    "workspace_mib": (float, 512, "Most that transient buffers of the fused head take, in MiB."),
    "out": (Path, Path("demo_out"), "Folder for the report and for cached data."),
    "report": (str, "report.json", "Name of the report in --out."),
    # train_sft, train_distill
    "vocab_size": (int, 8192, "Vocabulary of the tokenizer and the models."),
    "row_length": (int, 1024, "Tokens of a packed row; a microbatch is one row."),
    # train_sft, train_grpo
    "padded_vocab_size": (int, None, "Vocabulary of the model; None: that of the tokens."),
    "loss": (str, None, "How the fused loss is computed."),  # each has its own choices
    # train_sft
    "transformer_impl": (
        TRANSFORMER_IMPLS,
        "local",
        "Layers: torch's norms and attention, or Megatron's over TransformerEngine.",
    ),
    # train_grpo
    "digits": (int, 5, "Digits to sort."),
    "warm_up_steps": (int, 20, "Supervised steps before GRPO."),
    "warm_up_lr": (float, 3e-3, "Learning rate of the supervised steps."),
    "prompts": (int, 16, "Prompts a step on each data-parallel rank."),
    "samples": (int, 16, "Samples of each prompt, at least 2."),
    "updates": (int, 4, "Optimizer steps on the samples of one step."),
    "level": (("token", "sequence"), "token", "What has a clipped ratio: GRPO's tokens or GSPO's sequences."),
    "clip_low": (float, 0.2, "How far below 1 the ratio counts."),
    "clip_high": (float, 0.28, "How far above 1 the ratio counts."),
    "kl_weight": (float, 0.01, "Weight of the KL divergence to the reference."),
    "entropy_weight": (float, 0.001, "Weight of the entropy bonus."),
    # train_grpo, train_distill
    "temperature": (float, 1.0, "Temperature of the softmaxes."),
    # train_distill
    "teacher_steps": (int, 100, "Supervised steps of the teacher."),
    "teacher_lr": (float, 2e-3, "Learning rate of the teacher's steps."),
    "student_num_layers": (int, 1, "Transformer layers of the student."),
    "student_hidden_size": (int, 64, "Hidden size of the student."),
    "beta": (float, 0.5, "The divergence: 0 is forward KL, 1 reverse KL, between them JSD."),
    "on_policy": (bool, False, "The student samples, and teachers of several domains score what it sampled."),
    "teachers": (int, 2, "Teachers of on-policy distillation, a domain each."),
    "prompt_length": (int, 32, "Tokens of an on-policy prompt."),
    "sampled_tokens": (int, 32, "Tokens that the student samples behind it."),
    "topk": (int, 0, "Ids of the teacher that the student learns from; 0: the vocabulary."),
    "tail": (("drop", "bin", "renormalise"), "bin", "What becomes of all other ids."),
    "held_out_rows": (int, 8, "Packed rows that no step sees, for the measurements on the way."),
    # train_mtp
    "mtp_layers": (int, 2, "Depths of multi-token prediction."),
}
COMMON = tuple(OPTIONS)[: tuple(OPTIONS).index("report") + 1]  # of every training program


def parser(description: str, options: Iterable[str] = (), **defaults: Any) -> argparse.ArgumentParser:
    """A training program's parser: the common options and these, with other defaults for some.

    A default that is a tuple is the option's choices, of which the first is the default.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    for name in (*COMMON, *options):
        kind, default, text = OPTIONS[name]
        default = defaults.pop(name, default)
        if isinstance(default, tuple):
            kind, default = default, default[0]
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else how
        made.add_argument(f"--{name.replace('_', '-')}", default=default, help=text, **how)
    assert not defaults, f"no options: {defaults}"
    return made

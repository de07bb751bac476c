"""Packages with the modules and names of frameworks, on which plugins are tried."""

import functools
import importlib
import operator
import os
import sys
import textwrap

import pytest

STEPS = """
    import torch

    @torch.no_grad()
    def forward_only(f, args, model):
        return model[0]()

    def train_one_step(args, model):
        return model[0]()
"""
KERNEL = "verl.utils.kernel.linear_cross_entropy"
SKYRL = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
# By framework: its files, and what each plugin replaces there.
FILES = {
    "verl": {
        "__init__.py": """
            import importlib.metadata, os

            __version__ = "7.8.9"
            for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
                importlib.import_module(name)
            for entry in importlib.metadata.entry_points(group="verl.plugins"):
                entry.load()
        """,
        "models/mcore/__init__.py": "from verl.models.mcore.registry import get_mcore_engine_forward_fn",
        "models/mcore/registry.py": """
            from verl.models.mcore.model_forward import gptmodel_forward_model_engine

            def get_mcore_engine_forward_fn():
                return gptmodel_forward_model_engine
        """,
        "models/mcore/model_forward.py": """
            def _build_mtp_loss_mask_nested(response_mask, input_ids_lengths, response_attention_mask): ...

            def gptmodel_forward_model_engine(model, logits_processor=None, logits_processor_args=None, vision=False):
                return "verl's own", model, logits_processor, logits_processor_args, vision
        """,
        "models/mcore/util.py": """
            def preprocess_thd_engine(input_ids, pre_process=True, need_roll=False):
                return input_ids, None

            def preprocess_bshd_engine(input_ids, pre_process=True): ...
        """,
        "workers/engine/megatron/transformer_impl.py": """
            class MegatronEngineWithLMHead:
                def _lm_head_logits_processor(
                    self, logits, label, temperature, *, calculate_sum_pi_squared, calculate_entropy,
                    distillation_use_topk, distillation_only, logits_processor_func, batch, data_format
                ):
                    raise AssertionError("logits were asked for")
        """,
        "models/mcore/model_forward_fused.py": f"from {KERNEL} import linear_cross_entropy",
        "utils/kernel/linear_cross_entropy.py": """
            class LinearCrossEntropy:
                apply = classmethod(len)

                @staticmethod
                def forward(
                    ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None
                ): ...

            linear_cross_entropy = LinearCrossEntropy.apply
        """,
        "trainer/distillation/megatron/losses.py": """
            def compute_forward_kl_topk(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format):
                return "verl's own"
        """,
    },
    "slime": {
        "backends/megatron_utils/loss.py": """
            def get_responses(
                logits, *, args, unconcat_tokens, total_lengths, response_lengths, apply_temperature=True
            ): ...
            def _allgather_cp_redistribute(res, *, logits_local_len, total_lengths, response_lengths): ...
            def get_log_probs_and_entropy(
                logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
                non_loss_data=True, top_p_token_ids=None, top_p_token_offsets=None
            ): ...
        """,
        "backends/megatron_utils/model.py": STEPS,
        "backends/megatron_utils/actor.py": """
            from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
            from slime.backends.megatron_utils.model import forward_only
        """,
    },
    "miles": {
        "backends/training_utils/loss_hub/logit_processors.py": """
            def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths, max_seq_lens=None): ...
            def get_log_probs_and_entropy(
                logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
                entropy_requires_grad=True, non_loss_data=True, max_seq_lens=None
            ): ...
        """,
        "backends/megatron_utils/model.py": STEPS,
        "backends/megatron_utils/actor.py": """
            from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy
            from miles.backends.megatron_utils.model import forward_only
        """,
    },
    "swift": {
        "megatron/trainers/vocab_parallel_utils.py": """
            def compute_logps_and_entropy_from_logits(
                logits, labels, compute_entropy=False, entropy_chunk_size=512
            ): ...
        """,
        "megatron/trainers/utils.py": "def compute_per_token_logps_fn(model, args): ...",
        "megatron/trainers/rlhf_mixin.py": "from swift.megatron.trainers.utils import compute_per_token_logps_fn",
        "rlhf_trainers/gkd_loss.py": """
            def gkd_loss(
                student_logits, teacher_output, labels, beta, temperature, gather_fn=None, log_softmax_fn=None,
                kl_div_fn=None, chunk_size=512
            ): ...
        """,
        "megatron/trainers/gkd_trainer.py": """
            from swift.rlhf_trainers.gkd_loss import gkd_loss

            class MegatronGKDTrainer:
                def _compute_teacher_logits_local(self, encoded_batches, vp_stage=None): ...
                def loss_func(self, output_tensor, *, labels, teacher_output, data_source=None): ...
                def forward_step(self, data_iterator, model): ...
        """,
        "megatron/trainers/grpo_trainer.py": """
            from swift.megatron.trainers.vocab_parallel_utils import compute_logps_and_entropy_from_logits

            class MegatronGRPOTrainer:
                def forward_step(self, data_iterator, model): ...
        """,
    },
    "megatron.bridge": {
        "training/gpt_step.py": """
            def get_batch(iterator):
                return "tokens", "labels", next(iterator)

            def _forward_step_common(state, data_iterator, model, *, _get_batch_fn=None):
                tokens, labels, mask = (_get_batch_fn or get_batch)(data_iterator)
                return model(tokens=tokens, labels=labels), mask
        """,
        "training/other_step.py": "from megatron.bridge.training.gpt_step import _forward_step_common",
    },
    "nemo_rl": {
        "distributed/model_utils.py": """
            def from_parallel_hidden_states_to_logprobs(
                tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target, vocab_start_index,
                vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None
            ): ...
        """,
        "models/megatron/train.py": """
            def forward_with_post_processing_fn(
                data_iterator, model, post_processing_fn, sampling_params=None, use_fused_linear_logprobs=False
            ): ...
        """,
        "train.py": """
            from nemo_rl.distributed.model_utils import from_parallel_hidden_states_to_logprobs
            from nemo_rl.models.megatron.train import forward_with_post_processing_fn
        """,
    },
    "skyrl": {
        "backends/skyrl_train/distributed/megatron/model_utils.py": """
            def _fused_lm_head_logprob_apply(
                backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group,
                inference_only
            ): ...

            def from_parallel_hidden_to_logprobs(
                hidden, lm_head_weight, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False,
                cp_group=None, chunk_size=None, temperature=1.0, fused_backend="torch"
            ): ...

            def from_parallel_hidden_to_logprobs_packed_sequences(
                hidden, lm_head_weight, target, cu_seqlens_padded, unpacked_seqlen, vocab_start_index, vocab_end_index,
                group, inference_only=False, cp_group=None, chunk_size=None, attention_mask=None, sub_seq_lengths=None,
                temperature=1.0, fused_backend="torch"
            ): ...
        """,
        "worker.py": f"from {SKYRL} import from_parallel_hidden_to_logprobs",
    },
    "areal": {
        "models/mcore/vocab_parallel_head.py": """
            class ChunkedLMHeadOutput: ...

            def chunked_lm_head_logprobs_entropy(
                output_layer, hidden_states, weight, labels, *, temperature, chunk_size, logit_scale=1.0
            ): ...
        """,
        "engine.py": "from areal.models.mcore.vocab_parallel_head import chunked_lm_head_logprobs_entropy",
    },
    "megatron.rl": {
        "rl_utils.py": """
            def selective_log_softmax(logits, index): ...
            def get_logprobs(model, tokens, position_ids, no_grad=False): ...
            def compute_logprobs_batch(model, data_loader, dtype, pp_group): ...
        """,
        "train.py": "from megatron.rl.rl_utils import get_logprobs",
    },
}
PLUGIN_OF = {"swift": "ms_swift", "megatron.bridge": "bridge", "megatron.rl": "megatron_rl"}
BY_NAME = {  # modules that import a replaced function by its name
    "verl": [("verl.models.mcore.registry", "gptmodel_forward_model_engine")],
    "slime": [("slime.backends.megatron_utils.actor", name) for name in ("get_log_probs_and_entropy", "forward_only")],
    "miles": [("miles.backends.megatron_utils.actor", name) for name in ("get_log_probs_and_entropy", "forward_only")],
    "swift": [
        ("swift.megatron.trainers.rlhf_mixin", "compute_per_token_logps_fn"),
        ("swift.megatron.trainers.grpo_trainer", "compute_logps_and_entropy_from_logits"),
    ],
    "megatron.bridge": [("megatron.bridge.training.other_step", "_forward_step_common")],
    "nemo_rl": [
        ("nemo_rl.train", "from_parallel_hidden_states_to_logprobs"),
        ("nemo_rl.train", "forward_with_post_processing_fn"),
    ],
    "skyrl": [("skyrl.worker", "from_parallel_hidden_to_logprobs")],
    "areal": [("areal.engine", "chunked_lm_head_logprobs_entropy")],
    "megatron.rl": [("megatron.rl.train", "get_logprobs")],
}


def forget(framework):
    """The framework and its plugin as if they had never been imported."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{framework}.")]:
        del sys.modules[name]
    plugin = sys.modules.pop(f"megatron_lce.plugins.{PLUGIN_OF.get(framework, framework)}", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if plugin is None or finder is not plugin.plugin]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes a stand-in of a framework, with parts of its files replaced, and makes it importable."""
    made = []

    def write(framework, **replaced):
        folder = tmp_path.joinpath(*framework.split("."))
        for file, text in FILES[framework].items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            text = functools.reduce(lambda text, change: text.replace(*change), replaced.items(), text)
            path.write_text(textwrap.dedent(text))
        for package in [folder, *filter(os.path.isdir, folder.rglob("*"))]:
            (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        forget(framework)
        made.append(framework)
        return tmp_path

    yield write
    for framework in made:
        forget(framework)


def import_plugin(framework):
    return importlib.import_module(f"megatron_lce.plugins.{PLUGIN_OF.get(framework, framework)}")


def get(target):
    module, _, path = target.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


def is_ours(function):
    code = getattr(function, "__globals__", {"__name__": ""})
    return code["__name__"].startswith("megatron_lce.")

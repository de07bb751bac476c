"""Packages with the modules and names of frameworks, on which plugins are tried."""

STEPS = """
    import torch

    @torch.no_grad()
    def forward_only(f, args, model):
        return model[0]()

    def train_one_step(args, model):
        return model[0]()
"""
# By framework: its files, and what each plugin replaces there.
FILES = {
    "verl": {
        "__init__.py": """
            import importlib, os

            __version__ = "7.8.9"
            for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
                importlib.import_module(name)
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
        "workers/engine/megatron/transformer_impl.py": """
            class MegatronEngineWithLMHead:
                def _lm_head_logits_processor(
                    self, logits, label, temperature, *, calculate_sum_pi_squared, calculate_entropy,
                    distillation_use_topk, distillation_only, logits_processor_func, batch, data_format
                ):
                    raise AssertionError("logits were asked for")
        """,
        "models/mcore/model_forward_fused.py": "from verl.kernel import linear_cross_entropy",
        "models/mcore/model_forward_1f1b_overlap.py": "from verl.kernel import linear_cross_entropy",
        "kernel.py": "class Kernel:\n    apply = classmethod(len)\n\nlinear_cross_entropy = Kernel.apply",
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
}
PLUGIN_OF = {"swift": "ms_swift", "megatron.bridge": "bridge"}
BY_NAME = {  # modules that import a replaced function by its name
    "verl": [("verl.models.mcore.registry", "gptmodel_forward_model_engine")],
    "slime": [("slime.backends.megatron_utils.actor", name) for name in ("get_log_probs_and_entropy", "forward_only")],
    "miles": [("miles.backends.megatron_utils.actor", name) for name in ("get_log_probs_and_entropy", "forward_only")],
    "swift": [
        ("swift.megatron.trainers.rlhf_mixin", "compute_per_token_logps_fn"),
        ("swift.megatron.trainers.grpo_trainer", "compute_logps_and_entropy_from_logits"),
    ],
    "megatron.bridge": [("megatron.bridge.training.other_step", "_forward_step_common")],
}

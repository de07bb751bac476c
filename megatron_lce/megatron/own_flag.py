"""Megatron's own flag for a fused linear cross-entropy, on GPUs that its kernel does not support."""

import importlib
import importlib.util

from megatron_lce import compat

_CALLED_IN = "megatron.core.transformer.linear_cross_entropy"  # imports the operation by name
_DEFINED_IN = "megatron.core.fusions.fused_linear_cross_entropy"


def install_megatron_linear_cross_entropy(install: bool = True) -> None:
    """Replace Megatron's operation by `compat.megatron_linear_cross_entropy`, for all models of the process.

    Megatron's `cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"` then runs on every GPU that Triton
    supports, and on a CPU; its own kernel runs on compute capability 10 only. The dev branch of Megatron-LM (August
    2026) has this flag; no release up to 0.19.2 has it, nor has the main branch (0.20). There, and with HybridModel,
    which fails under the flag, use `enable_fused_linear_ce`.

    Args:
        install: False gives Megatron its own operation back.

    Raises:
        RuntimeError: this megatron-core has no such operation.
    """
    if importlib.util.find_spec(_CALLED_IN) is None:
        import megatron.core

        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} has no fused linear cross-entropy of its own, as Megatron-LM's "
            "dev branch has: use enable_fused_linear_ce"
        )
    operation = compat if install else importlib.import_module(_DEFINED_IN)
    name = "megatron_linear_cross_entropy" if install else "linear_cross_entropy"
    importlib.import_module(_CALLED_IN).linear_cross_entropy = getattr(operation, name)  # type: ignore[attr-defined]

"""Training programs on Megatron-core, and what they and the tests share to run it."""

import logging
import warnings

# Megatron warns once a rank about every optional library it does without, and torch about the collectives Megatron
# calls by their older names: two dozen lines that would bury what these programs print.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
# On a CPU with CUDA's toolkit every process says that there is no CUDA runtime.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

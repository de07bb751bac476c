"""Runs the programs of this folder on several ranks; each prints what it compared and exits non-zero on a failure."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks

FOLDER = Path(__file__).resolve().parent

PROGRAMS = [
    ("run_megatron.py", 4, ()),
    ("run_megatron.py", 2, ("--checks", "fsdp")),  # without tensor parallelism; four ranks run the rest
    ("run_parity.py", 1, ()),
    ("run_parity.py", 3, ()),
    pytest.param("run_megatron.py", 4, ("--combinations", "all"), marks=pytest.mark.slow),
    # Every twelfth of the cases that three ranks run.
    pytest.param("run_parity.py", 4, (), marks=pytest.mark.slow),
]


@pytest.mark.torchrun
@pytest.mark.parametrize(("program", "ranks", "options"), PROGRAMS)
def test_program(program, ranks, options):
    printed = run_ranks(ranks, str(FOLDER / program), "--device", "cpu", *options, timeout=600)
    assert ", 0 failed" in printed, printed[-6000:]


GRADIENT_OF_ZERO = """torch: Case(
    operation="linear_jsd", shape=(12,), hidden_size=1, shards=(127,), vocab_size=1, teacher_size=1,
    logit_std=300.0, upstream=("logprobs",), seed=0, members=(0,), bits=True,
    keywords={"temperature": 0.3, "ignore_index": -100, "workspace_bytes": 2**29, "beta": 0,
              "student_logits_scale": -1.5, "kinds": ("forward_kl", "reverse_kl", "tv")})"""


@pytest.mark.torchrun
def test_fuzz_allows_an_error_of_a_gradient_of_zero():
    printed = run_ranks(1, str(FOLDER / "run_fuzz.py"), "--device", "cpu", "--repeat", GRADIENT_OF_ZERO, timeout=120)
    assert "right" in printed, printed[-6000:]


@pytest.mark.torchrun
def test_program_as_the_readme_starts_it():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = str(FOLDER / "run_parity.py")
    result = subprocess.run([*command, program, "--device", "cpu"], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    assert ", 0 failed" in result.stdout, result.stdout[-6000:]


@pytest.mark.torchrun
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_layers_over_transformer_engine_are_refused_without_it():
    with pytest.raises(AssertionError, match="transformer_impl is 'transformer_engine', which is not installed"):
        run_ranks(1, str(FOLDER / "run_megatron.py"), "--device", "cpu", "--transformer-impl", "transformer_engine")


@pytest.mark.torchrun
def test_other_ranks_end_with_an_error_where_one_fails():
    command = [sys.executable, str(FOLDER / "run_failures.py"), "--device", "cpu", "--ranks", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-2000:]}"

"""Starts the programs of this folder with torchrun; each prints what it compared and exits non-zero on a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent

PROGRAMS = [
    ("run_parity.py", 2),
    ("run_parity.py", 3),
    ("run_parity.py", 4),
    ("run_jsd.py", 3),
    ("run_megatron.py", 4),
]


@pytest.mark.torchrun
@pytest.mark.parametrize(("program", "ranks"), PROGRAMS, ids=[f"{name}-{ranks}" for name, ranks in PROGRAMS])
def test_program(program, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(FOLDER / program), "--device", "cpu"],
        cwd=FOLDER.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    assert ", 0 failed" in result.stdout, result.stdout[-6000:]

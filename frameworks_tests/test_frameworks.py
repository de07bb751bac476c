"""Other projects' own code with the diffs of docs/adoption.md applied, beside the same code as it is.

`make test-frameworks` says where the unpacked wheels lie (FRAMEWORKS, MEGATRON) and passes on the paths of checkouts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import recipes

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
MEGATRON_VERSIONS = ("0.14.0", "0.16.1", "0.19.2")  # 0.16.1 is the one installed


def folder_of(variable: str, inside: str = "") -> Path:
    """A folder named by an environment variable; the test is skipped where there is none."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set: make test-frameworks {variable}=PATH")
    path = Path(os.environ[variable]).resolve() / inside
    assert path.is_dir(), f"{variable}: there is no {path}"
    return path


def run(program: str, ranks: int, *arguments: object, megatron: str = "0.16.1") -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if megatron != "0.16.1":
        paths.insert(0, str(folder_of("MEGATRON", megatron)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, str(FOLDER / program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
    assert "ok " in result.stdout


@pytest.fixture(scope="session")
def verl(tmp_path_factory):
    into = tmp_path_factory.mktemp("verl")
    recipes.adopt(folder_of("FRAMEWORKS", "verl-0.9.1"), "verl", into)
    return into


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("megatron", MEGATRON_VERSIONS)
def test_verl(verl, megatron, ranks):
    run("run_verl.py", ranks, verl, megatron=megatron)

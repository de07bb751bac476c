"""The wheel in an environment that has torch and nothing else."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import importlib.util, torch, megatron_lce
assert not importlib.util.find_spec("megatron")
hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
labels = torch.arange(4)
loss = -megatron_lce.linear_cross_entropy(hidden, weight, labels).logprobs.mean()
loss.backward()
expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
torch.testing.assert_close(loss, expected)
print(megatron_lce.__file__)
"""


@pytest.mark.slow
def test_the_wheel_in_an_environment_with_torch_alone(tmp_path, package_index):
    def run(*command: object) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run([*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("megatron_lce-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    run(python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    assert str(tmp_path) in run(python, "-c", PROGRAM)
    run(tmp_path / "empty/bin/megatron-lce", "doctor")

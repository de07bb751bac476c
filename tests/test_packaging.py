"""What pip and an index get: metadata, the files of both archives, and editable installs that type checkers follow."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import megatron_lce

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow  # pip fetches setuptools

SNIPPET = """
import megatron_lce
from megatron_lce.plugins import patching

reveal_type(megatron_lce.linear_topk)
megatron_lce.linear_topk(1, 2, "3")
"""


def run(*command, **keywords):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, check=False, **keywords)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory, package_index):
    """An environment with an editable install of a copy of the tree, and the copy's sdist and wheel."""
    folder = tmp_path_factory.mktemp("built")
    clean = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "demo_out")
    shutil.copytree(ROOT, folder / "tree", ignore=clean)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = folder / "venv" / "bin" / "python"
    backend = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    for command in (
        [sys.executable, "-m", "venv", folder / "venv"],
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", "."],
        [python, "-m", "pip", "install", "--quiet", "setuptools>=77"],
        [python, "-c", backend],
    ):
        code, printed = run(*command, cwd=folder / "tree", env=environment)
        assert code == 0, printed
    return folder


def test_type_checkers_follow_an_editable_install(built):
    (built / "snippet.py").write_text(SNIPPET)
    python, cache = built / "venv" / "bin" / "python", built / "cache"
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", cache, "snippet.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _, printed = run(*mypy, cwd=built, env=environment)
    assert 'Revealed type is "def (hidden: ' in printed
    assert 'Argument 3 to "linear_topk" has incompatible type "str"; expected "int"' in printed
    assert "import-untyped" not in printed


def test_metadata(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        metadata = message_from_bytes(wheel.read(next(name for name in names if name.endswith("/METADATA"))))
    assert (metadata["Name"], metadata["Version"]) == ("megatron-lce", megatron_lce.__version__)
    assert f"name: {metadata['Author']}\n" in (ROOT / "CITATION.cff").read_text()
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")
    assert not [text for text in metadata.get_all("Classifier") if text.startswith("License ::")]
    assert 'numpy; extra == "triton"' in metadata.get_all("Requires-Dist")  # its interpreter needs it
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_lce").rglob("*.py")} <= {*names}
    assert "megatron_lce/py.typed" in names
    assert not [name for name in names if not name.startswith(("megatron_lce/", "megatron_lce-"))]
    words = metadata.get_payload()
    assert words.startswith("# megatron-lce\n")
    assert not re.findall(r"\]\((?!https?:)", words)  # an index follows no paths of the tree


PROGRAM = """
import importlib.util, torch, megatron_lce
assert not importlib.util.find_spec("megatron")
hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
loss = -megatron_lce.linear_cross_entropy(hidden, weight, torch.arange(4)).logprobs.mean()
loss.backward()
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, torch.arange(4)))
print(megatron_lce.__file__)
"""


def test_the_wheel_in_an_environment_with_torch_alone(built, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    folder, wheel = tmp_path / "empty/bin", next(built.glob("*.whl"))
    for command in (
        [sys.executable, "-m", "venv", tmp_path / "empty"],
        [folder / "python", "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel],
        [folder / "megatron-lce", "doctor"],
        [folder / "python", "-c", PROGRAM],
    ):
        code, printed = run(*command, cwd=tmp_path, env=environment)
        assert code == 0, printed
    assert printed.startswith(str(tmp_path))


def test_the_source_archive_has_no_tests_without_their_helpers(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md", "CHANGELOG.md", "docs/sft.md"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "images").iterdir()} <= names
    assert not [name for name in names if name.startswith(("tests", "torchrun_tests", "scripts", "benchmark"))]

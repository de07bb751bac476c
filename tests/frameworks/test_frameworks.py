"""Other projects' own code with the diffs of docs/recipes applied, beside the same code as it is.

`make test-frameworks` says where the unpacked wheels lie (FRAMEWORKS, MEGATRON) and passes on the paths of checkouts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import recipes

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# Without what tests/conftest.py sets for this process: other projects' code runs as it does outside of tests.
ENVIRONMENT = {x: value for x, value in os.environ.items() if x not in ("TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG")}
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
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
    assert "ok " in result.stdout + result.stderr


def adopted(recipe: str, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp(recipe)
    recipes.adopt(recipe, checkout, into)
    return into


@pytest.fixture(scope="session")
def verl(tmp_path_factory):
    return adopted("verl", folder_of("FRAMEWORKS", "verl-0.9.1"), tmp_path_factory)


def test_every_recipe_is_run_here():
    tests = Path(__file__).read_text()
    assert {name for name in recipes.names() if f'adopted("{name}"' not in tests} == set()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("megatron", MEGATRON_VERSIONS)
def test_verl(verl, megatron, ranks):
    run("run_verl.py", ranks, verl, megatron=megatron)


def test_timing_of_verl(verl, tmp_path):
    options = {"tokens": 64, "sequence-length": 16, "hidden": 256, "heads": 4, "vocab": 2048}
    options |= {"device": "cpu", "output": tmp_path / "time.json"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run("time_verl.py", 2, folder_of("FRAMEWORKS", "verl-0.9.1"), verl, *arguments, megatron="0.19.2")


@pytest.mark.parametrize("ranks", [1, 2])
def test_nemo_rl(ranks, tmp_path_factory):
    run("run_nemo_rl.py", ranks, adopted("nemo_rl", folder_of("NEMO_RL"), tmp_path_factory))


@pytest.mark.parametrize("ranks", [1, 2])
def test_slime(ranks, tmp_path_factory):
    own = folder_of("SLIME")
    run("run_slime.py", ranks, own, adopted("slime", own, tmp_path_factory))


@pytest.mark.parametrize("ranks", [1, 2])
def test_skyrl(ranks, tmp_path_factory):
    run("run_skyrl.py", ranks, adopted("skyrl", folder_of("SKYRL"), tmp_path_factory), megatron="0.19.2")


@pytest.mark.parametrize("ranks", [1, 2])
def test_areal(ranks, tmp_path_factory):
    run("run_areal.py", ranks, adopted("areal", folder_of("AREAL"), tmp_path_factory))


@pytest.mark.parametrize("ranks", [1, 2])
def test_areal_pull(ranks, tmp_path_factory):
    own = folder_of("AREAL_1322")
    run("run_areal_pull.py", ranks, adopted("areal_1322", own, tmp_path_factory))


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_bridge(ranks):
    run("run_bridge.py", ranks, folder_of("MEGATRON_BRIDGE", "src"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_pretrain_gpt(ranks, tmp_path_factory, monkeypatch):
    own = folder_of("MEGATRON_LM")
    monkeypatch.setenv("PYTHONPATH", str(own))
    run("run_pretrain.py", ranks, own, adopted("megatron_lm", own, tmp_path_factory))


@pytest.mark.parametrize(("ranks", "arguments"), [(1, ()), (2, ()), (2, ("--context",))])
def test_megatron_rl(ranks, arguments, tmp_path_factory, monkeypatch):
    own = folder_of("MEGATRON_LM")
    monkeypatch.setenv("PYTHONPATH", str(own))
    run("run_megatron_rl.py", ranks, own, adopted("megatron_rl", own, tmp_path_factory), *arguments)


@pytest.mark.parametrize("what", ["one rank", "two ranks"])
def test_megatron_of_a_checkout(what):
    """This project's own integration tests, on a checkout of Megatron-LM: main, dev, or any other."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "tests/megatron_integration"]
    if what == "two ranks":
        program = "torchrun_tests/run_megatron.py"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, "--device", "cpu"]
    path = os.pathsep.join([str(folder_of("MEGATRON_LM")), str(ROOT)])
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-4000:]}"

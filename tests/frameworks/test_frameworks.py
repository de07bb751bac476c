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


def source(name: str) -> Path:
    """A released wheel of FRAMEWORKS, such as verl-0.9.1, or the checkout that a variable names."""
    return folder_of("FRAMEWORKS", name) if "-" in name else folder_of(name)


def test_every_recipe_is_run_here():
    tests = Path(__file__).read_text()
    assert {name for name in recipes.names() if f'adopted("{name}"' not in tests} == set()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("megatron", MEGATRON_VERSIONS)
@pytest.mark.parametrize("version", ["verl-0.9.1", "VERL"])
def test_verl(version, megatron, ranks, tmp_path_factory):
    run("run_verl.py", ranks, adopted("verl", source(version), tmp_path_factory), megatron=megatron)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("megatron", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("version", ["verl-0.9.1", "VERL"])
def test_verl_engine(version, megatron, ranks, tmp_path_factory):
    own = source(version)
    run("run_verl_engine.py", ranks, own, adopted("verl_engine", own, tmp_path_factory), megatron=megatron)


def test_timing_of_verl(tmp_path, tmp_path_factory):
    own = source("verl-0.9.1")
    options = {"tokens": 64, "sequence-length": 16, "hidden": 256, "heads": 4, "vocab": 2048, "masked": 0.6}
    options |= {"device": "cpu", "output": tmp_path / "time.json"}
    folders = [own, *(adopted(recipe, own, tmp_path_factory) for recipe in ("verl", "verl_engine"))]
    run("time_verl.py", 2, *folders, *(f"--{name}={value}" for name, value in options.items()), megatron="0.19.2")


@pytest.mark.parametrize(("version", "ranks"), [("ms_swift-4.6.0", 1), ("ms_swift-4.6.0", 2), ("MS_SWIFT", 1)])
def test_ms_swift(version, ranks, tmp_path_factory):
    own = source(version)
    bridge = folder_of("FRAMEWORKS", "mcore_bridge-1.6.5")
    run("run_ms_swift.py", ranks, own, adopted("ms_swift", own, tmp_path_factory), bridge)


def test_ms_swift_of_a_checkout_beside_the_release(tmp_path_factory):
    """At TP=2 the gradients of the main branch of August 2026 are wrong: the release is the judge."""
    fused = adopted("ms_swift", source("MS_SWIFT"), tmp_path_factory)
    run("run_ms_swift.py", 2, source("ms_swift-4.6.0"), fused, folder_of("FRAMEWORKS", "mcore_bridge-1.6.5"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", ["ms_swift-4.6.0", "MS_SWIFT"])
def test_ms_swift_preference(version, ranks):
    run("run_ms_swift_preference.py", ranks, source(version), folder_of("FRAMEWORKS", "mcore_bridge-1.6.5"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_nemo_rl(ranks, tmp_path_factory):
    own = folder_of("NEMO_RL")
    run("run_nemo_rl.py", ranks, adopted("nemo_rl", own, tmp_path_factory), own)


@pytest.mark.parametrize(("ranks", "arguments"), [(1, ()), (2, ()), (2, ("--context",))])
def test_slime(ranks, arguments, tmp_path_factory):
    own = folder_of("SLIME")
    run("run_slime.py", ranks, own, adopted("slime", own, tmp_path_factory), *arguments)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", ["verl-0.9.1", "VERL"])
def test_verl_topk(version, ranks):
    run("run_verl_topk.py", ranks, source(version))


@pytest.mark.parametrize("ranks", [1, 2])
def test_miles(ranks, tmp_path_factory):
    own = folder_of("MILES")
    run("run_miles.py", ranks, own, adopted("miles", own, tmp_path_factory))


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
def test_megatron_bridge_training(ranks, tmp_path_factory):
    own = folder_of("MEGATRON_BRIDGE", "src")
    run("run_bridge_training.py", ranks, own, adopted("megatron_bridge", own, tmp_path_factory))


@pytest.mark.parametrize("ranks", [1, 2])
def test_mcore_adapter(ranks):
    run("run_mcore_adapter.py", ranks, folder_of("ROLL"))


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

"""Other projects' own code with a plugin or a diff of docs/recipes, beside the same code as it is.

`make test-frameworks` says where the unpacked wheels lie (FRAMEWORKS, MEGATRON) and passes on the paths of checkouts.
"""

import os
import shutil
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
def test_verl(version, megatron, ranks):
    run("run_verl.py", ranks, source(version), megatron=megatron)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("megatron", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("version", ["verl-0.9.1", "VERL"])
def test_verl_engine(version, megatron, ranks):
    run("run_verl_engine.py", ranks, source(version), megatron=megatron)


@pytest.mark.parametrize("version", ["verl-0.9.1", "VERL"])
def test_verl_workers(version):
    command = [sys.executable, str(FOLDER / "run_verl_workers.py"), str(source(version))]
    result = start(command, str(ROOT))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ok ") == 3
    assert result.stderr.count("megatron_lce replaces in verl") == 4  # a line of each worker with the plugin


MOVED = [  # where each plugin looks for a function, and what it replaces there
    ("verl", "verl-0.9.1", "models/mcore/model_forward", "gptmodel_forward_model_engine"),
    ("verl", "VERL", "models/mcore/model_forward", "gptmodel_forward_model_engine"),
    ("slime", "SLIME", "backends/megatron_utils/loss", "get_log_probs_and_entropy"),
    ("slime", "SLIME", "backends/megatron_utils/model", "train_one_step"),
    ("miles", "MILES", "backends/training_utils/loss_hub/logit_processors", "get_log_probs_and_entropy"),
    ("miles", "MILES", "backends/megatron_utils/model", "forward_only"),
    ("ms_swift", "ms_swift-4.6.0", "megatron/trainers/grpo_trainer", "MegatronGRPOTrainer.forward_step"),
]


@pytest.mark.parametrize(("plugin", "version", "file", "name"), MOVED)
def test_a_version_in_which_a_function_has_moved(plugin, version, file, name, tmp_path):
    framework = plugin.removeprefix("ms_")
    shutil.copytree(source(version) / framework, tmp_path / framework)
    command = [sys.executable, "-c", f"import megatron_lce.plugins.{plugin}"]
    result = start(command, str(tmp_path), str(ROOT))
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(f"megatron_lce replaces in {framework} ")
    path = (tmp_path / framework / file).with_suffix(".py")
    path.write_text(path.read_text().replace(name.partition(".")[0], "renamed"))
    result = start(command, str(tmp_path), str(ROOT))
    module = f"{framework}/{file}".replace("/", ".")
    assert f"RuntimeError: megatron_lce needs {name} in {module}: {framework} " in result.stderr, result.stderr


def start(command: list[str], *path: str) -> subprocess.CompletedProcess:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_timing_of_verl(tmp_path):
    options = {"tokens": 64, "sequence-length": 16, "hidden": 256, "heads": 4, "vocab": 2048, "masked": 0.6}
    options |= {"device": "cpu", "output": tmp_path / "time.json"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run("time_verl.py", 2, source("verl-0.9.1"), *arguments, megatron="0.19.2")


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


@pytest.mark.parametrize(
    ("ranks", "arguments"), [(1, ()), (2, ()), (2, ("--context",)), (2, ("--context", "--allgather"))]
)
def test_slime(ranks, arguments):
    run("run_slime.py", ranks, folder_of("SLIME"), *arguments)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", ["verl-0.9.1", "VERL"])
def test_verl_topk(version, ranks):
    run("run_verl_topk.py", ranks, source(version))


@pytest.mark.parametrize("ranks", [1, 2])
def test_miles(ranks):
    run("run_miles.py", ranks, folder_of("MILES"))


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
def test_megatron_bridge_training(ranks):
    run("run_bridge_training.py", ranks, folder_of("MEGATRON_BRIDGE", "src"))


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

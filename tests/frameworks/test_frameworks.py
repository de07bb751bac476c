"""Other projects' own code with a plugin or a diff of docs/recipes, beside the same code as it is.

`make test-frameworks` says where the unpacked wheels lie (FRAMEWORKS, MEGATRON) and passes on the paths of checkouts.
"""

import os
import re
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
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
YOURS = os.environ.get("PYTHONPATH", "")
INSTALLED = "0.16.1"  # of Megatron-core
VERL = "FRAMEWORKS/verl-0.9.1", "VERL"
SWIFT = RELEASED, MAIN = "FRAMEWORKS/ms_swift-4.6.0", "MS_SWIFT"
BRIDGE = "FRAMEWORKS/mcore_bridge-1.6.5"


def folder_of(name: str) -> Path:
    """A folder that an environment variable names, or one in it; the test is skipped where there is none."""
    variable, _, inside = name.partition("/")
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set: make test-frameworks {variable}=PATH")
    path = Path(os.environ[variable]).resolve() / inside
    assert path.is_dir(), f"{variable}: there is no {path}"
    return path


def start(command: list[str], *path: object) -> subprocess.CompletedProcess:
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, path))),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def run(program: str, ranks: int, *arguments: object, path: object = YOURS, megatron: str = INSTALLED) -> None:
    newer = () if megatron == INSTALLED else (folder_of(f"MEGATRON/{megatron}"),)
    result = start([*TORCHRUN, str(ranks), str(FOLDER / program), *map(str, arguments)], *newer, ROOT, path)
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
    assert "ok " in result.stdout + result.stderr


def adopted(recipe: str, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp(recipe)
    recipes.adopt(recipe, checkout, into)
    return into


PROGRAMS = [  # a folder each, and the diff that is applied to it
    ("run_areal.py", "AREAL", "areal"),
    ("run_areal_pull.py", "AREAL_1322", "areal_1322"),
    ("run_bridge.py", "MEGATRON_BRIDGE/src", None),
    ("run_bridge_training.py", "MEGATRON_BRIDGE/src", None),
    ("run_mcore_adapter.py", "ROLL", None),
    ("run_miles.py", "MILES", None),
    ("run_skyrl.py", "SKYRL", "skyrl"),
    ("run_slime.py", "SLIME", None),
    *((f"run_{name}.py", folder, None) for name in ("verl", "verl_engine", "verl_topk") for folder in VERL),
]
VERSIONS = {  # of Megatron-core, where that is not the installed one alone
    "run_skyrl.py": ("0.19.2",),
    "run_verl.py": ("0.14.0", INSTALLED, "0.19.2"),
    "run_verl_engine.py": (INSTALLED, "0.19.2"),
}
CALLS = [(*row, megatron) for row in PROGRAMS for megatron in VERSIONS.get(row[0], (INSTALLED,))]


def test_every_recipe_is_run_here():
    tests = Path(__file__).read_text()
    run_here = {*re.findall(r'adopted\("(\w+)"', tests), *re.findall(r'\("run_\w+\.py", [^()]*"(\w+)"\)', tests)}
    assert recipes.names() <= run_here


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("program", "folder", "recipe", "megatron"), CALLS)
def test_program(program, folder, recipe, megatron, ranks, tmp_path_factory):
    path = adopted(recipe, folder_of(folder), tmp_path_factory) if recipe else folder_of(folder)
    run(program, ranks, path, megatron=megatron)


@pytest.mark.parametrize("arguments", [("--context",), ("--context", "--allgather")])
def test_slime_context_parallel(arguments):
    run("run_slime.py", 2, folder_of("SLIME"), *arguments)


@pytest.mark.parametrize("version", VERL)
def test_verl_workers(version):
    result = start([sys.executable, str(FOLDER / "run_verl_workers.py"), str(folder_of(version))], ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ok ") == 3
    assert result.stderr.count("megatron_lce replaces in verl") == 4  # a line of each worker with the plugin


MOVED = [  # where each plugin looks for a function, and what it replaces there
    ("verl", VERL[0], "models/mcore/model_forward", "gptmodel_forward_model_engine"),
    ("verl", VERL[1], "models/mcore/model_forward", "gptmodel_forward_model_engine"),
    ("slime", "SLIME", "backends/megatron_utils/loss", "get_log_probs_and_entropy"),
    ("slime", "SLIME", "backends/megatron_utils/model", "train_one_step"),
    ("miles", "MILES", "backends/training_utils/loss_hub/logit_processors", "get_log_probs_and_entropy"),
    ("miles", "MILES", "backends/megatron_utils/model", "forward_only"),
    ("ms_swift", RELEASED, "megatron/trainers/grpo_trainer", "MegatronGRPOTrainer.forward_step"),
]


@pytest.mark.parametrize(("plugin", "version", "file", "name"), MOVED)
def test_a_version_in_which_a_function_has_moved(plugin, version, file, name, tmp_path):
    framework = plugin.removeprefix("ms_")
    shutil.copytree(folder_of(version) / framework, tmp_path / framework)
    command = [sys.executable, "-c", f"import megatron_lce.plugins.{plugin}"]
    result = start(command, tmp_path, ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(f"megatron_lce replaces in {framework} ")
    path = (tmp_path / framework / file).with_suffix(".py")
    path.write_text(path.read_text().replace(name.partition(".")[0], "renamed"))
    result = start(command, tmp_path, ROOT)
    module = f"{framework}/{file}".replace("/", ".")
    assert f"RuntimeError: megatron_lce needs {name} in {module}: {framework} " in result.stderr, result.stderr


def test_timing_of_verl(tmp_path):
    options = {"tokens": 64, "sequence-length": 16, "hidden": 256, "heads": 4, "vocab": 2048, "masked": 0.6}
    options |= {"device": "cpu", "output": tmp_path / "time.json"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run("time_verl.py", 2, folder_of(VERL[0]), *arguments, megatron="0.19.2")


# At TP=2 the gradients of the main branch of August 2026 are wrong: the release is the judge.
@pytest.mark.parametrize(
    ("own", "changed", "ranks"),
    [(RELEASED, RELEASED, 1), (RELEASED, RELEASED, 2), (MAIN, MAIN, 1), (RELEASED, MAIN, 2)],
)
def test_ms_swift(own, changed, ranks, tmp_path_factory):
    fused = adopted("ms_swift", folder_of(changed), tmp_path_factory)
    run("run_ms_swift.py", ranks, folder_of(own), fused, folder_of(BRIDGE))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", SWIFT)
def test_ms_swift_preference(version, ranks):
    run("run_ms_swift_preference.py", ranks, folder_of(version), folder_of(BRIDGE))


@pytest.mark.parametrize("ranks", [1, 2])
def test_nemo_rl(ranks, tmp_path_factory):
    own = folder_of("NEMO_RL")
    run("run_nemo_rl.py", ranks, adopted("nemo_rl", own, tmp_path_factory), own)


OF_MEGATRON = [("run_pretrain.py", "megatron_lm"), ("run_megatron_rl.py", "megatron_rl")]


@pytest.mark.parametrize(
    ("program", "recipe", "ranks", "arguments"),
    [*((*one, ranks, ()) for one in OF_MEGATRON for ranks in (1, 2)), (*OF_MEGATRON[1], 2, ("--context",))],
)
def test_megatron(program, recipe, ranks, arguments, tmp_path_factory):
    own = folder_of("MEGATRON_LM")
    run(program, ranks, own, adopted(recipe, own, tmp_path_factory), *arguments, path=own)


@pytest.mark.parametrize("what", ["one rank", "two ranks"])
def test_megatron_of_a_checkout(what):
    """This project's own integration tests, on a checkout of Megatron-LM: main, dev, or any other."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "tests/megatron_integration"]
    if what == "two ranks":
        program = "torchrun_tests/run_megatron.py"
        command = [*TORCHRUN[1:], "2", program, "--device", "cpu"]
    path = os.pathsep.join([str(folder_of("MEGATRON_LM")), str(ROOT)])
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-4000:]}"

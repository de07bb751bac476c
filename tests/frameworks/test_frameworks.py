"""Other projects' own code with what docs/integrations.md shows, beside the same code as it is.

`make test-frameworks` says where the unpacked wheels lie (FRAMEWORKS, MEGATRON) and passes on the paths of checkouts.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# Without what tests/conftest.py sets for this process: other projects' code runs as it does outside of tests.
ENVIRONMENT = {x: value for x, value in os.environ.items() if x not in ("TRITON_INTERPRET", "CUBLAS_WORKSPACE_CONFIG")}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
YOURS = os.environ.get("PYTHONPATH", "")
INSTALLED, NEWEST = "", "MEGATRON/0.19.2"  # Megatron-core: that of this Python, 0.16.1, and the newest release
VERL = "FRAMEWORKS/verl-0.9.0", "FRAMEWORKS/verl-0.9.1", "VERL"
SKYRL = "FRAMEWORKS/skyrl-0.4.0", "SKYRL"
RELEASED, MAIN = "FRAMEWORKS/ms_swift-4.6.0", "MS_SWIFT"
BRIDGE = "FRAMEWORKS/mcore_bridge-1.6.5"
MEGATRON_BRIDGE = "FRAMEWORKS/megatron_bridge-0.6.0", "FRAMEWORKS/megatron_bridge-0.6.2", "MEGATRON_BRIDGE/src"


def folder_of(name: str) -> Path:
    """A folder that an environment variable names, or one in it; the test is skipped where there is none."""
    variable, _, inside = name.partition("/")
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set: make test-frameworks {variable}=PATH")
    path = Path(os.environ[variable]).resolve() / inside
    assert path.is_dir(), f"{variable}: there is no {path}"
    return path


def start(command: list[str], *path: object) -> subprocess.CompletedProcess:
    path_of_python = os.pathsep.join(filter(None, map(str, path)))
    environment = {**ENVIRONMENT, "PYTHONPATH": path_of_python, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def run(ranks: int, program: str, *arguments: object, megatron: str = INSTALLED) -> None:
    path = [folder_of(megatron)] if megatron else []
    result = start([*TORCHRUN, str(ranks), str(FOLDER / program), *map(str, arguments)], *path, ROOT, YOURS)
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
    assert "ok " in result.stdout + result.stderr


PROGRAMS = [  # run_NAME.py, and its folders; behind a space: a file of it that gets the page's lines, in a copy
    ("areal", "AREAL"),
    *((name, folder) for name in ("bridge", "bridge_training") for folder in MEGATRON_BRIDGE),
    ("mcore_adapter", "ROLL"),
    ("megatron_rl", "MEGATRON_LM"),
    ("miles", "MILES"),
    ("ms_swift", RELEASED, RELEASED, BRIDGE),
    *(("ms_swift_preference", folder, BRIDGE) for folder in (RELEASED, MAIN)),
    ("nemo_rl", "NEMO_RL"),
    *(("pretrain_loop", "MEGATRON_LM", f"MEGATRON_LM pretrain_{model}.py") for model in ("gpt", "hybrid")),
    *(("skyrl", folder) for folder in SKYRL),
    ("slime", "SLIME"),
    *((name, folder) for name in ("verl", "verl_engine") for folder in VERL),
]
VERSIONS = {  # of Megatron-core, where that is not the installed one alone
    "bridge_training": (NEWEST,),
    "megatron_rl": ("MEGATRON_LM",),
    "pretrain_loop": ("MEGATRON_LM",),
    "skyrl": (NEWEST,),
    "verl": ("MEGATRON/0.14.0", INSTALLED, NEWEST),
    "verl_engine": (INSTALLED, NEWEST),
}
CALLS = [
    *((n, megatron, row) for row in PROGRAMS for megatron in VERSIONS.get(row[0], (INSTALLED,)) for n in (1, 2)),
    (2, "MEGATRON_LM", ("megatron_rl", "MEGATRON_LM", "--context")),
    (2, INSTALLED, ("slime", "SLIME", "--context")),
    (2, INSTALLED, ("slime", "SLIME", "--context", "--allgather")),
    # At TP=2 the gradients of the main branch of August 2026 are wrong: the release is the judge.
    (1, INSTALLED, ("ms_swift", MAIN, MAIN, BRIDGE)),
    (2, INSTALLED, ("ms_swift", RELEASED, MAIN, BRIDGE)),
]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
ADDED = {
    file: (name, line) for name, file, line in re.findall(r"^\| (.+) \| `(\S+\.py)` \| `(import \S+)` \|", PAGE, re.M)
}
ANCHOR, LINES = re.search(r"^     (timers.*)\n((?:\+.*\n)+)", PAGE, re.M).groups()  # of pretrain_*.py


def with_lines(file: Path, lines: str, after: str) -> None:
    """Adds lines behind the one that a pattern matches first."""
    text = file.read_text()
    place = re.search(f"{after}.*\n", text, re.MULTILINE)
    assert place, f"{file} has no {after}"
    file.write_text(text[: place.end()] + lines + text[place.end() :])


@pytest.mark.parametrize(("ranks", "megatron", "row"), CALLS, ids=str)
def test_program(ranks, megatron, row, tmp_path_factory):
    def prepared(argument):
        name, _, file = argument.partition(" ")
        if not file:
            return name if name.startswith("--") else folder_of(name)
        into = tmp_path_factory.mktemp("copy")
        shutil.copy(folder_of(name) / file, into)
        with_lines(into / file, LINES.replace("+", ""), re.escape(ANCHOR))
        return into

    run(ranks, "run.py", row[0], *map(prepared, row[1:]), megatron=megatron)


@pytest.mark.parametrize("version", VERL)
def test_verl_workers(version):
    result = start([sys.executable, str(FOLDER / "run_verl_workers.py"), str(folder_of(version))], ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ok ") == 3
    assert result.stderr.count("megatron_lce has replaced in verl") == 4  # a line of each worker with the plugin


WORKERS = [  # a folder, the file that gets the page's line, and megatron-core
    ("NEMO_RL", "nemo_rl/models/policy/workers/megatron_policy_worker.py", "MEGATRON_LM"),
    *((folder, "skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py", NEWEST) for folder in SKYRL),
    ("AREAL", "areal/engine/megatron_engine.py", NEWEST),
    ("MEGATRON_LM", "train_rl.py", "MEGATRON_LM"),
]


def test_every_line_of_the_page_is_tried():
    assert {file for _, file, _ in WORKERS} == ADDED.keys()


@pytest.mark.parametrize(("version", "file", "megatron"), WORKERS)
def test_workers_with_the_line(version, file, megatron, tmp_path):
    folder, root = folder_of(version), file.partition("/")[0]
    if (folder / root).is_dir():
        shutil.copytree(folder / root, tmp_path / root)
    else:
        shutil.copy(folder / file, tmp_path)
    with_lines(tmp_path / file, f"{ADDED[file][1]}\n", r"^(import|from) (?!__future__)")
    result = start([sys.executable, str(FOLDER / "run_workers.py"), str(tmp_path), file], folder_of(megatron), ROOT)
    assert result.returncode == 0, result.stderr[-6000:]
    assert result.stdout.startswith(f"ok      {file}: ")
    assert version == "MEGATRON_LM" or "logprob" in result.stdout  # rl_utils cannot be imported here


PACKAGES = {"bridge": "megatron/bridge", "megatron_rl": "megatron/rl", "ms_swift": "swift"}  # else named as the plugin
PLUGINS = [
    *(("bridge", folder) for folder in MEGATRON_BRIDGE),
    *(("ms_swift", folder) for folder in (RELEASED, MAIN)),
    *(("skyrl", folder) for folder in SKYRL),
    *(("verl", folder) for folder in VERL),
    ("megatron_rl", "MEGATRON_LM"),
    *((name, name.upper()) for name in ("areal", "miles", "nemo_rl", "slime")),
]


def test_every_plugin_is_tried():
    modules = {
        path.stem for path in (ROOT / "megatron_lce" / "plugins").glob("*.py") if "\nplugin, " in path.read_text()
    }
    assert {name for name, _ in PLUGINS} == modules


@pytest.mark.parametrize(("plugin", "version"), PLUGINS)
def test_a_function_that_has_moved_or_changed(plugin, version, tmp_path):
    package = PACKAGES.get(plugin, plugin)
    shutil.copytree(folder_of(version) / package, tmp_path / package)
    result = start([sys.executable, str(FOLDER / "run_changed.py"), plugin, str(tmp_path)], tmp_path, ROOT)
    assert result.returncode == 0, result.stderr
    assert "ok " in result.stdout


TOO_OLD = [  # plugin, folder of its framework's release, and what it lacks or has otherwise
    ("verl", "verl-0.8.0", "needs MegatronEngineWithLMHead._lm_head_logits_processor in .*: verl 0.8.0 has none there"),
    *(
        (
            "bridge",
            f"megatron_bridge-{version}",
            rf"needs .*_get_batch_fn.* in .*: megatron.bridge {version} has \(state",
        )
        for version in ("0.3.1", "0.4.2", "0.5.1")
    ),
    ("areal", "areal-1.0.4", "needs chunked_lm_head_logprobs_entropy in .*: areal 1.0.4 has none there"),
]


@pytest.mark.parametrize(("plugin", "release", "message"), TOO_OLD)
def test_a_release_that_is_too_old(plugin, release, message):
    result = start(
        [sys.executable, "-c", f"import megatron_lce.plugins.{plugin}"], folder_of(f"FRAMEWORKS/{release}"), ROOT
    )
    assert re.search(f"RuntimeError: megatron_lce {message}", result.stderr), result.stderr


def test_timing_of_verl(tmp_path):
    sizes = "--tokens 64 --sequence-length 16 --hidden 256 --heads 4 --vocab 2048 --layers 2 --rounds 1 --budget-ms 1"
    passes = "--passes update gradients logprobs"
    options = f"{sizes} {passes} --masked 0.6 --entropy-coeffs 0 0.001 --device cpu --output".split()
    needs = folder_of("FRAMEWORKS/of_verl")
    command = [*TORCHRUN, "2", str(FOLDER / "time_verl.py"), str(folder_of("VERL")), *options, str(tmp_path / "x.json")]
    result = start(command, folder_of(NEWEST), ROOT, needs)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
    records = json.loads((tmp_path / "x.json").read_text())["verl"]
    assert {(x["pass"], x["variant"]) for x in records if x["status"] == "ok"} >= {
        (what, "plugin") for what in ("update", "gradients", "logprobs")
    }


def test_timing_of_chunked_logprobs(tmp_path):
    options = "--shape 256x64x512 --error-shape 256x64x512 --chunk 32 --rounds 1 --budget-ms 1 --device cpu --output"
    path = tmp_path / "chunked.json"
    command = [*TORCHRUN, "2", str(FOLDER / "time_chunked.py"), *map(str, map(folder_of, ("SKYRL", "SLIME")))]
    result = start([*command, *options.split(), str(path)], folder_of(NEWEST), ROOT)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
    document = json.loads(path.read_text())
    assert {x["status"] for x in document["chunked"] + document["chunked_errors"]} == {"ok"}


ONE_RANK = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/megatron_integration"]
TWO_RANKS = [*TORCHRUN, "2", "torchrun_tests/run_megatron.py", "--device", "cpu"]


@pytest.mark.parametrize("command", [ONE_RANK, TWO_RANKS], ids=["one rank", "two ranks"])
def test_megatron_of_a_checkout(command):
    """This project's own integration tests, on a checkout of Megatron-LM: main, dev, or any other."""
    path = os.pathsep.join([str(folder_of("MEGATRON_LM")), str(ROOT)])
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-4000:]}"

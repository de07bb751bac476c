"""What every test runs under: deterministic torch, uninitialised memory full of NaN, and a device."""

import collections
import gc
import os
import subprocess
import sys

import hypothesis
import pytest
import torch

from tests import interpreter, plugin_stand_ins

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    interpreter.hasten()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

# The same examples in every run, and no limit on the time of one: machines that run tests are busy.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    # The interpreter computes in numpy, which warns of the NaN and infinities that some tests are about.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in reduce:RuntimeWarning")


def pytest_collection_modifyitems(items):
    # What starts ranks takes longest: first, so that processes which share the tests end with short ones, together.
    items.sort(key=lambda item: item.get_closest_marker("torchrun") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")


def pytest_collection_finish():
    # What is imported stays: every collection of garbage would look through it.
    gc.collect()
    gc.freeze()


make = plugin_stand_ins.make  # a fixture


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Every backend that shares the autograd function; Triton natively on a GPU, interpreted on a CPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture(scope="session")
def package_index(tmp_path_factory):
    """What pip needs to build an archive in an environment."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0", "--timeout", "20"]
    where = ["--dest", str(tmp_path_factory.mktemp("index")), "setuptools>=77"]
    if subprocess.run(command + where, capture_output=True, check=False).returncode:
        pytest.skip("needs a package index")


@pytest.fixture
def usual_torch():
    """Without deterministic mode, whose fills of uninitialised memory and checks are no part of what is measured."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)

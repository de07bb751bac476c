"""The program for compute-sanitizer launches every kernel; a tool's output is read as it is meant."""

import re
from pathlib import Path

import pytest

import megatron_lce

pytest.importorskip("triton")

from tests import sanitizer

PACKAGE = Path(megatron_lce.__file__).parent


@pytest.mark.slow
def test_every_kernel_is_launched(device, monkeypatch):
    from triton.runtime import interpreter, jit

    launched = set()
    launchers = {"cpu": (interpreter.GridExecutor, "__call__"), "cuda": (jit.JITFunction, "run")}
    owner, method = launchers[device.type]
    launch = getattr(owner, method)

    def record(kernel, *arguments, **keywords):
        launched.add(kernel.fn.__name__)
        return launch(kernel, *arguments, **keywords)

    monkeypatch.setattr(owner, method, record)
    for _, call in sanitizer.calls():
        assert all(tensor.device.type == device.type for tensor in call(device))
    sources = "".join(path.read_text() for path in PACKAGE.glob("backends/triton/*.py"))
    assert set(re.findall(r"^def (\w+_kernel)\(", sources, re.M)) == launched


@pytest.mark.parametrize(
    ("program", "printed", "passed", "errors"),
    [
        ("calls", "calls ran\n========= ERROR SUMMARY: 0 errors", True, 0),
        ("calls", "calls ran\n========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors", False, 2),
        ("calls", "========= ERROR SUMMARY: 0 errors", False, 0),
        ("calls", "calls ran", False, -1),
        ("race", "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", True, 1),
        ("race", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", False, 0),
        ("race", "device not supported", False, -1),
    ],
)
def test_an_error_in_a_call_and_a_missed_fault_fail(program, printed, passed, errors, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
    tool.chmod(0o755)
    result = sanitizer.check("racecheck", program, [], str(tool), timeout=60)
    assert (result.passed, result.errors) == (passed, errors), result

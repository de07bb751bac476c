"""What a stranger types: `--help`, devices, arguments that are wrong, and `make`."""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("megatron.core")

from benchmark import run
from megatron_lce import __main__ as commands
from scripts import megatron_runtime, tiny_gpt, train_grpo
from scripts.ranks import device_of_rank

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = [
    *("scripts.demo", "scripts.train_sft", "scripts.train_grpo", "scripts.train_distill"),
    *("benchmark.publish", "scripts.draw_how_it_works"),
]


def parsers():
    for name in PROGRAMS:
        yield name, importlib.import_module(name).build_parser()
    for module in commands, run:
        (subparsers,) = (x for x in module.build_parser()._actions if isinstance(x, argparse._SubParsersAction))
        yield from subparsers.choices.items()


def test_help_is_sentences_and_tells_defaults():
    sentence = r"[A-Z].*\.( \(default: .*\)\.?)?|.*\(default: .*\)\."
    for program, parser in parsers():
        printed = parser.format_help()
        assert "None" not in printed, program
        for action in parser._actions:
            if action.dest == "help":
                continue
            assert re.fullmatch(sentence, action.help or ""), (program, action)
            if action.default not in (None, False, "", argparse.SUPPRESS, [], ()) and action.option_strings:
                assert "default" in printed[printed.index(action.option_strings[0]) :], (program, action)


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "kind"),
    [(2, 2, None, "cuda"), (1, 2, None, "cpu"), (2, 2, "cpu", "cpu"), (0, 1, None, "cpu")],
)
def test_a_program_takes_gpus_where_every_rank_has_one(gpus, ranks, asked, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))
    assert device_of_rank(asked) == torch.device(kind, ranks - 1 if kind == "cuda" else None)


def test_two_ranks_do_not_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device must be 'cpu' where 2 ranks have 1 GPUs, got 'cuda'"):
        device_of_rank("cuda")
    with pytest.raises(ValueError, match="device must be 'cuda', 'cpu' or None, got 'tpu'"):
        device_of_rank("tpu")


def test_a_program_of_two_ranks_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"must be a multiple of 2, .* got 1: .* with torchrun --nproc-per-node 2"):
        megatron_runtime.initialize(tensor_parallel=2)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (run, "head --providers peer", "must be one of"),
        (run, "head --shapes S9", "a shape must be one of S1, S2, S3 or .* got 'S9'"),
        (run, "head --modes forward", "must be one of"),
        (run, "head --rounds 0", "rounds: must be at least 1, got 0"),
        (run, "jsd --providers peer", "a provider must be one of ours, "),
        (run, "jsd --shape 3x4x5", "a shape must be tokens x student's H x teacher's H x vocab"),
        (run, "jsd --betas 2", "betas: must be comma-separated numbers from 0 to 1, got '2'"),
        (run, "jsd --betas x", "betas: must be comma-separated numbers from 0 to 1, got 'x'"),
        (run, "megatron_step --transformer-impl te", "must be local or transformer_engine, got 'te'"),
        (run, "megatron_step --tokens 8191", "tokens: must be multiples of sequence-length 4096, got 8191"),
        (train_grpo, "--samples 1", "--samples must be at least 2, .* got 1"),
        (train_grpo, "--updates 3 --num-microbatches 2 --prompts 1 --samples 4", "must be from 1 to 4, .* got 6"),
        (train_grpo, "--updates 0", "--updates times --num-microbatches must be from 1 to 256, .* got 0"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(program, arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        program.parse_arguments(arguments.split())
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def make():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    settings = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": True, "timeout": 60}
    return lambda *arguments: subprocess.run(["make", *arguments], **settings).stdout


def test_other_constraints_install_anew(make, tmp_path):
    def installs(*arguments):
        return make("--dry-run", f"VENV={tmp_path}", f"PYTHON={sys.executable}", *arguments, "demo")

    assert "--constraint constraints.txt" in installs()
    later = time.time() + 1000
    (tmp_path / ".installed").touch()
    os.utime(tmp_path / ".installed", (later, later))
    assert "pip install" not in installs()
    anew = installs("CONSTRAINTS=")
    assert f"-m venv --clear {tmp_path}" in anew
    assert "--constraint" not in anew


def test_make_alone_prints_help(make):
    printed = make()
    assert printed.startswith("make demo ")
    targets = re.findall(r"^make ([\w-]+) ", printed, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(targets) == sorted(phony.split())


def test_the_flag_and_the_capture_on_a_tiny_gpt(capsys):
    tiny_gpt.main()
    printed = capsys.readouterr().out
    assert "FusedLinearCE(enabled, " in printed
    assert "CapturedHead(" in printed
    without, fused, difference = re.search(
        r"loss: (\S+) without the flag, (\S+) with it\ngradients: (\S+)", printed
    ).groups()
    assert abs(float(without) - float(fused)) < 1e-4
    assert float(difference) < 1e-4


def test_help_writes_no_file_no_warning_and_a_missing_extra_is_named(tmp_path, monkeypatch):
    programs = [["benchmark.run", "head"], ["benchmark.publish"], ["scripts.draw_how_it_works"]]
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}
    code = f"""
import contextlib, runpy, sys
import scripts, torch.utils.cpp_extension  # which warns of a CUDA_HOME without a GPU
for name, *arguments in {programs}:
    sys.argv = [name, *arguments, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__")
        raise AssertionError(f"{{name}} goes on behind its help")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    helped = subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120, capture_output=True)
    assert b"CUDA" not in helped.stderr
    assert helped.stdout.count(b"usage:") == len(programs)
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()} == before
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.delitem(sys.modules, "benchmark.megatron_step", raising=False)
    with pytest.raises(SystemExit, match=r"megatron.* is not installed: pip install '\.\[megatron\]'"):
        run.main(["megatron_step", "--device", "cpu"])

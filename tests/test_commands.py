"""`megatron-lce doctor` and `megatron-lce estimate`: what they print, and their exit status."""

import json
import os
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import megatron_lce
from megatron_lce import __main__ as commands
from megatron_lce.command import doctor, estimate
from megatron_lce.core.options import WORKSPACE_BYTES
from megatron_lce.core.statistics import CHUNK_COLUMNS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def quick_self_test(monkeypatch):
    monkeypatch.setattr(doctor, "self_test", lambda device: {"failures": [], "errors": {"a": (1e-3, 2e-3)}})


def run_program(program, **environment):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, **environment}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_and_wrong_arguments_answer_without_torch():
    printed = run_program("""
        import contextlib, sys
        sys.modules["torch"] = None  # as if not installed
        from megatron_lce.__main__ import main
        assert main([]) == 0  # prints the help
        sys.stderr = sys.stdout
        for arguments in ("--version", "--help", "estimate --help", "estimate --model Llama-3-70B", "estimate --tp 2"):
            with contextlib.suppress(SystemExit):
                main(arguments.split())
                raise AssertionError(arguments)
    """)
    assert printed.startswith("usage: megatron-lce ")
    for text in (megatron_lce.__version__, "did you mean Llama-3.1-70B?", "--hidden and --vocab must be given"):
        assert text in printed


def test_the_interface_is_documented_and_has_the_commands_default():
    text = pydoc.render_doc(megatron_lce, renderer=pydoc.plaintext)
    assert all(f"\n    {name}(" in text for name in ("linear_cross_entropy", "linear_topk", "shift_labels"))
    assert estimate.WORKSPACE_BYTES == WORKSPACE_BYTES
    assert estimate.CHUNK_COLUMNS == CHUNK_COLUMNS


def test_a_healthy_machine(capsys, usual_torch):
    assert commands.main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for text in (
        f"megatron-lce        {megatron_lce.__version__}",
        "transformer-engine  not installed",
        "backend='auto' runs torch",
        "self-test against fp64: passed, 15 results",
        "no problems found; CPU only: Triton kernels not tested",
    ):
        assert text in printed
    assert all(0 < error <= limit for error, limit in doctor.self_test(torch.device("cpu"))["errors"].values())


def test_a_backend_that_is_wrong_or_raises_is_a_problem(monkeypatch, capsys, usual_torch):
    right = doctor.linear_cross_entropy

    def wrong(hidden, *arguments, **keywords):
        return right(1.05 * hidden, *arguments, **keywords)

    def broken(*arguments, **keywords):
        raise RuntimeError("an illegal memory access")

    for function, problem in (
        (wrong, "float32: logprobs is off by"),
        (broken, "bfloat16: RuntimeError: an illegal memory access"),
    ):
        monkeypatch.setattr(doctor, "linear_cross_entropy", function)
        assert commands.main(["doctor", "--device", "cpu"]) == 1
        printed = capsys.readouterr().out
        assert "self-test against fp64: FAILED" in printed
        assert f"PROBLEM: self-test: {problem}" in printed


def test_a_gpu_without_triton_is_a_problem(monkeypatch, capsys, quick_self_test):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_describe_device", lambda kind: "a GPU")
    monkeypatch.setattr(doctor, "triton_obstacle", lambda backend, device: "triton is not installed")
    assert commands.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "backend='auto' runs torch" in printed
    assert "PROBLEM: the GPU runs the slower torch backend: triton is not installed" in printed


@pytest.mark.parametrize("what", ["ImportError('not installed')", "OSError('libcudart.so.12: cannot open')"])
def test_without_torch_a_sentence_says_so(what, tmp_path):
    (tmp_path / "torch.py").write_text(f"raise {what}")
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    program = """
        from megatron_lce.__main__ import main
        assert main(["doctor"]) == 1
        assert main(["estimate", "--model", "Qwen3-8B"]) == 0
    """
    printed = run_program(program, PYTHONPATH=path)
    problem = f"torch cannot be imported: {what.replace('(', ': ').translate({39: None, 41: None})}"
    assert printed.startswith(f"PROBLEM: {problem}\n")
    assert "The head's peak falls from " in printed
    program = 'from megatron_lce.__main__ import main; assert main(["doctor", "--json"]) == 1'
    printed = run_program(program, PYTHONPATH=path)
    assert json.loads(printed) == {"problems": [problem]}


def test_what_is_imported_is_judged(tmp_path):
    """A checkout in front of an installed package, a distribution of another name, and what cannot be imported."""
    for folder, module, text in (
        ("old", "megatron/core", "__version__ = '0.12.3'"),
        ("broken", "megatron/core", "import an_extension"),
    ):
        (tmp_path / folder / module).mkdir(parents=True)
        (tmp_path / folder / module / "__init__.py").write_text(text)
    program = "from megatron_lce.command import doctor; print(doctor.too_old(doctor.versions()))"
    printed = run_program(program, PYTHONPATH=os.pathsep.join(map(str, (tmp_path / "old", ROOT))))
    assert "megatron-core must be at least 0.14, got 0.12.3" in printed
    printed = run_program(program, PYTHONPATH=os.pathsep.join(map(str, (tmp_path / "broken", ROOT))))
    assert "megatron-core cannot be imported: ModuleNotFoundError: No module named 'an_extension'" in printed


def test_tritons_interpreter_without_numpy_is_one_problem():
    pytest.importorskip("triton")
    program = """
        import sys
        sys.modules["numpy"] = None  # as if not installed
        from megatron_lce.__main__ import main
        assert main(["doctor", "--device", "cpu"]) == 1
    """
    printed = run_program(program, TRITON_INTERPRET="1")
    assert "  triton     its interpreter needs numpy, which is not installed\n" in printed
    assert "PROBLEM: triton cannot be imported: ModuleNotFoundError: " in printed
    assert "self-test against fp64: passed" in printed


def estimated(capsys, arguments):
    """The estimate in JSON."""
    assert commands.main(["estimate", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_estimate_of_a_public_model(capsys):
    sizes = "--tokens 16k --tp 2 --sequence-parallel"
    by_name = estimated(capsys, f"--model QWEN/qwen3-8b {sizes}")
    by_size = estimated(capsys, f"--hidden 4K --vocab 151,936 {sizes.replace('16k', '16384')}")
    assert by_size["heads"] == by_name["heads"]
    assert by_name["step"] == (
        "Qwen/Qwen3-8B: one rank of TP=2 with sequence parallel, 16384 tokens x 4096 x 75968, bf16"
    )
    assert re.search(r"falls from 4,7\d\d MiB \(.*TransformerEngine's cross-entropy\) to \d,\d+ \(", by_name["verdict"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hidden 64", "--model, --config, or both --hidden and --vocab must be given"),
        ("--model Llama-3-70B", "unknown model 'Llama-3-70B'; did you mean Llama-3.1-70B[?]"),
        ("--model made-up", "--model: unknown model 'made-up'; use --hidden and --vocab"),
        ("--model qwen3-8b --hidden 64", "--hidden must not be given beside --model or --config, got 64"),
        ("--hidden 100 --vocab 64", "--hidden must be a multiple of 8 for an estimate, got 100"),
        ("--hidden 64 --vocab 0", "--vocab: must be a whole number such as 8192, 8,192 or 8k, at least 1, got 0"),
        ("--hidden 64 --vocab 64 --tokens 8q", "--tokens: must be a whole number such as .*, at least 1, got 8q"),
        (
            "--hidden 64 --max-tokens 8",
            "megatron-lce estimate: error: unknown option --max-tokens; did you mean --tokens[?]",
        ),
        ("--frobnicate=1", "unknown option --frobnicate; megatron-lce estimate --help lists the options"),
        (
            "--hidden 64 --vocab 64 --tokens 10 --tp 8 --sequence-parallel",
            "--tokens must be a multiple of --tp 8 with --sequence-parallel, got 10",
        ),
        ("--hidden 64 --vocab 64 --ignored 60", "--ignored: must be a share, at least 0 and below 1, got 60"),
        ("--hidden 64 --vocab 64 --tp 3", "--vocab must be a multiple of --tp 3, got 64; Megatron pads it to 384$"),
        (
            "--hidden 4096 --vocab 64000 --workspace-mib 1",
            "--workspace-mib 1: workspace_bytes must be at least 4194816",
        ),
    ],
)
def test_what_cannot_be_estimated_says_what_can(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main(["estimate", *arguments.split()])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed)
    assert printed.count("\n") == 1


def test_a_reader_that_stops_early_is_no_error():
    """As `megatron-lce estimate ... | head -1`."""
    command = [sys.executable, "-m", "megatron_lce", "estimate", "--model", "Qwen3-8B"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_config_of_the_hub(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"text_config": {"hidden_size": 4096, "vocab_size": 151936}, "tie_word_embeddings": True})
    )
    found = estimated(capsys, f"--config {path}")
    assert found["step"].endswith(" (tied head): 8192 tokens x 4096 x 151936, bf16")
    assert found["heads"] == estimated(capsys, "--model Qwen3-8B")["heads"]
    path.write_text("{}")
    broken = tmp_path / "broken.json"
    broken.write_text('{"tokens": 1,')
    for arguments, message in (
        ([str(path)], f"{path} must hold hidden_size and vocab_size, got None and None"),
        ([str(broken)], f"{broken} must be JSON, got Expecting property name"),
        ([str(tmp_path)], "Is a directory"),
        ([str(tmp_path / "config.json"), "--model", "Qwen3-8B"], "must hold"),
    ):
        with pytest.raises(SystemExit):
            commands.main(["estimate", "--config", *arguments])
        assert message in capsys.readouterr().err

"""README and docs: Python blocks run, commands are accepted, tables are the committed results, links lead somewhere.

Each block runs by itself: it has its imports, and the names that a training program has.
"""

import contextlib
import importlib
import importlib.util
import inspect
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel

import megatron_lce
from benchmark import publish
from benchmark.results import extra_gib, measured
from megatron_lce import __main__ as commands
from scripts import megatron_runtime
from tests import megatron_world

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*publish.pages(), *(ROOT / page for page in ("CHANGELOG.md", "CONTRIBUTING.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOKENS = 24
ONLY_NEWER = {  # what a block speaks of, and whether this Megatron has it: from 0.18
    "output_processor": "output_processor" in inspect.signature(GPTModel.forward).parameters,
    "safetensors": importlib.util.find_spec("safetensors") is not None,
}
TORCHRUN_PROGRAMS = ("run_parity.py", "run_megatron.py", "run_megatron_fsdp.py", "run_failures.py", "run_fuzz.py")


def blocks(page, language):
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


@pytest.fixture(scope="module")
def device():
    with megatron_world.world() as device:
        yield device


@pytest.fixture
def names(device, tmp_path):
    """What the pages' blocks take for granted."""

    def build(**settings):  # the pages speak of a vocabulary of 100, which is padded
        return megatron_runtime.build_gpt(megatron_world.options(**settings), device=device)

    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 100, (2, 1, TOKENS), generator=generator).to(device)
    positions = torch.arange(TOKENS, device=device)[None]
    model = build()
    with torch.no_grad(), megatron_lce.capture_lm_head(model) as captured:
        model(tokens, positions, None)
    batch = {"tokens": tokens, "position_ids": positions, "labels": labels}
    per_token = torch.zeros(1, TOKENS, device=device)
    checkpoint = tmp_path / "model.safetensors"
    if ONLY_NEWER["safetensors"]:
        importlib.import_module("safetensors.torch").save_file({"lm_head.weight": captured.weight.cpu()}, checkpoint)
    cu_seqlens = torch.tensor([0, 8, 20, TOKENS], dtype=torch.int32, device=device)

    return {
        "model": model,
        "student": model,
        "teacher": build(seed=2),
        "input_ids": tokens,
        "hf_config": SimpleNamespace(vocab_size=100),
        "position_ids": positions,
        "attention_mask": None,
        "labels": labels,
        "response_mask": torch.arange(TOKENS, device=device)[None] % 3 > 0,
        "loss_mask": per_token + 1,
        "old_logprobs": per_token - 4,
        "advantages": per_token + 1,
        "batch": batch,
        "data_iterator": iter([batch]),
        "hidden": captured.hidden.transpose(0, 1),  # [b, s, H], as without Megatron
        "weight": captured.weight,
        "mtp_model": build(mtp_layers=2),
        "checkpoint": checkpoint,
        "student_vocab_size": len(captured.weight),
        "teacher_hidden": captured.hidden.transpose(0, 1).contiguous(),
        "tp_group": captured.tp_group,
        "draft_hidden": torch.randn(1, TOKENS, 8, generator=generator).to(device).requires_grad_(),
        "draft_weight": torch.randn(40, 8, generator=generator).to(device).requires_grad_(),
        "draft_ids": torch.randperm(100, generator=generator)[:40].to(device),
        "packed_seq_params": SimpleNamespace(cu_seqlens_q=cu_seqlens),
    }


@pytest.mark.filterwarnings("ignore:fused linear cross-entropy is enabled but was not used")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(page, names, usual_torch):
    for number, block in enumerate(blocks(page, "python")):
        if any(name in block and not there for name, there in ONLY_NEWER.items()):
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, f"{page.name}, block {number}", "exec"), dict(names))


def test_a_pruned_vocabulary_is_the_softmax_over_its_ids(names, usual_torch):
    (block,) = (text for text in blocks(ROOT / "docs" / "distillation.md", "python") if "draft_ids" in text)
    exec(block, names)
    target = (names["teacher_hidden"] @ names["weight"].T)[..., names["draft_ids"]].log_softmax(-1)
    draft = (names["draft_hidden"] @ names["draft_weight"].T).log_softmax(-1)
    kept = names["kept"]
    expected = (target.exp() * (target - draft)).sum(-1)[kept]
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(names["out"].forward_kl[kept], expected, rtol=1e-5, atol=1e-5)
    assert names["out"].forward_kl[~kept].eq(0).all()
    gradient = torch.autograd.grad(expected.sum() / kept.sum(), names["draft_weight"])[0]
    torch.testing.assert_close(names["draft_weight"].grad, gradient, rtol=1e-4, atol=1e-5)


DECLARATIONS = """
from types import SimpleNamespace
from typing import Any
import torch
from torch import Tensor
hidden: Tensor; weight: Tensor; labels: Tensor; input_ids: Tensor; position_ids: Tensor; response_mask: Tensor
loss_mask: Tensor; old_logprobs: Tensor; advantages: Tensor
model: torch.nn.Module; student: torch.nn.Module; teacher: torch.nn.Module; mtp_model: torch.nn.Module
checkpoint: str; student_vocab_size: int; teacher_hidden: Tensor
tp_group: torch.distributed.ProcessGroup
draft_hidden: Tensor; draft_weight: Tensor; draft_ids: Tensor
batch: dict[str, Tensor]; data_iterator: Any; attention_mask: None; hf_config: Any; packed_seq_params: Any
"""


def test_python_blocks_have_the_types_that_the_package_states(tmp_path):
    pytest.importorskip("mypy")
    for page in PAGES:
        for number, block in enumerate(blocks(page, "python")):
            (tmp_path / f"{page.stem.lower()}_{number}.py").write_text(DECLARATIONS + block)
    command = [sys.executable, "-m", "mypy", *sorted(map(str, tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def all_commands():
    for page in PAGES:
        for line in "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
            if command := shlex.split(line, comments=True):
                yield pytest.param(command, id=f"{page.stem}: {' '.join(command)[:60]}")


@pytest.mark.parametrize("command", list(all_commands()))
def test_commands_are_accepted(command, capsys):
    """Parsed by the program itself; an estimate, which takes no time, is made."""
    if command[:2] == ["torchrun", "--nproc-per-node"]:
        command = ["python", *command[3:]]
    match command:
        case ["make", *arguments]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert all(argument in targets for argument in arguments if "=" not in argument)
        case ["source", ".venv/bin/activate"] | ["echo", "import megatron_lce.plugins.ms_swift", ">", "lce.py"]:
            pass
        case ["pip", "install", what]:
            extras = re.search(r"\[(.*)\]", what)
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert not extras or set(extras[1].split(",")) <= set(known)
        case ["megatron-lce", "estimate", *arguments]:
            assert commands.main(["estimate", *arguments]) == 0
            assert "Megatron, fused cross-entropy" in capsys.readouterr().out
        case ["megatron-lce", *arguments]:
            commands.build_parser().parse_args(arguments)
        case ["python", "-m", "pytest", "-p", plugin, *paths]:
            assert all((ROOT / path).exists() for path in (plugin.replace(".", "/") + ".py", *paths))
        case ["python", "-m", "pytest", *paths]:
            assert all((ROOT / path).exists() for path in paths)
        case ["python", "-m", "verl.trainer.main_ppo", "model_engine=megatron", option]:
            assert option == "actor_rollout_ref.model.external_lib=megatron_lce.plugins.verl"
            assert 'PLUGIN = "megatron_lce.plugins.verl"' in (ROOT / "tests/frameworks/run_verl_workers.py").read_text()
        case ["python", "-m", module, *arguments]:
            importlib.import_module(module).build_parser().parse_args(arguments)
        case ["python", "train.py", "--custom-megatron-init-path" as option, path]:
            program = (ROOT / f"tests/frameworks/run_{path.split('.')[2]}.py").read_text()
            assert f'path = "{path}"  # {option}' in program  # what `make test-frameworks` runs
        case ["megatron", "rlhf", *_, "--external_plugins", "lce.py"]:
            pass
        case ["python", path, *_] if path.startswith("tests/frameworks/"):
            assert (ROOT / path).exists()
        case ["python", path, *arguments]:
            assert Path(path).name in TORCHRUN_PROGRAMS
            known = {"--device", "--combinations", "--transformer-impl", "--cases", "--seconds", "--tp"}
            assert set(arguments[::2]) <= known
        case _:
            raise AssertionError(f"no test knows this command: {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_and_links(page):
    text = page.read_text()
    assert publish.fill(text) == text, "python -m benchmark.publish"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        linked = page if not path else page.parent / path
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings], target


def test_sentences_beside_the_tables_hold():
    """The claims of README, performance.md and numerics.md that are no table's cell."""
    records = [x for name in publish.ALL_STEPS for x in publish.result(name)["steps"]]
    steps = {(x["tp"], x["tokens"], x["masked"], x["variant"]): x for x in records}
    memory = []
    for (tp, tokens, masked, variant), ours in steps.items():
        if variant != "ours":
            continue
        te, fastest = (steps[tp, tokens, masked, name] for name in ("te", "te-overwrite"))
        assert ours["time_ms"] <= 1.01 * min(te["time_ms"], fastest["time_ms"])
        memory += [ours["peak_mib"] / te["peak_mib"]] * (tokens >= 8192)
        assert tokens > 4096 or round(ours["peak_mib"] / te["peak_mib"], 1) == 1.0
        assert {x["tokens"] for x in records} == {4096, 8192, 16384, 65536}
    assert (round(min(memory), 2), round(max(memory), 2)) == (0.55, 0.94)
    times = {(x["shape"], x["mode"], x["provider"]): x for x in measured(publish.result("heads"), "times")}
    of_s1 = ("ours", "ours-token-640", "ours-0")
    at_s1 = {name: [times["S1", mode, name]["over_products"] for mode in ("rl", "sft")] for name in of_s1}
    assert [round(ratio, 3) for ratio in at_s1["ours"]] == [1.025, 1.045]
    assert [round(ratio, 2) for ratio in at_s1["ours-token-640"]] == [1.1, 1.05]
    assert {round(ratio, 2) for ratio in at_s1["ours-0"]} == {1.37}
    # The gains in 36 layers over the fused cross-entropy, where a layer's time is what a step of four takes beside its
    # head, and over verl's logits, where it is the difference of four layers and one.
    heads = {(x["masked"], x["entropy_coeff"], x["provider"]): x for x in publish.result("policy")["policy"]}
    layer = (steps[2, 16384, 0.0, "ours"]["time_ms"] - heads[0.0, 0.0, "ours-skip"]["time_ms"]) / 4
    assert round(layer) == 23
    for masked, name, gain in ((0.0, "ours", 1), (0.6, "ours-skip", 4)):
        fused, ours = steps[2, 16384, masked, "native-fused"]["time_ms"], steps[2, 16384, masked, name]["time_ms"]
        assert round(100 * (fused - ours) / (fused + 32 * layer)) == gain
    # The share of masked tokens from which on skipping them gains time: what it costs over what all of them would give.
    even = []
    for tp in (1, 2, 4):
        cost, gain = (
            sign * (steps[tp, 16384, masked, "ours-skip"]["time_ms"] - steps[tp, 16384, masked, "ours"]["time_ms"])
            for sign, masked in ((1, 0.0), (-1, 0.6))
        )
        even.append(round(100 * cost / ((gain + cost) / 0.6)))
    assert even == [0, 3, 7]  # README: about 5 %
    verl = {
        (x["layers"], x["masked"], x["variant"]): x for x in publish.result("verl")["verl"] if x["pass"] == "update"
    }
    layer = (verl[4, 0.0, "engine"]["time_ms"] - verl[1, 0.0, "engine"]["time_ms"]) / 3
    assert round(layer) == 55
    for masked, gain in ((0.0, 1), (0.6, 3)):
        engine, plugin = (verl[4, masked, name]["time_ms"] for name in ("engine", "plugin"))
        assert round(100 * (engine - plugin) / (engine + 32 * layer)) == gain
    runs = {x["run"]: x for x in publish.result("training")["training"]}
    baseline, others = runs["native"], [runs["flag"], runs["native-again"]]
    median, most, held_out = [], [], []
    for run in others:
        apart = sorted(abs(a - b) for a, b in zip(run["losses"], baseline["losses"], strict=True))
        median.append(round(apart[len(apart) // 2], 4))
        most.append(round(apart[-1], 3))
        held_out.append(round(abs(run["held_out_loss"] - baseline["held_out_loss"]), 4))
    assert median == [0.0001, 0.0002]
    assert most == [0.005, 0.016]
    assert held_out == [0.0002, 0.0004]
    of_layers = publish.result("transformer_engine_h200")["comparisons"]
    assert not any(x["failed"] for x in of_layers)
    for name, worst in (("over_megatrons", 1.2), ("known_over_megatrons", 1.4)):
        assert round(max(x.get(name, 0) for x in of_layers), 1) == worst
    of_jsd = publish.result("jsd")["jsd"]
    for beta in (0.5, 0.0, 1.0):
        ours, theirs = (
            next(x for x in of_jsd if (x["provider"], x["beta"]) == (name, beta))
            for name in ("ours-loss-1024", "compile")
        )
        assert ours["time_ms"] <= 1.1 * theirs["time_ms"]
        assert extra_gib(ours) <= 0.51 * extra_gib(theirs)


def test_the_citation_has_the_version():
    assert f"\nversion: {megatron_lce.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_an_index_shows_the_readme_without_pictures_and_paths():
    text = re.sub(r"^!\[[^]]*\]\(.*\)\n", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert "](benchmark" not in text  # every picture stands in a line of its own, where setup.py takes it out

"""What the demonstration makes of the reports: its verdict, its report and its pictures."""

import json
import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("megatron.core")

from scripts import demo


def sft_report(losses: list[float], enabled: bool) -> dict:
    return {
        "losses": losses,
        "fused": {"enabled": enabled, "reasons": []},
        "share_of_rows_computed": 0.25 if enabled else 1.0,
        "time_per_step_ms": 10.0,
        "time_per_step_is": "median",
        "memory_is": "resident set",
        "ranks": [{"peak_mib": 700.0, "peak_before_training_mib": 500.0}] * 2,
    }


def grpo_report(rewards: list[float], enabled: bool, ratio: float = 1.0) -> dict:
    names = ("all_right", "entropy", "kl", "trainer_sampler_largest_difference", "share_of_rows_computed")
    steps = [{"reward": reward, "first_ratio": ratio, **dict.fromkeys(names, 0.5)} for reward in rewards]
    return {**sft_report([], enabled), "config": {"digits": 5}, "steps": steps}


def run_demo(monkeypatch, tmp_path, *, on, rewards, enabled=True, ratio=1.0) -> tuple[int, dict]:
    reports = {
        "sft_off.json": sft_report([5.0, 4.0, 3.0], False),
        "sft_on.json": sft_report(on, enabled),
        "grpo_off.json": grpo_report(rewards, False),
        "grpo_on.json": grpo_report(rewards, True, ratio),
    }

    def train(program, out, report, *options):
        flag = "--use-fused-linear-ce" if "_on" in report else "--no-use-fused-linear-ce"
        assert options[-1] == flag
        assert report.startswith(program.removeprefix("train_"))
        return reports[report]

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo.sft_data, "prepare", lambda folder, vocab_size: folder)
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    code = demo.main()
    return code, json.loads((tmp_path / "report.json").read_text())


def test_runs_that_agree_and_a_reward_that_rises_pass(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "device", lambda: "cpu")
    code, report = run_demo(monkeypatch, tmp_path, on=[5.0, 4.00005, 3.0], rewards=[0.2, 0.4, 0.6])
    assert code == 0
    assert report["largest_loss_difference"] == pytest.approx(5e-5)
    assert (report["reward_first_tenth"], report["reward_last_tenth"], report["failures"]) == (0.2, 0.6, [])
    printed = capsys.readouterr().out
    assert printed.startswith("CPU demo: it shows correctness and memory, not speed.")
    assert "Both runs start with the same numbers. Then rounding differs" in " ".join(printed.split())
    assert re.search(r"largest difference in 3 steps +│ +│ +5e-05 │", printed)
    assert re.search(r"share of tokens in the head +│ +100% │ +25% │", printed)
    assert re.search(r"peak over rest, rank 1 +│ +200 MiB │ +200 MiB │", printed)
    assert re.search(r"importance ratio, first update +│ +1.0000 │ +1.0000 │", printed)
    assert (tmp_path / "sft.png").stat().st_size > 1000 < (tmp_path / "grpo.png").stat().st_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on": [5.0, 4.0002, 3.0]}, "the losses differ by 2.0e-04"),
        ({"on": [5.0, float("nan"), 3.0]}, "the losses differ by nan"),
        ({"rewards": [0.4, 0.4, 0.45]}, "the reward went from 0.400 to 0.450"),
        ({"ratio": 1.001}, "the importance ratio is 1.001000 at a first update"),
        ({"ratio": float("nan")}, "the importance ratio is nan at a first update"),
        ({"enabled": False}, "the fused head was not enabled"),
    ],
)
def test_what_must_not_pass_fails(monkeypatch, tmp_path, changes, message):
    for name in ("draw_sft", "draw_grpo"):
        monkeypatch.setattr(demo.pictures, name, lambda *arguments: None)
    given = {"on": [5.0, 4.0, 3.0], "rewards": [0.2, 0.4, 0.6], **changes}
    code, report = run_demo(monkeypatch, tmp_path, **given)
    assert code == 1
    assert report["failures"][0].startswith(message)

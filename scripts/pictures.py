"""Pictures of training runs, from their JSON reports."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first: no display is needed

_OFF, _ON, _OTHER = "#6b7280", "#2563eb", "#d97706"


def draw_sft(path: Path, off: list[float], on: list[float], allowed: float) -> None:
    """Loss per step of both runs, and below how far they are apart."""
    figure, (loss, difference) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    steps = range(1, len(off) + 1)
    loss.plot(steps, off, color=_OFF, linewidth=4, alpha=0.6, label="use_fused_linear_ce off")
    loss.plot(steps, on, color=_ON, linewidth=1.5, linestyle="--", label="use_fused_linear_ce on")
    loss.set(title="SFT on the standard library, TP=2, fp32, one seed", ylabel="loss per token")
    loss.legend()
    differences = [abs(a - b) for a, b in zip(off, on, strict=True)]
    difference.plot(steps, differences, ".", color=_ON, label="|on - off|")
    difference.axhline(allowed, color=_OTHER, linestyle=":", label=f"allowed: {allowed:.0e}")
    difference.set_yscale("symlog", linthresh=1e-7)  # logarithmic above, and a place for an exact 0
    difference.set(xlabel="optimizer step", ylabel="difference in loss", ylim=(-2e-8, 20 * allowed))
    difference.legend(loc="upper right", ncols=2)
    for axes in (loss, difference):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_grpo(path: Path, steps: list[dict[str, float]]) -> None:
    """Reward and entropy per step."""
    figure, (reward, entropy) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    numbers = range(1, len(steps) + 1)
    reward.plot(numbers, [step["reward"] for step in steps], color=_ON, label="mean reward (share of right positions)")
    reward.plot(numbers, [step["all_right"] for step in steps], color=_OTHER, label="share of answers wholly right")
    reward.set(title="GRPO on sorting digits, TP=2, use_fused_linear_ce on", ylabel="mean over the step's samples")
    reward.set_ylim(0, 1)
    reward.legend(loc="upper left")
    entropy.plot(numbers, [step["entropy"] for step in steps], color=_OFF)
    entropy.set(xlabel="GRPO step", ylabel="entropy per token (nats)", ylim=(0, None))
    for axes in (reward, entropy):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_distill(
    path: Path, losses: list[float], student: list[tuple[int, float]], teacher_cross_entropy: float
) -> None:
    """Divergence per step, and below the student's held-out cross-entropy beside the teacher's."""
    figure, (divergence, entropy) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    divergence.plot(range(1, len(losses) + 1), losses, color=_ON)
    divergence.set(title="Distillation of the SFT model into a smaller one", ylabel="divergence per token (nats)")
    divergence.set_ylim(0, None)
    entropy.plot(*zip(*student, strict=True), "o-", color=_ON, label="student, distilled")
    entropy.axhline(teacher_cross_entropy, color=_OTHER, linestyle="--", label="teacher")
    entropy.set(xlabel="optimizer step", ylabel="held-out cross-entropy (nats)")
    entropy.legend()
    for axes in (divergence, entropy):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)

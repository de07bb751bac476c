"""Pictures of training runs, from their JSON reports."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first: no display is needed

_OFF, _ON, _OTHER = "#6b7280", "#2563eb", "#d97706"
_STYLE_OFF = {"color": _OFF, "linewidth": 4, "alpha": 0.6}
_STYLE_ON = {"color": _ON, "linewidth": 1.5, "linestyle": "--"}


def draw_sft(path: Path, off: list[float], on: list[float], allowed: float, peaks_mib: tuple[float, float]) -> None:
    """Loss per step of both runs, their difference, and a step's peak memory over rest without and with the flag."""
    figure, (loss, difference) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    steps = range(1, len(off) + 1)
    loss.plot(steps, off, **_STYLE_OFF, label=f"flag off: a step's peak is {peaks_mib[0]:,.0f} MiB over rest")
    loss.plot(steps, on, **_STYLE_ON, label=f"flag on: {peaks_mib[1]:,.0f} MiB")
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


def draw_grpo(path: Path, off: list[dict[str, float]], on: list[dict[str, float]]) -> None:
    """Reward and entropy per step of both runs, and the importance ratio at each step's first update."""
    figure, axes = plt.subplots(3, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1, 1), layout="constrained")
    titles = {
        "reward": "mean reward",
        "entropy": "entropy per token (nats)",
        "first_ratio": "importance ratio,\nfirst update",
    }
    for panel, (measure, title) in zip(axes, titles.items(), strict=True):
        for name, steps, style in (("off", off, _STYLE_OFF), ("on", on, _STYLE_ON)):
            values = [step[measure] for step in steps]
            panel.plot(range(1, len(steps) + 1), values, **style, label=f"flag {name}")
        panel.set(ylabel=title)
        panel.grid(alpha=0.3)
    axes[0].set(title="GRPO on sorting digits, TP=2, fp32, one seed", ylim=(0, 1))
    axes[0].legend(loc="upper left")
    axes[1].set_ylim(0, None)
    axes[2].set(xlabel="GRPO step", ylim=(0.99, 1.01))
    last = on[-1]["first_ratio"]
    axes[2].annotate(f"{last:.4f}", (len(on), last), (0, 8), textcoords="offset points", ha="right", color=_ON)
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


def draw_mtp(path: Path, curves: dict[str, list[tuple[int, list[float]]]]) -> None:
    """Acceptance rate of each depth over the steps, a line for each loss."""
    depths = len(next(iter(curves.values()))[0][1])
    figure, axes = plt.subplots(1, depths, figsize=(8, 3.4), sharey=True, squeeze=False, layout="constrained")
    for depth, axis in enumerate(axes[0]):
        for (name, curve), color in zip(curves.items(), (_OTHER, _ON, "black"), strict=True):
            axis.plot([step for step, _ in curve], [100 * rates[depth] for _, rates in curve], label=name, color=color)
        axis.set(title=f"Depth {depth + 1}", xlabel="optimizer step", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("acceptance rate (%)")
    axes[0][0].legend(title="MTP heads trained on")
    figure.savefig(path, dpi=120)
    plt.close(figure)

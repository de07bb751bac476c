"""The drawing in docs/how_it_works.md: `python -m scripts.draw_how_it_works`."""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first: no display is needed
from matplotlib.patches import FancyBboxPatch

INPUT, BUFFER, RESULT, GROUP = "#dbeafe", "#fde68a", "#bbf7d0", "#fecaca"

# (x, y, width, text, colour), rows from top to bottom
BOXES = [
    (0.0, 3.1, 2.3, "hidden [N, H]\nweight [V/tp, H]", INPUT),
    (3.0, 3.1, 2.7, "softmax statistics\nof every 128 columns\n(logits in registers)", BUFFER),
    (6.4, 3.1, 2.2, "largest logit and\ninteger sums", BUFFER),
    (9.2, 3.1, 2.4, "over the group: largest\nlogits, then sums", GROUP),
    (12.2, 3.1, 2.3, "logprobs, entropy,\nlse [N]", RESULT),
    (0.0, 0.9, 2.3, "upstream gradients\n[N] of each output", INPUT),
    (3.0, 0.9, 2.7, "one slab of the gradient\nof logits, recomputed,\nin a reused buffer", BUFFER),
    (6.9, 1.75, 3.1, "dX: sum of slab @ weight[slab]\nin fp32, 4 N H bytes", BUFFER),
    (6.9, 0.1, 3.1, "dW[slab] = slab.T @ hidden", RESULT),
    (11.2, 1.75, 3.3, "hidden's gradient: all-reduce or\nreduce-scatter over the group,\nunder the last dW", GROUP),
]
ARROWS = [
    ((2.3, 3.6), (3.0, 3.6)), ((5.7, 3.6), (6.4, 3.6)), ((8.6, 3.6), (9.2, 3.6)), ((11.6, 3.6), (12.2, 3.6)),
    ((2.3, 1.4), (3.0, 1.4)), ((5.7, 1.6), (6.9, 2.2)), ((5.7, 1.2), (6.9, 0.6)), ((10.0, 2.25), (11.2, 2.25)),
]  # fmt: skip


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(11.5, 4.2))
    for x, y, width, text, color in BOXES:
        box = FancyBboxPatch((x, y), width, 1.0, boxstyle="round,pad=0.05", facecolor=color, edgecolor="#374151")
        axes.add_patch(box)
        axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8.5)
    for start, end in ARROWS:
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "#374151"})
    axes.annotate(
        "for each slab of vocabulary",
        xy=(4.35, 0.82),
        xytext=(4.35, 0.25),
        ha="center",
        fontsize=8,
        arrowprops={"arrowstyle": "->", "color": "#374151"},
    )
    axes.text(-0.1, 4.4, "forward", fontsize=11, weight="bold")
    axes.text(-0.1, 2.3, "backward", fontsize=11, weight="bold")
    legend = {"input": INPUT, "buffer": BUFFER, "communication": GROUP, "result": RESULT}
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="#374151", label=name) for name, color in legend.items()
    ]
    axes.legend(handles=handles, loc="upper right", ncols=4, fontsize=8, frameon=False, bbox_to_anchor=(1.0, 1.05))
    axes.set(xlim=(-0.3, 14.8), ylim=(-0.1, 4.9))
    axes.axis("off")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="python -m scripts.draw_how_it_works", description=__doc__.splitlines()[0])


if __name__ == "__main__":
    build_parser().parse_args()
    draw(Path(__file__).resolve().parent.parent / "docs" / "how_it_works.png")

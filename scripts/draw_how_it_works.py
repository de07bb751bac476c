"""The drawing of how the head works, docs/images/how_it_works.png: `python -m scripts.draw_how_it_works`."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first: no display is needed
from matplotlib.patches import Rectangle

HIDDEN, WEIGHT, SLAB, NEVER, RESULT, EDGE = "#dbeafe", "#fef3c7", "#2563eb", "#e5e7eb", "#bbf7d0", "#374151"
TOKENS, COLUMNS, SLAB_WIDTH = 2.6, 3.6, 0.55  # the height and the width of one rank's logits, and the slab's width
RANKS = {"rank 0": 2.2, "rank 1": 2.2 + COLUMNS + 0.35}  # where each rank's columns begin


def box(axes: Any, x: float, y: float, width: float, height: float, color: str, text: str = "", **more: Any) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=EDGE, **more))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str = EDGE) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": color, "linewidth": 1.5})


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(10.5, 4.8), layout="constrained")
    box(axes, 0.7, 0, 0.9, TOKENS, HIDDEN, "hidden\n[N, H]")
    right = 0.0
    for rank, left in RANKS.items():
        right = left + COLUMNS
        box(axes, left, TOKENS + 0.35, COLUMNS, 0.75, WEIGHT)
        box(axes, left, 0, COLUMNS, TOKENS, NEVER, linestyle="--")
        first, above = left + 0.5, TOKENS + 0.35
        axes.add_patch(Rectangle((first, 0), SLAB_WIDTH, TOKENS, facecolor=SLAB, edgecolor=EDGE))
        axes.add_patch(
            Rectangle((first, TOKENS + 0.35), SLAB_WIDTH, 0.75, facecolor="none", edgecolor=SLAB, linewidth=2)
        )
        arrow(axes, (first + SLAB_WIDTH + 0.08, 0.35), (right - 0.15, 0.35), SLAB)
        x = first + SLAB_WIDTH + 0.12
        axes.text(x, 0.5, "a range of columns at a time", color=SLAB, fontsize=9)
        logits = "logits [N, V/tp]: kept once,\nin 16 bits, or not at all"
        axes.text(x + 1.1, 1.65, logits, ha="center", va="center", fontsize=11)
        axes.text(x + 1.1, above + 0.37, f"{rank}: weight\n[V/tp, H]", ha="center", va="center", fontsize=10)
    box(axes, right + 0.9, 0, 1.25, TOKENS, RESULT, "loss, or\nlogprobs\nand\nentropy\n[N]")
    arrow(axes, (right + 0.08, TOKENS / 2), (right + 0.85, TOKENS / 2))
    axes.text(1.15, TOKENS + 0.12, "N tokens", ha="center", fontsize=9)
    captions = {
        "forward": "each range adds to the sums of its rank; the ranks exchange [N] numbers, never logits",
        "backward": "kept logits become gradients in place; else each range is computed again",
    }
    for row, (word, text) in enumerate(captions.items()):
        axes.text(0.7, -0.5 - 0.45 * row, word, fontsize=10.5, weight="bold")
        axes.text(2.2, -0.5 - 0.45 * row, text, fontsize=10.5)
    axes.set(xlim=(0.5, right + 2.3), ylim=(-1.1, TOKENS + 1.25))
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="python -m scripts.draw_how_it_works", description=__doc__.splitlines()[0])


if __name__ == "__main__":
    build_parser().parse_args()
    draw(Path(__file__).resolve().parent.parent / "docs" / "images" / "how_it_works.png")

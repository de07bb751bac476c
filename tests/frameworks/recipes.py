"""Makes the changes of docs/recipes in another project's files.

    python tests/frameworks/recipes.py docs/recipes/slime.diff ../slime      # where the project's repository lies

The hunks have no line numbers, since those move: what a hunk replaces is found by its text.
"""

import re
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "recipes"
_HEADER = re.compile(r"^--- a/(\S+)\n\+\+\+ b/(\S+)\n", re.MULTILINE)


def adopt(name: str, checkout: Path, into: Path) -> None:
    """Copies the package or the file that a recipe is about to `into` and makes the recipe's changes in the copy."""
    text = (FOLDER / f"{name}.diff").read_text()
    (root,) = {path.partition("/")[0] for path in _hunks(text)}
    copy = shutil.copytree if (checkout / root).is_dir() else shutil.copy
    copy(checkout / root, into / root)
    change(text, into)


def change(diff: str, folder: Path) -> None:
    """Makes all the changes, or none where one does not fit."""
    changed = {folder / path: apply(hunks, (folder / path).read_text(), path) for path, hunks in _hunks(diff).items()}
    for file, text in changed.items():
        file.write_text(text)


def _hunks(diff: str) -> dict[str, str]:
    """The hunks for each file, by its path."""
    _, *parts = _HEADER.split(diff)
    found = dict(zip(parts[::3], parts[2::3], strict=True))
    assert len(found) == len(parts) // 3, "two diffs of one file"
    assert parts[::3] == parts[1::3], "a file changes its name"
    return found


def apply(hunks: str, text: str, path: str) -> str:
    """The text with each hunk's lines, which must stand in it exactly once, replaced."""
    for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE):
        lines = [line if line.strip() else " " for line in hunk.splitlines()]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        if not lines:
            continue
        assert f"\n{text}".count(f"\n{before}") == 1, f"{path} has not once:\n{before}"
        text = f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]
    return text


if __name__ == "__main__":
    change(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))

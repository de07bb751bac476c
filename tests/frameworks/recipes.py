"""The diffs of docs/adoption.md, applied to copies of the files that they name."""

import re
import shutil
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adoption.md"
_BLOCK = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADER = re.compile(r"--- a/(\S+)\n\+\+\+ b/(\S+)\n")


def roots() -> set[str]:
    """The packages, and files in no package, that the page has diffs for."""
    return {path.partition("/")[0] for path in _hunks()}


def _hunks() -> dict[str, str]:
    """The hunks for each file, by its path."""
    found: dict[str, str] = {}
    for block in _BLOCK.findall(PAGE.read_text()):
        _, *parts = _HEADER.split(block)
        for path, other, hunks in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            assert path == other, f"{path} becomes {other}"
            assert path not in found, f"two diffs of {path}"
            found[path] = hunks
    return found


def adopt(checkout: Path, root: str, into: Path, under: str = "") -> list[str]:
    """Copies the folder or file `checkout/root` to `into/root`, with the page's diffs; the files that were changed.

    `under`: only the diffs of files there, where another version of the project has the others'.
    """
    copy = shutil.copytree if (checkout / root).is_dir() else shutil.copy
    copy(checkout / root, into / root)
    changed = {path: hunks for path, hunks in _hunks().items() if path.startswith(under or root)}
    assert changed, f"{PAGE.name} has no diff for {under or root}"
    for path, hunks in changed.items():
        file = into / path
        file.write_text(apply(hunks, file.read_text(), path))
    return list(changed)


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

"""Tables and pictures of the committed results."""

import re

import pytest

from benchmark import pictures, publish, results


def test_the_table_of_verl():
    """A pass without a gradient keeps no logits: its variants are fewer."""
    common = {"tp": 2, "status": "ok", "entropy_coeff": 0.0, "time_ms": 80.0, "peak_mib": 2048.0}
    passes = {"update": ("plugin", "plugin, no cache"), "logprobs": ("plugin",)}
    records = [
        common | {"pass": what, "masked": masked, "variant": name}
        for what, names in passes.items()
        for name in names
        for masked in (0.0, 0.6)
    ]
    rows = publish.verl({"verl": records}).splitlines()[2:]
    assert rows[0].endswith("| 80.0, 2.0 | 80.0, 2.0 | 80.0, 2.0 | 80.0, 2.0 |")
    assert rows[1].endswith("| 80.0, 2.0 | 80.0, 2.0 | - | - |")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = pictures.draw(name, publish.result(pictures.PICTURES[name][0]), tmp_path)
    assert path == tmp_path / f"{name}.png"
    assert path.stat().st_size > 10_000
    assert (publish.IMAGES / path.name).exists()


def test_every_table_stands_on_a_page():
    """Where `test_docs.py` holds it against its result."""
    text = "".join(page.read_text() for page in publish.pages())
    assert sorted(name for _, name, _ in publish.PLACE.findall(text)) == sorted([*publish.TABLES, "commands"])


def test_committed_results_are_one_record_a_line():
    paths = sorted(publish.RESULTS.glob("*.json"))
    for path in paths:
        assert results.as_text(results.load(path)) == path.read_text(), path.name
    assert sum(path.read_text().count("\n") for path in paths) <= 1000


def test_every_committed_result_is_cited():
    """By a table, a picture, a page or a test; a page cites by the file's name."""
    cited = {file for file, _ in (*publish.TABLES.values(), *pictures.PICTURES.values())}
    texts = [path.read_text() for path in (*publish.pages(), publish.ROOT / "tests" / "test_estimate.py")]
    for path in publish.RESULTS.iterdir():
        assert path.stem in cited or any(re.search(rf"\b{path.stem}\b", text) for text in texts), path.name

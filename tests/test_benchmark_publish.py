"""Tables and pictures: from made-up results of every kind, and from those that are committed."""

import math
import re

import pytest

from benchmark import pictures, publish, results, run

VARIANTS = run.VARIANTS
TOKENS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
HEADS = tuple(publish.HEADS)


def ok(index, time_ms, peak_mib, **fields):
    return fields | {"status": "ok", "time_ms": time_ms + index, "peak_mib": peak_mib, "gradients_mib": 1300.0}


def step_records(tokens=(8192, 16384), shares=(0.0, 0.6), variants=VARIANTS):
    records = []
    for n in tokens:
        for share in shares:
            for index, name in enumerate(variants):
                saved = (0.4 * share if name.endswith("-skip") else 0) + (0.4 if name.startswith("ours") else 0)
                time_ms, gib = n / 55 * (1 - 0.5 * saved), n / 640 * (1 - saved)
                records.append(ok(index, time_ms, 1024 * gib, variant=name, tokens=n, masked=share))
    return records


def head_records(shapes):
    records = []
    for shape in shapes:
        for mode in ("rl", "sft"):
            for index, name in enumerate(HEADS):
                records.append(ok(index, 50.0, 1900.0, shape=shape, mode=mode, provider=name, over_products=1.25))
    records[0] = {"shape": shapes[0], "mode": "rl", "provider": HEADS[0], "status": "unsupported", "reason": ""}
    return records


def memory_records():
    records = []
    for tokens in TOKENS:
        for name, mib in {"ours": 0.02, "compile": 2.9, "megatron": 1.6}.items():
            record = ok(0, 0.0, 1300 + 450 + mib * tokens, tokens=tokens, provider=name)
            if record["peak_mib"] > 140 * 1024:
                record = {"tokens": tokens, "provider": name, "status": "out of memory"}
            records.append(record)
    return records


def training_records(steps=2000):
    def losses(run_index):
        return [
            round(2 + 8 * math.exp(-step / 150) + 0.05 * math.sin(step) + 1e-4 * run_index * math.sin(step / 40), 6)
            for step in range(steps)
        ]

    names = {"native": 0, "native-again": 3, "flag": 1, "known": 2}
    return [
        ok(0, 15.0, 4000.0, run=name, losses=losses(i), step_tokens=8192, held_out_loss=2.5)
        for name, i in names.items()
    ]


def made_up():
    """A document for every file that tables and pictures name."""
    environment = {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    sections = {
        "steps_h200": {
            "steps": step_records()
            + step_records((8192,), (0.3, 0.9), ("native-fused", "ours-skip", "ours-known-skip"))
        },
        "heads_h200": {
            "times": head_records(["S1", "S2", "S3"]),
            "errors": [
                {
                    "provider": x,
                    "mode": "rl",
                    "status": "ok",
                    "logprobs_max_error": 1e-5,
                    "grad_hidden_relative_error": 2e-3,
                }
                for x in ("ours", "compile")
            ],
        },
        "memory_h200": {"memory": memory_records()},
        "jsd_h200": {
            "jsd": [
                ok(i, 60.0, 1300 + 1024 * (9 - 4 * i), provider=x, beta=beta)
                for beta in (0.5, 0.0, 1.0)
                for i, x in enumerate(("compile", "ours", "ours-weights-1024"))
            ]
        },
        "training_h200": {"training": training_records()},
    }
    return {name: {"environment": environment} | section for name, section in sections.items()}


@pytest.fixture(scope="module")
def documents():
    return made_up()


def test_every_table_has_its_rows_and_columns(documents):
    for name, (file, make) in publish.TABLES.items():
        header, line, *rows = make(documents[file]).splitlines()
        assert set(line) == set("|-"), name
        assert len(rows) >= 2, name
        assert len({row.count("|") for row in (header, line, *rows)}) == 1, name
    first = publish.first_step(documents["steps_h200"])
    assert "| Megatron, TransformerEngine's cross-entropy | 150.9 ms | 12.8 GiB | 150.9 ms | 12.8 GiB |" in first
    assert "| ... and masked tokens skipped | " in first
    assert "| Megatron, fused cross-entropy | - | 50.0 ms (1.25), 0.6 GiB |" in publish.heads(
        documents["heads_h200"], S1=""
    )
    assert "out of memory" in publish.memory(documents["memory_h200"])


def test_the_first_run_is_what_others_differ_from(documents):
    rows = publish.training(documents["training_h200"]).splitlines()
    assert rows[2].endswith("| 546,133 | 3.9 GiB | 2.5000 |  |  |")
    assert rows[4].startswith("| megatron-lce | 546,133 |")
    assert rows[4].endswith("| 1.0e-04 |")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn(name, documents, tmp_path):
    pytest.importorskip("matplotlib")
    path = pictures.draw(name, documents[pictures.PICTURES[name][0]], tmp_path)
    assert path == tmp_path / f"{name}.png"
    assert path.stat().st_size > 10_000
    assert (publish.IMAGES / path.name).exists()


def test_a_page_is_filled_from_committed_results(tmp_path, monkeypatch, documents):
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    (tmp_path / "steps_h200.json").write_text(results.as_text(documents["steps_h200"]))
    page = "before\n<!-- table: options -->\nold\n<!-- end -->\nafter\n"
    filled = publish.fill(page)
    assert publish.fill(filled) == filled
    assert filled == page.replace("old\n", f"\n{publish.options(documents['steps_h200'])}\n")
    with pytest.raises(KeyError, match="no_such_table"):
        publish.fill(page.replace("options", "no_such_table"))


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

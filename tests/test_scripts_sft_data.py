"""Prompt and completion pairs, and what packing must keep apart."""

import json

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("megatron.core")

from scripts import sft_data
from scripts.sft_data import Example


def test_packing_shifts_within_each_example_and_masks_prompts_and_padding():
    batch = sft_data.pack([Example([10, 11, 12, 13], 2), Example([20, 21, 22], 1)], pad_id=0, row_length=7)
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 0, 0]]
    assert batch.labels.tolist() == [[11, 12, 13, 21, 22, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7]


def test_packed_rows_hold_every_example_and_cut_only_the_ones_longer_than_a_row():
    examples = [Example(list(range(start, start + length)), 1) for start, length in ((100, 4), (200, 4), (300, 99))]
    rows = sft_data.packed_batches(examples, 0, row_length=7)
    first, second = next(rows), next(rows)
    assert first.tokens.tolist() == [[100, 101, 102, 200, 201, 202, 0]]
    assert second.tokens.tolist() == [list(range(300, 307))]
    assert second.labels.tolist() == [list(range(301, 308))]
    assert next(rows).tokens[0, :3].tolist() == [100, 101, 102], "the examples come again"


def test_examples_of_which_a_row_holds_the_prompt_alone_are_left_out(tmp_path):
    path = tmp_path / "examples.json"
    path.write_text(json.dumps({"pad_id": 0, "examples": [[3, [1, 2, 3, 4]], [9, [1] * 12]]}))
    assert sft_data.load_examples(path, seed=1, row_length=3) == ([Example([1, 2, 3, 4], 3)], 0)
    with pytest.raises(ValueError, match="--row-length must be at least 3, the shortest prompt, got 2"):
        sft_data.load_examples(path, seed=1, row_length=2)

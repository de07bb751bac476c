"""The parts of the scripts: losses, data, what stands between them and Megatron, and the demonstration's verdict."""

import json
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("tokenizers")
pytest.importorskip("megatron.core")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from megatron.core.packed_seq_params import PackedSeqParams

import megatron_lce
from scripts import demo, megatron_runtime, rl_losses, sft_data, sorting_task, train_grpo, train_sft, training
from scripts.materialised_head import logprobs_and_entropy
from scripts.megatron_layers import SdpaAttention
from scripts.rollout import sample
from scripts.sft_data import Example


@pytest.fixture
def case():
    """Three sequences of four tokens, the last one half masked, all double."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 4)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "logprobs": (old + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_(),
        "entropy": torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_(),
        "old_logprobs": old,
        "reference_logprobs": -torch.rand(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64),
        "mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.float64),
    }


def surrogate(ratio: Tensor, advantage: Tensor) -> Tensor:
    return min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_policy_loss_is_the_sum_of_its_formula(case, level):
    """And its gradient is the formula's, in which masked tokens are not."""
    result = rl_losses.policy_loss(**case, level=level, clip_low=0.2, clip_high=0.28, kl_weight=0.3, entropy_weight=0.1)
    total, units = 0.0, 0
    for row, kept in enumerate(case["mask"].bool()):
        logprobs, advantage = case["logprobs"][row, kept], case["advantages"][row]
        gap, d = logprobs - case["old_logprobs"][row, kept], case["reference_logprobs"][row, kept] - logprobs
        penalty = 0.3 * (d.exp() - 1 - d) - 0.1 * case["entropy"][row, kept]
        if level == "token":
            total += penalty.sum() - sum(surrogate(ratio, advantage) for ratio in gap.exp())
            units += len(gap)
        elif len(gap):
            total += penalty.mean() - surrogate(gap.mean().exp(), advantage)
            units += 1
    trained = case["logprobs"], case["entropy"]
    actual, expected = ((loss, *torch.autograd.grad(loss, trained)) for loss in (result.total, total))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    assert float(result.count) == units


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


@pytest.fixture(scope="module")
def megatron():
    """parallel_state of one rank."""
    device = megatron_runtime.initialize(device="cpu")
    yield device
    megatron_runtime.teardown()


def test_packed_sequences_do_not_see_each_other(megatron):
    config = megatron_runtime.transformer_config(megatron_runtime.GptOptions(num_query_groups=2))
    attention = SdpaAttention(config, layer_number=1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, heads, 16, generator=generator) for heads in (4, 2, 2))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 7], dtype=torch.int32))
    together = attention(query, key, value, None, packed_seq_params=packed)
    parts = zip(*(tensor.unsqueeze(1).split([3, 4]) for tensor in (query, key, value)), strict=True)
    apart = [attention(*part)[:, 0] for part in parts]
    torch.testing.assert_close(together, torch.cat(apart))


def test_sft_is_the_same_with_a_loss_told_in_advance(megatron):
    """Three optimizer steps of Megatron's path, of the flag and of the capture."""
    rows = [sft_data.pack([sft_data.Example(list(range(1, 12)), prompt)], 0, 13) for prompt in (9, 2, 5)]
    step = partial(train_sft.forward_step, device=megatron)
    told = partial(train_sft.token_loss_step, device=megatron, workspace_bytes=2**20)
    losses = []
    for flag, forward_step in ((False, step), (True, step), (True, told)):
        options = megatron_runtime.GptOptions(num_layers=1, vocab_size=32, config={"calculate_per_token_loss": True})
        model = megatron_runtime.build_gpt(options, device=megatron, ddp=True)
        optimizer = megatron_runtime.build_optimizer([model], lr=1e-2)
        megatron_lce.enable_fused_linear_ce(model, flag, skip_masked=True)
        reports = [training.train_step(model, optimizer, forward_step, iter([row]), 1) for row in rows]
        losses.append([float(report[0]) for of_step in reports for report in of_step])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_is_the_same_with_a_loss_told_in_advance(megatron, level):
    """Samples, losses and measures of two steps; a loss of sequences is made of the head's outputs either way."""
    size = "--num-layers 1 --steps 2 --warm-up-steps 2 --prompts 2 --samples 2 --digits 2 --updates 2 --dtype fp32"
    measured = []
    for ways in ("--no-use-fused-linear-ce", "--loss outputs", "--loss token"):
        args = train_grpo.build_parser().parse_args([*size.split(), "--level", level, *ways.split()])
        torch.manual_seed(0)
        trainer = train_grpo.Trainer(args, megatron)
        trainer.warm_up()
        optimizer = megatron_runtime.build_optimizer([trainer.policy], lr=args.lr)
        steps = []
        for _ in range(args.steps):
            batch, measures = trainer.roll_out()
            steps += [{**measures, **trainer.update(optimizer, batch)}]
        measured.append(steps)
    for steps in measured[1:]:
        for step, expected in zip(steps, measured[0], strict=True):
            assert 0 < step.pop("share_of_rows_computed") < 0.7 < expected["share_of_rows_computed"]
            for name, value in step.items():
                assert value == pytest.approx(expected[name], rel=1e-5, abs=2e-6), name


def test_materialised_logprobs_and_entropy_are_those_of_a_softmax(megatron):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, generator=generator).requires_grad_()
    labels = torch.tensor([[0, 5, -100], [2, 1, 4]])
    upstream = torch.randn(2, 2, 3, generator=generator)
    out = torch.stack(logprobs_and_entropy(logits, labels, temperature=0.7, vocab_size=6))
    distribution = torch.distributions.Categorical(logits=logits.double()[..., :6] / 0.7)
    expected = torch.stack([distribution.log_prob(labels.clamp(min=0)), distribution.entropy()]) * (labels >= 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    actual_gradient, gradient = (torch.autograd.grad((x * upstream).sum(), logits) for x in (out, expected))
    torch.testing.assert_close(actual_gradient, gradient, rtol=1e-5, atol=1e-6)


class _Countdown(torch.nn.Module):
    """Certain that the digit after d is d - 1, and after 0 the end of text; mildly in favour of padding columns."""

    def forward(self, tokens, positions, attention_mask):
        following = torch.where(tokens == 0, sorting_task.EOS, (tokens - 1).clamp(min=0))
        logits = torch.nn.functional.one_hot(following, 16) * 50.0
        logits[..., sorting_task.VOCAB_SIZE :] = 99.0
        return logits


def test_sampling_stops_at_the_end_of_text_and_leaves_padded_columns_alone(megatron):
    eos, pad = sorting_task.EOS, sorting_task.PAD
    ids = {"vocab_size": sorting_task.VOCAB_SIZE, "eos": eos, "pad": pad}
    generator, prompts = torch.Generator().manual_seed(0), torch.tensor([[9, 1], [9, 3]])
    tokens, logprobs, mask = sample(_Countdown(), prompts, 4, temperature=0.5, generator=generator, **ids)
    assert tokens.tolist() == [[0, eos, pad, pad], [2, 1, 0, eos]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    torch.testing.assert_close(logprobs, torch.zeros(2, 4))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on": [5.0, 4.00005, 3.0]}, ""),
        ({"on": [5.0, 4.0002, 3.0]}, "the losses differ by 2.0e-04"),
        ({"on": [5.0, float("nan"), 3.0]}, "the losses differ by nan"),
        ({"rewards": [0.4, 0.4, 0.45]}, "the reward went from 0.400 to 0.450"),
        ({"ratio": 1.001}, "the importance ratio is 1.001000 at a first update"),
        ({"ratio": float("nan")}, "the importance ratio is nan at a first update"),
        ({"enabled": False}, "the fused head was not enabled"),
    ],
)
def test_the_demonstrations_verdict(monkeypatch, tmp_path, changes, message):
    for name in ("draw_sft", "draw_grpo"):
        monkeypatch.setattr(demo.pictures, name, lambda *arguments: None)
    given = {"on": [5.0, 4.0, 3.0], "rewards": [0.2, 0.4, 0.6], **changes}
    code, report = run_demo(monkeypatch, tmp_path, **given)
    assert code == bool(message)
    assert [failure.startswith(message) for failure in report["failures"]] == [True] * code

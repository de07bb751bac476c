"""What stands between the programs and Megatron: patches, attention, sampling and the head without fusion."""

from functools import partial

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams

import megatron_lce
from scripts import megatron_runtime, sft_data, sorting_task, train_grpo, train_sft, training
from scripts.materialised_head import logprobs_and_entropy
from scripts.megatron_layers import SdpaAttention
from scripts.rollout import sample


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

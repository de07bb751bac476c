"""Sampling from a Megatron GPT through its own logits, as a training program without an inference engine does it."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor


@torch.no_grad()
def sample(
    model: torch.nn.Module,
    prompts: Tensor,  # [B, prompt_length] int64
    length: int,
    *,
    temperature: float,
    vocab_size: int,
    eos: int,
    pad: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Completions of `length` tokens: (token ids, their logprobs at `temperature`, mask), each [B, length].

    After a sequence's `eos`, which counts as its last token, come `pad` tokens with mask 0. Every rank of the
    tensor-parallel group returns the same tokens. No key-value cache: each token costs a pass over the sequence, at one
    shape throughout.
    """
    batch, start = prompts.shape
    tokens = torch.cat([prompts, prompts.new_full((batch, length), pad)], dim=1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logprobs = torch.zeros(batch, length, device=tokens.device)
    mask = torch.zeros(batch, length, device=tokens.device)
    running = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    model.eval()
    for step in range(length):
        logits = model(tokens, positions, None)[:, start + step - 1]  # [B, V / tp]
        logits = gather_from_tensor_model_parallel_region(logits)[:, :vocab_size].float() / temperature
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        source = parallel_state.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(chosen, source, group=parallel_state.get_tensor_model_parallel_group())
        logprobs[:, step] = logits.log_softmax(-1).gather(1, chosen)[:, 0] * running
        mask[:, step] = running.float()
        tokens[:, start + step] = torch.where(running, chosen[:, 0], pad)
        running &= chosen[:, 0] != eos
    model.train()
    return tokens[:, start:], logprobs, mask

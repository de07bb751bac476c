"""The flag and the capture on a tiny Megatron GPT, on a GPU or a CPU: where a script of one's own can start.

python -m scripts.tiny_gpt
"""

import argparse

import torch

import megatron_lce
from scripts import megatron_runtime
from scripts.arguments import HelpFormatter

VOCAB_SIZE, PADDED_VOCAB_SIZE = 1000, 1024
BATCH, SEQUENCE = 2, 64


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """All parameters' gradients of a loss in one vector; the model is left without gradients."""
    loss.backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return found


def try_it(device: torch.device) -> None:
    options = megatron_runtime.GptOptions(vocab_size=PADDED_VOCAB_SIZE, max_sequence_length=SEQUENCE)
    model = megatron_runtime.build_gpt(options, device=device)
    tokens = torch.randint(VOCAB_SIZE, (BATCH, SEQUENCE), device=device)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1)
    labels = megatron_lce.shift_labels(tokens)  # the next token; -100 behind the last one
    counted = labels != -100

    # Megatron has no ignored labels: the last token's loss is one that its mask removes.
    without = model(tokens, positions, None, labels=labels.clamp(min=0))[counted].mean()
    gradients_without = gradients(model, without)

    handle = megatron_lce.enable_fused_linear_ce(model)
    print(handle)
    fused = model(tokens, positions, None, labels=labels)[counted].mean()
    difference = (gradients(model, fused) - gradients_without).norm() / gradients_without.norm()
    print(f"loss: {without:.6f} without the flag, {fused:.6f} with it")
    print(f"gradients: {difference:.1e} apart, relative to their norm")
    handle.remove()

    with megatron_lce.capture_lm_head(model) as head:
        model(tokens, positions, None)
    print(head)
    out = head.linear_cross_entropy(labels, vocab_size=VOCAB_SIZE)
    print(f"captured: mean logprob {out.logprobs[counted].mean():.6f}, mean entropy {out.entropy[counted].mean():.6f}")


def main() -> None:
    device = megatron_runtime.initialize()
    try_it(device)
    megatron_runtime.teardown()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter).parse_args()
    main()

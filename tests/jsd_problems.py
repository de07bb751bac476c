"""Inputs of `linear_jsd`'s tests, and the one assertion that most of them make."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lce import linear_jsd
from megatron_lce.backends.choice import load_backend
from megatron_lce.core.plan import COLUMN_STEP, slab_row_stride
from tests.jsd_oracle import JsdInputs, evaluate_jsd, jsd_comparisons

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BETAS = [0, 0.5, 1]  # both ends and between


def make_inputs(tokens, student_size, teacher_size, columns, device, dtype=FP32, teacher_dtype=None, logit_std=2.0):
    """Normal hidden and weight of either head, whose products have a standard deviation of `logit_std`."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    generator = torch.Generator().manual_seed(0)
    heads = []
    for size, its_dtype in ((student_size, dtype), (teacher_size, teacher_dtype or dtype)):
        hidden = torch.randn(*shape, size, generator=generator)
        weight = torch.randn(columns, size, generator=generator) * (logit_std / size**0.5)
        heads += [hidden.to(device, its_dtype), weight.to(device, its_dtype)]
    return JsdInputs(*heads, torch.randn(shape, generator=generator).to(device))


def check(backend, inputs, *, only_here=None, evaluate=evaluate_jsd, **keywords):
    """Run, assert that loss and gradients are within their budget of the oracle's, and return them.

    `only_here`: keywords that the oracle does not have.
    """
    actual = evaluate(linear_jsd, inputs, backend=backend, **(only_here or {}), **keywords)
    for name, error, allowed in jsd_comparisons(actual, inputs, **keywords):
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.1e}"
    return actual


def workspace_of(tokens, inputs, backend):
    """Bytes that both heads' logits of so many tokens take, and half as many: gradients, copies."""
    num_columns, device = inputs.student_weight.shape[0], inputs.student_hidden.device
    per_token = load_backend(backend, device).intermediate_bytes(num_columns)
    copied = max(4 * inputs[i].shape[-1] * (inputs[i].dtype != FP32) for i in (0, 2)) if device.type == "cpu" else 0
    return int(1.5 * tokens * (slab_row_stride(num_columns) * 8 + per_token + copied)) + COLUMN_STEP * copied


class Products(TorchDispatchMode):
    """Rows and columns of the products of hidden states with weights inside the context, by their size H."""

    def __init__(self, *sizes):
        super().__init__()
        self.shapes = {size: [] for size in sizes}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[:2] if func.overloadpacket is torch.ops.aten.mm else args[1:3]
            if a.shape[1] in self.shapes:
                self.shapes[a.shape[1]].append((a.shape[0], b.shape[1]))
        return func(*args, **(kwargs or {}))


def ignoring(rows, shape, device):
    labels = torch.zeros(shape, dtype=torch.int64, device=device)
    labels.view(-1)[rows] = -100
    return labels

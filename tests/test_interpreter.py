import pytest
import torch


def test_bf16_is_rounded_as_torch_rounds_it():
    """NaN whatever its payload, infinity, subnormal numbers and those that round up to infinity among them."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    core = pytest.importorskip("triton.language.core")
    from triton.runtime import interpreter

    some = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    special = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 1, 0x00018000, 0x3F808000]).int()
    numbers = torch.cat([some, special]).view(torch.float32)
    bits = interpreter._convert_float(numbers.numpy(), core.float32, core.bfloat16, None)
    rounded = torch.from_numpy(bits).view(torch.bfloat16)
    torch.testing.assert_close(rounded, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
    widened = torch.from_numpy(interpreter._convert_float(bits, core.bfloat16, core.float32, None))
    torch.testing.assert_close(widened.view(torch.float32), rounded.float(), rtol=0, atol=0, equal_nan=True)

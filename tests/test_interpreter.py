import pytest
import torch


@pytest.fixture
def core():
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return pytest.importorskip("triton.language.core")


def test_bf16_is_rounded_as_torch_rounds_it(core):
    """NaN whatever its payload, infinity, subnormal numbers and those that round up to infinity among them."""
    from triton.runtime import interpreter

    some = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    special = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 1, 0x00018000, 0x3F808000]).int()
    numbers = torch.cat([some, special]).view(torch.float32)
    bits = interpreter._convert_float(numbers.numpy(), core.float32, core.bfloat16, None)
    rounded = torch.from_numpy(bits).view(torch.bfloat16)
    torch.testing.assert_close(rounded, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
    widened = torch.from_numpy(interpreter._convert_float(bits, core.bfloat16, core.float32, None))
    torch.testing.assert_close(widened.view(torch.float32), rounded.float(), rtol=0, atol=0, equal_nan=True)


def test_a_dot_does_not_depend_on_where_its_row_and_column_are(core):
    """With some CPUs' kernels numpy's own does (OPENBLAS_CORETYPE=Haswell shows it)."""
    from triton.runtime import interpreter

    def dot(a, b):
        zeros = torch.zeros(len(a), b.shape[1])
        handles = [interpreter.TensorHandle(matrix.numpy(), core.float32) for matrix in (a, b, zeros)]
        return torch.from_numpy(interpreter.interpreter_builder.create_dot(*handles, None, None).data)

    a, b = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).split(32)
    products = dot(a, b.T.contiguous())
    torch.testing.assert_close(products, a @ b.T)
    assert torch.equal(dot(a.flip(0), b.flip(0).T.contiguous()), products.flip(0, 1))

"""Products in FP8 on CPUs are those of the definition; what the GPU's kernel is given."""

from __future__ import annotations

from unittest.mock import patch

import fp8_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from csps.kernels import rowwise_fp8
from csps.kernels.rowwise_fp8 import FP8, quantize_rows, rowwise_product, unsupported_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 2, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * sizes).to(dtype)


def test_the_reference_knows_all_numbers() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).double().numpy()
    assert np.array_equal(reference.in_fp8(codes), codes)


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_rows_are_rounded_by_definition(
    rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    x_rn = random(seed, rows, columns, dtype)
    x_rn[0] = 0
    numbers_rn, scales_r1 = quantize_rows(x_rn)
    expected, scales = reference.quantized_rows(x_rn)
    assert np.array_equal(numbers_rn.double().numpy(), expected)
    assert np.array_equal(scales_r1.double().numpy(), scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_product_by_definition(dtype: torch.dtype, tokens: int) -> None:
    x_ti, weight_oi = random(1, tokens, 96, dtype), random(2, 80, 96) / 100
    numbers_oi, scales_o1 = quantize_rows(weight_oi)
    with patch.object(rowwise_fp8, "BLOCK_NUMBERS", 96 * 7):  # several blocks, the last a part
        product_to = rowwise_product(x_ti, numbers_oi, scales_o1)
    assert product_to.dtype == dtype
    if tokens:
        expected_to = reference.product(x_ti, weight_oi)
        size_to = (x_ti.double().abs() @ weight_oi.double().abs().T).float()
        bound = {torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
        assert ((product_to.double() - expected_to).abs() <= bound * size_to + 1e-7).all()


def test_what_gpus_are_given_means_the_same() -> None:
    """Torch has the operation on CPUs, too."""
    x_ti, weight_oi = random(5, 32, 64, torch.bfloat16), random(6, 48, 64)
    numbers_oi, scales_o1 = quantize_rows(weight_oi)
    product_to = rowwise_fp8._multiplied(x_ti, numbers_oi, scales_o1)
    expected_to = rowwise_product(x_ti, numbers_oi, scales_o1)
    torch.testing.assert_close(product_to, expected_to, rtol=2**-7, atol=1e-6)


def test_a_token_does_not_depend_on_the_others() -> None:
    """The scale of a token is its own, so that chunks and batches do not matter."""
    x_ti = random(3, 40, 64)
    numbers_oi, scales_o1 = quantize_rows(random(4, 48, 64))
    whole_to = rowwise_product(x_ti, numbers_oi, scales_o1)
    for row in range(0, 40, 7):
        alone_to = rowwise_product(x_ti[row : row + 1], numbers_oi, scales_o1)
        torch.testing.assert_close(alone_to[0], whole_to[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), None),
        ((8, 9), None),
        ((8, 0), "compute capability 8.0, and multiplying FP8 needs 8.9"),
    ],
)
def test_older_gpus_are_refused(capability: tuple[int, int], reason: str | None) -> None:
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=capability),
        patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
    ):
        said = unsupported_device(torch.device("cuda", 0))
    assert said is None if reason is None else reason in (said or "")
    assert unsupported_device(torch.device("cpu")) is None

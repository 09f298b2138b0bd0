"""Compiled products of few rows against products in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor

from csps.kernels import compiled_code, cpu_product

pytest.importorskip("llvmlite")

from csps.kernels import cpu_product_ir, native_code

DTYPES = [torch.float32, torch.bfloat16]
LANES = native_code.vector_lanes()
BLOCK = cpu_product_ir.BLOCK


@pytest.fixture(autouse=True, scope="module")
def small_matrices() -> Iterator[None]:
    """Let small matrices be computed, too, and leave nothing prepared for other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_product, "LEAST_BYTES", 0)
        patch.setattr(cpu_product, "_prepared", {})
        yield


def operands(rows: int, outputs: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rows + outputs + inner)
    x_ti, weight_oi = (torch.randn(n, inner, generator=generator) for n in (rows, outputs))
    return x_ti.to(dtype), weight_oi.to(dtype)


def check(x_ti: Tensor, weight_oi: Tensor) -> None:
    """Compare with fp64, within the rounding of fp32 sums and of the result."""
    assert cpu_product.prepare(weight_oi.dtype)
    rows = cpu_product.max_rows(x_ti.shape[1], weight_oi.dtype)
    parts = [cpu_product.few_row_product(x, weight_oi) for x in x_ti.split(rows)]
    product_to = torch.cat([part for part in parts if part is not None])
    assert product_to.dtype == x_ti.dtype
    exact_to = x_ti.double() @ weight_oi.double().T
    greatest = x_ti.double().abs() @ weight_oi.double().abs().T
    rounding = torch.finfo(x_ti.dtype).eps / 2 if x_ti.dtype != torch.float32 else 0.0
    bound_to = 1e-6 * greatest + 1.01 * rounding * exact_to.abs()
    assert ((product_to - exact_to).abs() <= bound_to).all()


@settings(max_examples=examples(60))
@given(
    rows=st.integers(1, 32),
    outputs=st.integers(BLOCK, 5 * BLOCK + 3),
    vectors=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_product_in_fp64(
    rows: int, outputs: int, vectors: int, dtype: torch.dtype
) -> None:
    check(*operands(rows, outputs, vectors * LANES, dtype))


@pytest.mark.parametrize("outputs", [2 * BLOCK, 3 * BLOCK + 5, 7 * BLOCK - 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_compute_every_output(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int
) -> None:
    monkeypatch.setattr(compiled_code, "THREAD_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check(*operands(rows, outputs, 4 * LANES, torch.float32))


def test_rows_of_a_longer_matrix_are_read_alone() -> None:
    x_ti, weight_oi = operands(2, 4 * BLOCK, 2 * LANES, torch.float32)
    weight_oi[:BLOCK] = weight_oi[3 * BLOCK :] = torch.nan
    check(x_ti, weight_oi[BLOCK : 3 * BLOCK])


def test_rows_of_a_wider_matrix_are_multiplied() -> None:
    x_ti, weight_oi = operands(3, 2 * BLOCK, 6 * LANES, torch.float32)
    check(x_ti[:, LANES : 3 * LANES], weight_oi[:, : 2 * LANES].contiguous())


def test_the_bias_is_added_before_the_sum_is_rounded() -> None:
    assert cpu_product.prepare(torch.bfloat16)
    x_ti, weight_oi = operands(4, 2 * BLOCK, 4 * LANES, torch.bfloat16)
    bias_o = -100 * torch.ones(2 * BLOCK, dtype=torch.bfloat16)
    product_to = cpu_product.few_row_product(x_ti, weight_oi, bias_o)
    assert product_to is not None
    exact_to = x_ti.double() @ weight_oi.double().T - 100
    assert ((product_to - exact_to).abs() <= exact_to.abs() * 2**-8 * 1.01).all()


def test_outputs_alone_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory around them belongs to others."""
    assert cpu_product.prepare(torch.float32)
    x_ti, weight_oi = operands(5, 3 * BLOCK + 7, 2 * LANES, torch.float32)
    around = torch.full((5 + 2, 3 * BLOCK + 7), 7.0)
    monkeypatch.setattr(torch, "empty", lambda *shape: around[1:-1])
    product_to = cpu_product.few_row_product(x_ti, weight_oi)
    monkeypatch.undo()
    assert product_to is not None
    assert product_to.data_ptr() == around[1].data_ptr()
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    """A sum has one order for any number of rows that are computed here."""
    assert cpu_product.prepare(torch.float32)
    x_ti, weight_oi = operands(8, 3 * BLOCK, 5 * LANES, torch.float32)
    together = cpu_product.few_row_product(x_ti, weight_oi)
    assert together is not None
    for row in range(8):
        alone = cpu_product.few_row_product(x_ti[row : row + 1], weight_oi)
        assert alone is not None
        assert torch.equal(alone[0], together[row])


def test_torch_computes_what_has_no_code() -> None:
    assert cpu_product.prepare(torch.float32)
    x_ti, weight_oi = operands(2, 2 * BLOCK, 2 * LANES, torch.float32)
    assert cpu_product.few_row_product(x_ti, weight_oi) is not None
    many = x_ti.repeat(17, 1)
    for case in (
        (many, weight_oi),
        (x_ti[:0], weight_oi),
        (x_ti, weight_oi[: BLOCK - 1]),
        (x_ti[:, :-1], weight_oi[:, :-1].contiguous()),
        (x_ti[:, LANES:], weight_oi[:, LANES:]),
        (x_ti.double(), weight_oi.double()),
        (x_ti.bfloat16(), weight_oi),
        (x_ti[:, :LANES], weight_oi),
    ):
        assert cpu_product.few_row_product(*case) is None


def test_small_matrices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x_ti, weight_oi = operands(1, 2 * BLOCK, 2 * LANES, torch.float32)
    monkeypatch.setattr(cpu_product, "LEAST_BYTES", weight_oi.nbytes + 1)
    assert cpu_product.few_row_product(x_ti, weight_oi) is None


def test_nan_and_infinity_stay_in_their_rows() -> None:
    x_ti, weight_oi = operands(3, BLOCK + 2, 2 * LANES, torch.float32)
    x_ti[1, 5] = torch.inf
    weight_oi[7] = 0.0
    product_to = cpu_product.few_row_product(x_ti, weight_oi)
    assert product_to is not None
    torch.testing.assert_close(product_to, x_ti @ weight_oi.T, equal_nan=True)

"""Products of a few rows with a matrix on CPUs, in compiled code.

torch reads a matrix of 32,000 x 256 fp32 numbers at 8 GB/s for one row, and at 5 GB/s for four,
where the core reads 23 GB/s. Decoding waits for little else, so here the matrix is read once, at
the speed of memory (one core of an EPYC with AVX-512).

`prepare` has to be called for a dtype first. torch computes all other products.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64, c_void_p
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from csps.kernels import compiled_code

SHORT_INNER = 1024
"""Longest row, in fp32 numbers, of which eight fit in the L1 cache."""
LEAST_BYTES = 2**20
"""Bytes of an fp32 matrix from which this is faster than torch, whose calls take 12 us less. Its
products in bf16 take 40 us, whatever the matrix."""


class _Products(NamedTuple):
    """Compiled code for one dtype of matrices."""

    by_rows: tuple[tuple[int, Callable[..., None]], ...]
    """Functions, each for groups of so many rows, ascending."""
    block: int
    """Least outputs of a call."""
    lanes: int
    """The inner dimension has to be a multiple of it."""


def prepare(dtype: torch.dtype) -> bool:
    """Compile products for matrices of a dtype, or load them from disk.

    Returns:
        False if torch will compute them, for a reason that is logged.
    """
    if dtype not in _prepared and (products := _compiled(dtype)) is not None:
        _prepared[dtype] = products
    return dtype in _prepared


def max_rows(inner: int, dtype: torch.dtype) -> int:
    """Return the rows up to which this is faster than `F.linear`."""
    return 32 if dtype == torch.float32 and inner <= SHORT_INNER else 8


def has_code(weight_oi: Tensor) -> bool:
    """Return whether products of few rows with this matrix are computed here."""
    products = _prepared.get(weight_oi.dtype)
    outputs, inner = weight_oi.shape
    return (
        products is not None
        and outputs >= products.block
        and inner % products.lanes == 0
        and weight_oi.stride() == (inner, 1)
        and weight_oi.device.type == "cpu"
        and (weight_oi.dtype != torch.float32 or weight_oi.nbytes >= LEAST_BYTES)
    )


def few_row_product(x_ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor | None:
    """Compute `F.linear` with fp32 sums, (t, o) in the dtype of `x_ti`.

    Returns:
        None if torch has to compute it: there are more rows than `max_rows`, the matrix is small,
        its dtype is not prepared, or there is no code for its shape.
    """
    rows, (outputs, inner) = len(x_ti), weight_oi.shape
    if (
        not 0 < rows <= max_rows(inner, weight_oi.dtype)
        or not has_code(weight_oi)
        # Whatever does not fit is refused by torch.
        or (x_ti.shape, x_ti.dtype, x_ti.device)
        != ((rows, inner), weight_oi.dtype, weight_oi.device)
    ):
        return None
    products = _prepared[weight_oi.dtype]
    x = x_ti.float().contiguous()
    out_to = torch.empty(rows, outputs)
    function = next((f for most, f in products.by_rows if most >= rows), products.by_rows[-1][1])
    tensors = x.data_ptr(), weight_oi.data_ptr(), out_to.data_ptr(), rows, inner, outputs
    work = weight_oi.nbytes * -(-rows // products.by_rows[-1][0])
    threads = compiled_code.threads_for(work)
    blocks = outputs // products.block
    cuts = [products.block * (blocks * at // threads) for at in range(threads)]
    compiled_code.run(function, [(*tensors, *cut) for cut in pairwise([*cuts, outputs])])
    if bias_o is not None:
        out_to.add_(bias_o)  # before the sum is rounded
    return out_to.to(x_ti.dtype)


_prepared: dict[torch.dtype, _Products] = {}


def _compiled(dtype: torch.dtype) -> _Products | None:
    otherwise = f"torch computes products of few rows in {dtype}"
    if not compiled_code.can_compile(otherwise):
        return None
    # Imported on use: a rank on a GPU needs no llvmlite.
    from csps.kernels import cpu_product_ir, native_code
    from csps.kernels.vector_ir import Element

    element = {torch.float32: Element.FP32, torch.bfloat16: Element.BF16}.get(dtype)
    if element is None:
        return None
    lanes = native_code.vector_lanes()
    arguments = [*[c_void_p] * 3, *[c_int64] * 5]
    name, rows = cpu_product_ir.NAME, cpu_product_ir.ROWS
    sources = [(name, cpu_product_ir.product_ir(element, together, lanes)) for together in rows]
    functions = compiled_code.load_functions(sources, arguments, otherwise)
    if functions is None:
        return None
    return _Products(tuple(zip(rows, functions, strict=True)), cpu_product_ir.BLOCK, lanes)

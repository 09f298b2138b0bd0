"""Products in FP8 (E4M3): a scale for each row of a weight, and one for each token.

A scale maps the largest number of its row to 448, the largest of FP8. GPUs multiply the FP8 values
directly (`torch._scaled_mm`). On CPUs the same product is computed in fp32, which is the reference
for GPUs and saves memory, but no time.

Shape suffixes: r rows, n numbers of a row, t tokens, i inputs, o outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LEAST_CAPABILITY = (8, 9)
"""Minimum compute capability for FP8 products (Ada, Hopper)."""
ALIGNMENT = 16
"""GPUs multiply matrices whose sides are multiples of this."""
BLOCK_NUMBERS = 2**20
"""Weight elements expanded to fp32 at a time on CPUs."""
_MOST = 448.0
_LEAST_SCALE = 2.0**-120
"""Scale of zeros."""


def quantize_rows(x_rn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the FP8 numbers of rows, and the scale of each row in fp32, (r, 1)."""
    largest_r1 = torch.linalg.vector_norm(x_rn, ord=float("inf"), dim=-1, keepdim=True)
    scales_r1 = largest_r1.float().div_(_MOST).clamp_min_(_LEAST_SCALE)
    # Divided in place: CPUs would have two more copies in fp32 of shorter numbers at once.
    return x_rn.to(torch.float32, copy=True).div_(scales_r1).to(FP8), scales_r1


def rowwise_product(x_ti: Tensor, weight_oi: Tensor, scales_o1: Tensor) -> Tensor:
    """Return tokens, quantized, times a weight in FP8, (t, o), in the dtype of the tokens.

    A token's result does not depend on the tokens beside it, other than by the order in which
    products are added.
    """
    multiply = _multiplied if x_ti.is_cuda else _reference
    return multiply(x_ti, weight_oi, scales_o1)


def _multiplied(x_ti: Tensor, weight_oi: Tensor, scales_o1: Tensor) -> Tensor:
    """Return the product of the FP8 numbers as they are."""
    numbers_ti, scales_t1 = quantize_rows(x_ti)
    product_to: Tensor = torch._scaled_mm(
        numbers_ti, weight_oi.T, scale_a=scales_t1, scale_b=scales_o1.T, out_dtype=x_ti.dtype
    )
    return product_to


def _reference(x_ti: Tensor, weight_oi: Tensor, scales_o1: Tensor) -> Tensor:
    """Return the same, multiplied and added in fp32."""
    exact_ti, scales_t1 = _exact(x_ti)
    outputs, inputs = weight_oi.shape
    product_to = x_ti.new_empty(len(x_ti), outputs)
    step = max(1, BLOCK_NUMBERS // inputs)
    for first in range(0, outputs, step):
        block = slice(first, first + step)
        part_to = exact_ti @ weight_oi[block].float().T
        product_to[:, block] = part_to.mul_(scales_t1).mul_(scales_o1[block].T)
    return product_to


def _exact(x_ti: Tensor) -> tuple[Tensor, Tensor]:
    """Return the FP8 numbers of tokens in fp32, which holds them exactly, and the scales."""
    numbers_ti, scales_t1 = quantize_rows(x_ti)
    return numbers_ti.float(), scales_t1


def unsupported_device(device: torch.device) -> str | None:
    """Return why a device cannot multiply FP8; None if it can."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    return unsupported_capability(torch.cuda.get_device_name(device), capability)


def unsupported_capability(name: str, found: tuple[int, int]) -> str | None:
    """Return why GPUs of this name and compute capability cannot multiply FP8; None if they can."""
    if found >= LEAST_CAPABILITY:
        return None
    least, have = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, found))
    return f"{name} has compute capability {have}, and multiplying FP8 needs {least}"

"""Read tensors of weight files as the numbers that they stand for, quantized or not.

| format | tensors of a weight `w` | numbers |
|---|---|---|
| floats | `w` | as stored |
| FP8 | `w`, `w_scale_inv` or `w_scale` | each times the scale of its tensor, row or block |
| packed integers | `w_packed`, `w_scale` | 4 or 8 bits, lowest first, times the group's scale |
| MXFP4 | `w_blocks`, `w_scales` | 32 numbers of 4 bits times a power of two |

Every product is computed and rounded as transformers does, so that the weights are the same bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    MissingTensorError,
    UnsupportedModelError,
)

FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = ("F8_E4M3",)
_BITS = {"BF16": 16, **{f"{kind}{bits}": bits for kind in "FIU" for bits in (8, 16, 32, 64)}}
"""Bits of a number by the first part of its type's name."""
FORMATS = {
    "fp8": "FP8, a scale for each tensor, row or block (`weight_scale_inv`)",
    "mxfp4": "MXFP4 (`_blocks` and `_scales`), in which gpt-oss is published",
    "compressed-tensors": "compressed-tensors with FP8 (`float-quantized`) or symmetric integers "
    "of 4 or 8 bits (`pack-quantized`)",
}
"""What is read, by the method that config.json names."""
_COMPRESSED = ("float-quantized", "naive-quantized", "pack-quantized")
_GROUP = 32
"""Numbers that share a scale in MXFP4."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How config.json says that weights are quantized."""

    method: str
    scale_blocks: tuple[int, int] | None = None
    """Rows and columns of FP8 numbers with a scale of their own; None leaves tensors and rows."""


def read_quantization(config: CheckpointJson) -> Quantization | None:
    """Return how a checkpoint's weights are quantized; None if they are not.

    Raises:
        UnsupportedModelError: in a way that is not in `FORMATS`.
    """
    wrapped = config.object("text_config")
    found = (wrapped if wrapped.has("quantization_config") else config).object(
        "quantization_config"
    )
    if not found.values:
        return None
    method = found.text("quant_method", "")
    if method not in FORMATS:
        raise _unsupported(config, f"weights quantized by {method or 'an unnamed method'}")
    if method == "compressed-tensors":
        return _read_compressed(config, found)
    if found.text("expert_dtype", "fp8") != "fp8":
        raise _unsupported(config, f"experts in {found.text('expert_dtype')}")
    return Quantization(method=method, scale_blocks=_scale_blocks(found, "weight_block_size"))


def _read_compressed(config: CheckpointJson, found: CheckpointJson) -> Quantization:
    groups = found.object("config_groups")
    blocks = set()
    for name in groups.values:
        group = groups.object(name)
        weights = group.object("weights")
        layout = group.text("format", found.text("format", ""))
        if layout not in _COMPRESSED:
            raise _unsupported(config, f"compressed-tensors of format {layout!r}")
        if not weights.flag("symmetric", True):
            raise _unsupported(config, "compressed-tensors with zero points")
        if layout == "pack-quantized" and weights.integer("num_bits") not in (4, 8):
            raise _unsupported(config, f"packed integers of {weights.integer('num_bits')} bits")
        if weights.text("type", "int") == "float":
            blocks.add(_scale_blocks(weights, "block_structure"))
    if len(blocks) > 1:
        raise _unsupported(config, "FP8 with blocks of several sizes")
    return Quantization(method="compressed-tensors", scale_blocks=blocks.pop() if blocks else None)


def _scale_blocks(found: CheckpointJson, key: str) -> tuple[int, int] | None:
    sizes = found.integers(key)
    if not sizes:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise CheckpointError(f"{found.path}: {key} must be rows and columns, not {list(sizes)}")
    return sizes[0], sizes[1]


def _unsupported(config: CheckpointJson, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.path}: {what} cannot be read; supported: {'; '.join(FORMATS.values())}"
    )


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A vector, matrix or stack of matrices in whichever format."""

    parts: tuple[str, ...]
    """Tensors of the weight files that it consists of."""
    format: str
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...], int | None], Tensor]
    """Function that returns the numbers at slices of rows and columns, of one matrix of a stack."""
    read_fp8: Callable[[tuple[slice, ...]], tuple[Tensor, Tensor]] | None = None
    """Function that returns FP8 numbers as stored, and the scale of each row; None where rows have
    no scale of their own, or numbers are not FP8."""


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The open weight files of a checkpoint."""

    folder: Path
    files: Mapping[str, Any]
    """Tensor name to the open file that holds it."""
    quantization: Quantization | None

    def has(self, name: str) -> bool:
        """Return whether there is such a weight, quantized or not."""
        return any(f"{name}{ending}" in self.files for ending in ("", "_packed", "_blocks"))

    def find(self, name: str) -> StoredTensor:
        """Return a weight by the name that it has where it is not quantized.

        Raises:
            MissingTensorError: there is no such tensor, or a part of it is missing.
            CheckpointError: its parts do not fit together.
            UnsupportedModelError: its format cannot be read.
        """
        if f"{name}_packed" in self.files:
            return self._packed(name)
        if f"{name}_blocks" in self.files:
            return self._mxfp4(name)
        stored = self.open(name)
        kind = stored.get_dtype()
        if kind in FP8 and self.quantization is not None:
            return self._fp8(name, stored)
        if kind not in FLOATS:
            raise UnsupportedModelError(
                f"{self.folder}: {name} is stored as {kind}; supported: {', '.join(FLOATS)}, "
                "and what quantization_config in config.json describes"
            )

        def read(at: tuple[slice, ...], index: int | None) -> Tensor:
            part: Tensor = stored[at if index is None else (index, *at)]
            return part

        return StoredTensor(parts=(name,), format=kind, shape=tuple(stored.get_shape()), read=read)

    def open(self, name: str) -> Any:
        """Return a stored tensor, to be sliced.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        if name not in self.files:
            raise MissingTensorError(f"{self.folder}: the weight files have no tensor {name}")
        return self.files[name].get_slice(name)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a stored tensor."""
        stored = self.open(name)
        bits = _BITS[stored.get_dtype().partition("_")[0]]
        return math.prod(map(int, stored.get_shape())) * bits // 8

    # --- formats -----------------------------------------------------------------------------

    def _fp8(self, name: str, stored: Any) -> StoredTensor:
        assert self.quantization is not None, "FP8 without a configuration"
        compressed = self.quantization.method == "compressed-tensors"
        scale_name = f"{name}_scale" if compressed else f"{name}_scale_inv"
        shape = tuple(stored.get_shape())
        scales = self._scales(scale_name, shape)
        # compressed-tensors multiplies in the type of the scales. transformers does not ask it
        # about experts, and multiplies in fp32 as with its own method.
        in_fp32 = not compressed or ".experts." in name

        def read(at: tuple[slice, ...], _: int | None) -> Tensor:
            scale = scales.at(at)
            scale = scale.float() if in_fp32 else scale
            numbers: Tensor = stored[at].to(scale.dtype)
            return numbers.mul_(scale)

        def read_fp8(at: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
            numbers: Tensor = stored[at]
            return numbers, scales.at(at).float().expand(len(numbers), 1)

        return StoredTensor(
            parts=(name, scale_name),
            format="FP8",
            shape=shape,
            read=read,
            read_fp8=read_fp8 if scales.columns >= shape[1] else None,
        )

    def _packed(self, name: str) -> StoredTensor:
        packed_name, scale_name = f"{name}_packed", f"{name}_scale"
        if f"{name}_g_idx" in self.files:
            raise UnsupportedModelError(f"{self.folder}: {name} has columns in another order")
        packed, shape_name = self.open(packed_name), f"{name}_shape"
        rows, columns = self._integers(shape_name)
        found = tuple(packed.get_shape())
        fitting = [bits for bits in (4, 8) if found == (rows, -(-columns * bits // 32))]
        if not fitting:
            raise CheckpointError(
                f"{self.folder}: {packed_name} has shape {found}, which holds no "
                f"{(rows, columns)} integers of 4 or 8 bits"
            )
        bits = fitting[0]
        scales, per_word = self._scales(scale_name, (rows, columns), grouped=True), 32 // bits

        def read(at: tuple[slice, ...], _: int | None) -> Tensor:
            of_rows, of_columns = at
            first, last = of_columns.start // per_word, -(-of_columns.stop // per_word)
            numbers = _unpacked(packed[of_rows, first:last], bits)
            begin, scale = first * per_word, scales.at(at)
            inside = numbers[:, of_columns.start - begin : of_columns.stop - begin]
            product: Tensor = inside.to(scale.dtype).mul_(scale)
            return product

        return StoredTensor(
            parts=(packed_name, scale_name, shape_name),
            format=f"INT{bits}",
            shape=(rows, columns),
            read=read,
        )

    def _mxfp4(self, name: str) -> StoredTensor:
        parts = blocks_name, scales_name = f"{name}_blocks", f"{name}_scales"
        blocks, scales = self.open(blocks_name), self.open(scales_name)
        *outer, count, size = blocks.get_shape()
        if scales.get_shape() != [*outer, count] or size * 2 != _GROUP:
            raise CheckpointError(
                f"{self.folder}: {blocks_name} of shape {blocks.get_shape()} does not fit "
                f"{scales_name} of shape {scales.get_shape()}"
            )

        def read(at: tuple[slice, ...], index: int | None) -> Tensor:
            of_rows, of_columns = at
            first, last = of_columns.start // _GROUP, -(-of_columns.stop // _GROUP)
            groups = slice(first, last)
            where = (of_rows, groups) if index is None else (index, of_rows, groups)
            bytes_rgb = blocks[where]
            numbers_rgn = _FP4[torch.stack((bytes_rgb & 0xF, bytes_rgb >> 4), dim=-1).long()]
            exponents_rg = scales[where].int() - 127
            numbers = torch.ldexp(numbers_rgn.flatten(2), exponents_rg[..., None]).flatten(1)
            begin = first * _GROUP
            return numbers[:, of_columns.start - begin : of_columns.stop - begin]

        return StoredTensor(parts=parts, format="MXFP4", shape=(*outer, count * _GROUP), read=read)

    # --- scales ------------------------------------------------------------------------------

    def _scales(self, name: str, shape: tuple[int, ...], *, grouped: bool = False) -> _Scales:
        """Return the scales of a matrix; `grouped` ones belong to equal runs of a row."""
        stored = self.open(name)
        found = tuple(stored.get_shape())
        rows, columns = shape
        if found in ((), (1,), (1, 1)):
            return _Scales(self.files[name].get_tensor(name).view(1, 1), rows, columns)
        if found in ((rows,), (rows, 1)):
            return _Scales(self.files[name].get_tensor(name).view(rows, 1), 1, columns)
        blocks = self.quantization.scale_blocks if self.quantization else None
        if grouped and len(found) == 2 and columns % found[1] == 0:
            blocks = 1, columns // found[1]
        if blocks is None or found != (-(-rows // blocks[0]), -(-columns // blocks[1])):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {found}, which fits no weight of shape {shape}"
                + (f" in blocks of {blocks}" if blocks else "")
            )
        return _Scales(stored, *blocks)

    def _integers(self, name: str) -> tuple[int, int]:
        """Return two numbers that a tensor of the files holds."""
        self.open(name)
        first, second = self.files[name].get_tensor(name).tolist()
        return int(first), int(second)


@dataclass(frozen=True)
class _Scales:
    """Factors of a matrix, one for each block of rows and columns."""

    stored: Any
    """Matrix of factors, to be sliced."""
    rows: int
    columns: int

    def at(self, at: tuple[slice, ...]) -> Tensor:
        """Return the factors of some rows and columns, or of one column for all."""
        of_rows, of_columns = at
        top, left = of_rows.start // self.rows, of_columns.start // self.columns
        bottom, right = -(-of_rows.stop // self.rows), -(-of_columns.stop // self.columns)
        scales: Tensor = self.stored[top:bottom, left:right]
        if scales.dtype == torch.uint8:  # the exponents of powers of two, as bytes
            scales = (scales.float() - 127.0).exp2()
        elif scales.dtype.itemsize == 1:
            scales = scales.float()
        if bottom - top > 1:
            scales = scales.repeat_interleave(self.rows, 0)
            scales = scales[of_rows.start - top * self.rows :][: of_rows.stop - of_rows.start]
        if right - left > 1:
            scales = scales.repeat_interleave(self.columns, 1)
            begin = left * self.columns
            scales = scales[:, of_columns.start - begin : of_columns.stop - begin]
        return scales


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_FP4, -_FP4))
"""Numbers of four bits: a sign, two bits of exponent and one of fraction."""


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers in 32-bit words, the lowest bits first."""
    bytes_rb = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_rb.short() - 128
    halves_rb2 = torch.stack((bytes_rb & 0xF, bytes_rb >> 4), dim=-1)
    return halves_rb2.flatten(1).short() - 8

"""Read parts of weights, checksums and a digest from a checkpoint's safetensors files.

Pickled checkpoints (`*.bin`, `*.pt`) are not read: unpickling runs whatever the file says.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from csps.kernels.rowwise_fp8 import FP8, quantize_rows
from csps.models.checkpoints.stored_tensor import (
    FLOATS,
    StoredTensor,
    WeightFiles,
    read_quantization,
)
from csps.models.network.checkpoint_json import CheckpointError, read_json
from csps.models.network.parameters import Place, TensorBlock


def tensor_checksum(tensor: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of a tensor in host memory, row by row. Other threads run meanwhile.

    Args:
        start: the CRC-32 of the bytes before the tensor, to continue from.
    """
    # CRC-32 guards against accidents, not attackers: one change in four billion passes. The fastest
    # cryptographic hash of the standard library (BLAKE2b) takes twice as long over gigabytes.
    bytes_n = tensor.contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(bytes_n.numpy().data, start)


SAMPLES = 16
SAMPLE_BYTES = 65_536


def config_bytes(model_dir: Path, overrides: Mapping[str, Any] | None) -> bytes:
    """Return what identifies a configuration: config.json, and the values that replace its own.

    Raises:
        OSError: the file cannot be read.
    """
    added = json.dumps(overrides, sort_keys=True).encode() if overrides else b""
    return (model_dir / "config.json").read_bytes() + added


def weights_digest(model_dir: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """Return the digest of a checkpoint's configuration and weights, hexadecimal.

    Of each weight file it covers the name, the size, and 64 KiB at 16 places from the header, which
    names all tensors, to the end.

    Args:
        model_dir: a directory with `config.json` and `*.safetensors`.
        overrides: values that replace those of config.json.

    Raises:
        OSError: a file cannot be read.
    """
    # Training changes every tensor, so samples differ between two checkpoints of one architecture.
    # Reading all of a hundred gigabytes would delay every start by minutes.
    digest = hashlib.sha256(config_bytes(model_dir, overrides))
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


READ_ELEMENTS = 2**20
"""Numbers of a tensor that are read at a time: dequantizing takes a few times their memory."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An open model directory."""

    model_dir: Path
    overrides: Mapping[str, Any]
    """Values that replace those of config.json."""
    weights: WeightFiles

    def read(self, place: Place, into: Tensor) -> None:
        """Read the blocks of a place, stacked by rows, and no other numbers.

        Args:
            into: the tensor to be filled, as `empty` returns it.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
            CheckpointError: the tensor has another shape than the configuration asks for.
        """
        for stored, block, at, rows in self._parts(place, into[0].numel()):
            into[rows].copy_(_read(stored, block, at))

    def read_fp8(self, place: Place, into: Tensor, scales: Tensor) -> None:
        """Read the blocks of a place as FP8 numbers and their rows' scales.

        Files that have such numbers and scales are read as they are. Others are quantized.

        Args:
            into, scales: the tensors to be filled, as `empty` returns them.

        Raises:
            MissingTensorError, CheckpointError: as `read`.
        """
        for stored, block, at, rows in self._parts(place, into[0].numel()):
            if stored.read_fp8 is not None:
                numbers_rn, scales_r1 = stored.read_fp8(at)
            else:
                numbers_rn, scales_r1 = quantize_rows(_read(stored, block, at).float())
            into[rows].copy_(numbers_rn)
            scales[rows].copy_(scales_r1)

    def _parts(
        self, place: Place, width: int
    ) -> Iterator[tuple[StoredTensor, TensorBlock, tuple[slice, ...], slice]]:
        """Yield parts of a place's blocks: where they are stored, and their rows in the place.

        Args:
            width: the numbers of a row.
        """
        start, step = 0, max(1, READ_ELEMENTS // max(1, width))
        for block in place:
            stored, columns = self.stored(block), block.columns
            across = () if columns is None else (slice(columns.start, columns.stop),)
            for first in range(block.rows.start, block.rows.stop, step):
                last = min(first + step, block.rows.stop)
                rows = slice(start, start + last - first)
                yield stored, block, (slice(first, last), *across), rows
                start = rows.stop

    def count(self, place: Place) -> int:
        """Count the elements of a place by the files' headers; raise what `read` would raise."""
        for block in place:
            self.stored(block)
        return sum(len(block.rows) for block in place) * math.prod(_width(place))

    def checksum(self, tensor: str) -> int:
        """Return 63 bits that stand for a stored tensor: name, type, shape and every byte.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
        """
        self.weights.open(tensor)
        stored: Tensor = self.weights.files[tensor].get_tensor(tensor)
        identity = (tensor, str(stored.dtype), tuple(stored.shape), tensor_checksum(stored))
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def stored(self, block: TensorBlock) -> StoredTensor:
        """Return the tensor that a block is of.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
            CheckpointError: the tensor has another shape than the configuration asks for.
        """
        stored = self.weights.find(block.tensor)
        shape = block.shape
        if _is_transposed(stored, block):
            shape = (*shape[:-2], shape[-1], shape[-2])
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.model_dir}: {block.tensor} has shape {stored.shape}, "
                f"but config.json asks for {shape}"
            )
        return stored


def _is_transposed(stored: StoredTensor, block: TensorBlock) -> bool:
    return block.transposed and stored.format in FLOATS


def _read(stored: StoredTensor, block: TensorBlock, at: tuple[slice, ...]) -> Tensor:
    """Return some rows and columns of a block."""
    if _is_transposed(stored, block):
        return stored.read(at[::-1], block.index).T
    return stored.read(at, block.index)


def empty(place: Place, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor for the blocks of a place, not yet read."""
    rows = sum(len(block.rows) for block in place)
    return torch.empty((rows, *_width(place)), dtype=memory_dtype(place, dtype), device=device)


def _width(place: Place) -> tuple[int, ...]:
    """Return the size of a parameter's rows; none if it is a vector."""
    first = place[0]
    if first.kept == "scales":
        return (1,)
    return () if first.columns is None else (len(first.columns),)


def memory_dtype(place: Place, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a parameter in memory, where others have `dtype`."""
    kept = {"fp8": FP8, "scales": torch.float32}
    if place[0].kept != "floats":
        return kept[place[0].kept]
    precise = {4: torch.float32, 8: torch.float64}
    least = place[0].least_bytes
    return dtype if dtype.itemsize >= least else precise[least]


@contextmanager
def open_checkpoint(
    model_dir: Path, overrides: Mapping[str, Any] | None = None
) -> Iterator[Checkpoint]:
    """Open the weights of a model directory, one file or many.

    Args:
        overrides: values that replace those of config.json (`OVERRIDABLE`).

    Raises:
        CheckpointError: there are none, a file is damaged, or weights are quantized in a way that
            cannot be read.
    """
    quantization = read_quantization(read_json(model_dir / "config.json"))
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_files(model_dir):
            opened = stack.enter_context(_open(path))
            files.update(dict.fromkeys(opened.keys(), opened))
        weights = WeightFiles(folder=model_dir, files=files, quantization=quantization)
        yield Checkpoint(model_dir=model_dir, overrides=overrides or {}, weights=weights)


def _weight_files(model_dir: Path) -> list[Path]:
    single = model_dir / "model.safetensors"
    index = model_dir / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(
            f"{model_dir}: has neither {single.name} nor {index.name}"
            " (pickled weights are not read)"
        )
    weight_map = read_json(index).object("weight_map")
    names = sorted({weight_map.text(tensor) for tensor in weight_map.values})
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: names a file outside its own folder")
    return [model_dir / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error

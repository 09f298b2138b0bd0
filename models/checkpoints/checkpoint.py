"""Read parts of tensors, checksums and a digest from a checkpoint's safetensors files.

Pickled checkpoints (`*.bin`, `*.pt`) are not read: unpickling runs whatever the file says.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from csps.models.network.checkpoint_json import (
    CheckpointError,
    MissingTensorError,
    UnsupportedModelError,
    read_json,
)
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


_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The open weight files of a model directory."""

    model_dir: Path
    overrides: Mapping[str, Any]
    """Values that replace those of config.json."""
    files: Mapping[str, Any]
    """Tensor name to the open file that holds it."""

    def read(self, place: Place, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Read the blocks of a place, stacked by rows, and no other bytes.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
            CheckpointError: the tensor has another shape than the configuration asks for.
        """
        width = () if place[0].columns is None else (len(place[0].columns),)
        stacked = torch.empty(
            (sum(len(block.rows) for block in place), *width),
            dtype=torch.float32 if place[0].full_precision else dtype,
            device=device,
        )
        start = 0
        for block in place:
            stop = start + len(block.rows)
            stacked[start:stop].copy_(self._read_block(block))
            start = stop
        return stacked

    def count(self, place: Place) -> int:
        """Count the elements of a place by the files' headers; raise what `read` would raise."""
        for block in place:
            self._slice(block)
        return sum(
            len(block.rows) * (1 if block.columns is None else len(block.columns))
            for block in place
        )

    def checksum(self, tensor: str) -> int:
        """Return 63 bits that stand for a stored tensor: name, type, shape and every byte.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
        """
        stored: Tensor = self._file(tensor).get_tensor(tensor)
        identity = (tensor, str(stored.dtype), tuple(stored.shape), tensor_checksum(stored))
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def _read_block(self, block: TensorBlock) -> Tensor:
        stored = self._slice(block)
        rows = slice(block.rows.start, block.rows.stop)
        if block.columns is None:
            values: Tensor = stored[rows]
        else:
            values = stored[rows, block.columns.start : block.columns.stop]
        return values

    def _slice(self, block: TensorBlock) -> Any:
        stored = self._file(block.tensor).get_slice(block.tensor)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != block.shape:
            raise CheckpointError(
                f"{self.model_dir}: {block.tensor} has shape {shape}, "
                f"but config.json asks for {block.shape}"
            )
        if dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{self.model_dir}: {block.tensor} is stored as {dtype}; "
                f"supported: {', '.join(_FLOATS)}"
            )
        return stored

    def _file(self, tensor: str) -> Any:
        if tensor not in self.files:
            raise MissingTensorError(f"{self.model_dir}: the weight files have no tensor {tensor}")
        return self.files[tensor]


@contextmanager
def open_checkpoint(
    model_dir: Path, overrides: Mapping[str, Any] | None = None
) -> Iterator[Checkpoint]:
    """Open the weights of a model directory, one file or many.

    Args:
        overrides: values that replace those of config.json (`OVERRIDABLE`).

    Raises:
        CheckpointError: there are none, or a file is damaged.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_files(model_dir):
            opened = stack.enter_context(_open(path))
            files.update(dict.fromkeys(opened.keys(), opened))
        yield Checkpoint(model_dir=model_dir, overrides=overrides or {}, files=files)


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

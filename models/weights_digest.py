"""Which weights these are, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES = 16
SAMPLE_BYTES = 65_536


def weights_digest(model_dir: Path) -> str:
    """Digest of a checkpoint's configuration and weights, hexadecimal.

    Of each weight file it takes name, size, and 64 KiB at 16 places from its header, which names
    all tensors, to its end. Training changes every tensor, so two checkpoints of one architecture
    differ there; reading a hundred gigabytes to be sure would delay every start by minutes.

    Args:
        model_dir: a directory with `config.json` and `*.safetensors`.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()

"""The models that benchmarks know by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import wide_checkpoint

from csps.services.settings.settings import shipped_models


@contextmanager
def checkpoint(name: str, *, layers: int = wide_checkpoint.LAYERS) -> Iterator[Path]:
    """Yield "needle", the included model, or a random one that is removed afterwards: "wide", or
    "qwen3", which has the shape of Qwen3-0.6B."""
    if name == "needle":
        yield shipped_models() / name
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / name
        if name == "qwen3":
            yield wide_checkpoint.make_qwen3(place)
        else:
            yield wide_checkpoint.make(place, layers=layers)

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
    """Yield "needle", the included model, or "wide", a random one that is removed afterwards."""
    if name == "needle":
        yield shipped_models() / name
        return
    with tempfile.TemporaryDirectory() as folder:
        yield wide_checkpoint.make(Path(folder) / name, layers=layers)

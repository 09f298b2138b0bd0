"""Loading takes little memory beside the weights; `benchmarks/load_memory.py` has full sizes."""

from __future__ import annotations

from pathlib import Path

import load_memory
import pytest

MIB = 2**20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "experts"])
def test_loading_takes_little_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(load_memory, "VOCAB", 1024)
    monkeypatch.setattr(load_memory, "SHARD_BYTES", 64 * MIB)
    size = load_memory.write(tmp_path, kind, 300 * MIB)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    row = load_memory.measured_apart(tmp_path, "bfloat16")
    assert row["resident_gib"] > size / 2**30 * (1.5 if kind == "fp8" else 0.99)
    assert 1 <= row["ratio"] <= 1.15

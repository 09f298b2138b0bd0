"""A model so small that its KV can be looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kv_ends import HEAD_DIM, LAYERS

from csps.models.network.spec import ModelSpec, read_spec


@pytest.fixture(scope="session")
def spec(tiny_llama: Path) -> ModelSpec:
    return replace(read_spec(tiny_llama), layers=LAYERS, head_dim=HEAD_DIM)

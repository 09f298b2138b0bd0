"""Fixtures that tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with one token a byte and a chat template."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")

"""Fixtures that tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from property_examples import ALL
from tiny_checkpoints import make_checkpoint

# Nothing is timed here: a machine that is busy with something else is no failure, and a hang has
# pytest's own limit.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("slow", UNTIMED, max_examples=ALL)
settings.register_profile("quick", UNTIMED, max_examples=20)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with one token a byte and a chat template."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")

"""The testbed is a benchmark's tool: it lies in `benchmarks/`, beside the scripts that use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from testbed import claim, iproute
from testbed.link import Link
from testbed.network import Testbed, two_servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `testbed`, with the reason, if no bed can be made."""
    try:
        iproute.require()
    except iproute.UnavailableError as exc:
        for item in items:
            if "testbed" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=str(exc)))


@pytest.fixture(autouse=True)
def _own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate the beds of these tests from those of a running benchmark."""
    monkeypatch.setattr(claim, "CLAIMS", tmp_path / "claims")


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    """Yield one bed of 800 Mbit/s for a file's tests."""
    with two_servers(Link.parse("800mbit")) as made:
        yield made

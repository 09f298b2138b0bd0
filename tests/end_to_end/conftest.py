"""Where a user types commands. The server that tests of one file leave there is found by the next,
so that Ray starts once for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed_server import stop_left
from free_ports import free_port


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Whose server the last file stops that uses it."""
    path = tmp_path_factory.mktemp("folder")
    yield path
    stop_left(path)


@pytest.fixture(scope="session")
def port() -> int:
    """Of that server."""
    return free_port()

"""A user's folder and server. The tests of one file reuse the server of the file before, so that
Ray starts only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed_server import stop_left
from free_ports import free_port


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder whose server the last file stops."""
    path = tmp_path_factory.mktemp("folder")
    yield path
    stop_left(path)


@pytest.fixture(scope="session")
def port() -> int:
    """Return the port of the shared server."""
    return free_port()

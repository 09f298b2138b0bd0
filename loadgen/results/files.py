"""Results in files."""

from __future__ import annotations

import json
from pathlib import Path

from csps.loadgen.results.result import SCHEMA, SCHEMA_VERSION, Result
from csps.protocols.errors import ConfigError


def write_result(result: Result, path: Path) -> None:
    """As one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, allow_nan=False) + "\n")


def read_result(path: Path) -> Result:
    """What `write_result` wrote.

    Raises:
        ConfigError: it is no result, or of a later release.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f'{path} is no result of csps: it has no "schema": "{SCHEMA}"')
    version = data.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        reads = f"this release reads up to {SCHEMA_VERSION}"
        raise ConfigError(f"{path} has schema version {version}; {reads}")
    return data

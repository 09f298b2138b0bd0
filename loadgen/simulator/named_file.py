"""Files that come with csps and have a name, or a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from csps.protocols.errors import ConfigError, nearest


def read_named(name_or_path: str, folder: Path) -> tuple[Path, Any]:
    """A YAML file of a folder, by its name without an ending, or any other: where it is, and what
    it says.

    Raises:
        ConfigError: there is none, or it is no YAML; the message names it.
    """
    named = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    path = named.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ConfigError(f"no cluster '{name_or_path}'{nearest(name_or_path, named)}; or a file")
    try:
        return path, yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None

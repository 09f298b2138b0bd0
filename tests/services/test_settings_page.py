"""Test that docs/settings.md has every setting with its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from csps.services.settings.settings import ElasticSettings, KvFilesSettings, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
ROW = re.compile(r"^\| `([\w.]+)` \| ([^|]*) \|", re.MULTILINE)


def defaults(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its path."""
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from defaults(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:.12g}"


def test_the_page_has_every_setting_and_its_default() -> None:
    settings = dict(defaults(Settings()))
    # Sections that are not there unless they are given; their settings have rows.
    sections = {
        "elastic": ElasticSettings(),
        "kv_reuse.files": KvFilesSettings(path="/"),
    }
    for name, section in sections.items():
        assert settings.pop(name) is None
        settings |= dict(defaults(section, f"{name}."))
    settings["kv_reuse.files.path"] = None  # required: has no default
    assert dict(ROW.findall(PAGE.read_text())) == {
        name: shown(value) for name, value in settings.items()
    }

"""The part of values.schema.json that follows from the settings: what `extraSettings` may hold.

`python tests/frozen_surface/record.py` writes it, as it writes the schema of `config.yaml`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from csps.services.settings.config_schema import config_schema

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "helm" / "csps" / "values.schema.json"


def definitions() -> dict[str, Any]:
    """Return the settings' sections. Draft 7, which Helm reads, has them at another place."""
    sections = json.dumps(config_schema()["$defs"])
    moved: dict[str, Any] = json.loads(sections.replace("#/$defs/", "#/definitions/"))
    return moved


def write() -> None:
    """Write them into the chart's schema."""
    schema = json.loads(SCHEMA_FILE.read_text())
    schema["definitions"] = definitions()
    SCHEMA_FILE.write_text(json.dumps(schema, indent=2) + "\n")

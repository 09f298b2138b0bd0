"""Describe `config.yaml` as a JSON schema, with which editors complete and check it.

`config.schema.json` beside this file is the result, and a test holds the two equal. The part of the
file that Ray Serve reads is open: its own schema belongs to Ray's release.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from csps.services.settings import settings as module
from csps.services.settings.settings import Settings, SettingsSection

SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
IMPORT_PATH = "csps.services.app:build"


def write_schema() -> None:
    """Write the file."""
    SCHEMA_FILE.write_text(json.dumps(config_schema(), indent=1) + "\n")


def config_schema() -> dict[str, Any]:
    """Return the schema of `config.yaml`."""
    settings = Settings.model_json_schema(ref_template="#/$defs/{model}")
    sections = settings.pop("$defs")
    for name, section in sections.items():
        _describe(section, getattr(module, name))
    _describe(settings, Settings)
    http = {
        "host": {"type": "string", "default": "127.0.0.1"},
        "port": {"type": "integer", "minimum": 1, "maximum": 65535, "default": 8000},
    }
    application = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "route_prefix": {"type": "string"},
            "import_path": {"const": IMPORT_PATH},
            "args": {"$ref": "#/$defs/Settings"},
        },
        "required": ["import_path"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "csps config.yaml",
        "type": "object",
        "properties": {
            "proxy_location": {"enum": ["Disabled", "HeadOnly", "EveryNode"]},
            "http_options": {"type": "object", "properties": http},
            "logging_config": {"type": "object"},
            "applications": {"type": "array", "items": application, "minItems": 1},
        },
        "required": ["applications"],
        "$defs": {"Settings": settings, **sections},
    }


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Give each setting the text that stands below it in the code: pydantic sees no such text."""
    assert issubclass(model, SettingsSection)
    schema.pop("title", None)
    schema["description"] = " ".join((model.__doc__ or "").split())
    texts = attribute_docs(model)
    for name, setting in schema["properties"].items():
        setting.pop("title", None)
        if name in texts:
            setting["description"] = texts[name]


def attribute_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the texts below the attributes of a class and of its bases."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        (body,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(body, ast.ClassDef)
        for above, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[above.target.id] = " ".join(str(text.value.value).split())
    return texts

"""The JSON schema of `config.yaml` says of a file what the server says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from csps.protocols.core.errors import ConfigError
from csps.services.settings.config_schema import SCHEMA_FILE, config_schema
from csps.services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads(SCHEMA_FILE.read_text())


def test_the_file_is_what_the_settings_give() -> None:
    """`tests/frozen_surface/record.py` writes it."""
    assert config_schema() == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_setting_has_a_type_or_a_text() -> None:
    for section in SCHEMA["$defs"].values():
        for name, setting in section["properties"].items():
            assert {"type", "$ref", "anyOf", "enum"} & set(setting), name


def test_the_configuration_that_ships_is_valid() -> None:
    jsonschema.validate(yaml.safe_load((ROOT / "config.yaml").read_text()), SCHEMA)


@pytest.mark.parametrize(
    ("args", "valid"),
    [
        ({}, True),
        ({"prefill": {"kv_slots": "auto"}}, True),
        ({"prefill": {"kv_slots": "all"}}, False),
        ({"prefill": {"instances": 0}}, False),
        ({"prefil": {}}, False),
        ({"dtype": "float8"}, False),
        ({"gpu_memory_utilization": 1.1}, False),
        ({"scheduling": {"policy": "csps", "overtaking_s": 5}}, True),
        ({"auth": {"overrides": {"alice": {"tokens_per_minute": 5}}}}, True),
        ({"auth": {"overrides": {"alice": {"token_per_minute": 5}}}}, False),
    ],
)
def test_schema_and_server_agree(args: dict[str, Any], valid: bool) -> None:
    application = {"import_path": "csps.services.app:build", "args": args}
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid({"applications": [application]}) == valid
    if valid:
        Settings.model_validate(args)
    else:
        with pytest.raises(ConfigError):
            Settings.model_validate(args)

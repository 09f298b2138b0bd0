"""`csps init` writes every setting, each with its default, and `csps collect-env` no secret."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from csps.cli import main
from csps.services.launch.collect_env import variables
from csps.services.launch.init_command import commented_config
from csps.services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
INDENT = " " * 6
SETTING = re.compile(r"# (\w+):")


def args(text: str) -> dict[str, Any]:
    (application,) = yaml.safe_load(text)["applications"]
    return dict(application["args"])


def blocks(lines: list[str]) -> Iterator[list[int]]:
    """Yield the lines of each commented setting or section of the first level."""
    at = [
        number
        for number, line in enumerate(lines)
        if line.startswith(f"{INDENT}# ") and SETTING.match(line.strip())
    ]
    for first in at:
        below = [first]
        while lines[below[-1] + 1 :] and lines[below[-1] + 1].startswith(f"{INDENT}#   "):
            below.append(below[-1] + 1)
        yield below


def test_the_file_is_the_configuration_that_ships() -> None:
    written = yaml.safe_load(commented_config("needle"))
    assert written == yaml.safe_load((ROOT / "config.yaml").read_text())


def test_every_setting_is_there_and_may_be_uncommented() -> None:
    lines = commented_config("needle").splitlines()
    seen = set()
    for block in blocks(lines):
        uncommented = [
            line.replace("# ", "", 1) if number in block else line
            for number, line in enumerate(lines)
        ]
        given = args("\n".join(uncommented))
        (name,) = given.keys() - {"model", "prefill", "decode"}
        seen.add(name)
        if name == "elastic":
            assert {*given["elastic"]} == {*type(Settings().prefill).model_fields, *(
                type(Settings().decode).model_fields
            )} - {"prefill_tokens_max", "window_slots"}  # fmt: skip
            continue
        expected = Settings().model_dump(mode="json")[name]
        got = Settings.model_validate(given).model_dump(mode="json")[name]
        assert got == expected, name
    assert seen == set(Settings.model_fields) - {"model", "prefill", "decode"}


def test_settings_of_the_gangs_may_be_uncommented() -> None:
    text = commented_config("needle")
    for role in ("prefill", "decode"):
        fields = type(getattr(Settings(), role)).model_fields
        for name in fields:
            found = re.findall(rf"^        (?:# )?{name}: .*$", text, re.MULTILINE)
            assert found, (role, name)
    opened = re.sub(r"^(        )# (\w+: )", r"\1\2", text, flags=re.MULTILINE)
    assert Settings.model_validate(args(opened)) == Settings.model_validate(args(text))


def test_no_file_is_replaced_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--model", "/models/mine"]) == 0
    first = (tmp_path / "config.yaml").read_text()
    assert args(first)["model"] == "/models/mine"
    assert main(["init"]) == 1
    assert "config.yaml exists; --force replaces it" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == first
    assert main(["init", "--force"]) == 0
    assert args((tmp_path / "config.yaml").read_text())["model"] == "needle"
    assert main(["init", "nowhere/config.yaml"]) == 1
    assert "cannot write nowhere/config.yaml: No such file" in capsys.readouterr().err


def test_lines_are_short() -> None:
    head = "# yaml-language-server"
    lines = [line for line in commented_config("needle").splitlines() if head not in line]
    assert max(map(len, lines)) <= 104
    empty = [line for line, _ in groupby(lines) if not line.strip()]
    assert not empty


def test_secrets_are_not_printed() -> None:
    secret = {
        "CSPS_API_KEYS": "alice aaaa", "CSPS_CLUSTER_SECRET": "bbbb", "HF_TOKEN": "cccc",
        "RAY_AUTH_TOKEN_PATH": "/dddd", "OTEL_EXPORTER_OTLP_HEADERS": "eeee",
    }  # fmt: skip
    shown = variables({**secret, "CUDA_VISIBLE_DEVICES": "0,1", "EDITOR": "vi"})
    assert shown == {**dict.fromkeys(secret, "(set)"), "CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_report_has_versions_machine_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("applications: []")
    monkeypatch.setenv("CSPS_API_KEYS", "alice very-secret")
    assert main(["collect-env", "--json"]) == 0
    said = capsys.readouterr().out
    assert "very-secret" not in said
    report = json.loads(said)
    assert report["packages"]["torch"] != "not installed"
    assert "GiB" in report["machine"]["memory"]
    assert "expected one with import_path" in report["configuration"]["error"]
    assert report["server"] == {"started from here": "no"}

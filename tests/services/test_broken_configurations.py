"""Every mistake of a list is found before anything starts, in one line with a remedy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

from csps.cli import main
from csps.services.launch import preflight, serve_command
from csps.services.planning import memory as planned_memory
from csps.services.planning.checks import Resources
from csps.services.planning.machine import GIB, MainMemory

ROOT = Path(__file__).resolve().parents[2]
BROKEN = yaml.safe_load((Path(__file__).parent / "broken_configurations.yaml").read_text())


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """Return a port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 2 cores, 16 GiB and no GPU, whatever this machine has."""
    memory = MainMemory(total=16 * GIB, available=15 * GIB)
    for module in (preflight, planned_memory):
        monkeypatch.setattr(module, "main_memory", lambda *_: memory)
    resources = Resources(cores=2, gpus=0)
    monkeypatch.setattr(serve_command, "resources_here", lambda: resources)


def configuration(case: dict[str, Any], port: int) -> str:
    """Return the text of the configuration that ships, with the case's mistake."""
    if "text" in case:
        return str(case["text"])
    data = yaml.safe_load((ROOT / "config.yaml").read_text())
    (application,) = data["applications"]
    args = application["args"]
    for name, value in case.get("args", {}).items():
        args[name] = {**args[name], **value} if isinstance(args.get(name), dict) else value
    data["http_options"] |= {"port": free_port()} | {
        name: port if value == "{port}" else value for name, value in case.get("http", {}).items()
    }
    application |= case.get("app", {})
    return yaml.safe_dump({**data, **case.get("top", {})})


def test_there_are_60_and_each_says_key_value_and_remedy() -> None:
    assert len(BROKEN) >= 60
    assert all(len(case["says"]) == 3 for case in BROKEN)
    assert len({case["name"] for case in BROKEN}) == len(BROKEN)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case["name"])
def test_a_broken_configuration_is_found(
    case: dict[str, Any],
    taken: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in case.get("files", {}).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if content == "{needle}":
            content = (ROOT / "models" / "needle" / "config.json").read_text()
        path.mkdir() if content is None else path.write_text(content)
    for name, value in case.get("env", {}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.yaml").write_text(configuration(case, taken))
    assert main(["check-config", *case.get("words", [])]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in case["says"]:
        assert part.replace("{port}", str(taken)) in error, error


def test_the_configuration_without_a_mistake_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(configuration({}, 0))
    assert main(["check-config"]) == 0
    assert "is fine" in capsys.readouterr().out

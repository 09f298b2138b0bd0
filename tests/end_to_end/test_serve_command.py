"""The first steps of a new user: `make serve` is `csps serve`, from nothing to a right answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from deployed_server import SECRET, commands_in
from free_ports import free_port

from csps.cli import main
from csps.services.settings.credentials import SECRET_VARIABLE

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 350


def csps(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `csps` like a user."""
    return subprocess.run(
        [sys.executable, "-m", "csps.cli", *arguments],
        cwd=cwd,
        env={**os.environ, SECRET_VARIABLE: SECRET},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def test_the_first_answer_is_right_and_the_server_stays(
    folder: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server stays until the tests of test_server.py, which replace it and stop their own."""
    config = ("--config", str(ROOT / "config.yaml"), "--port", str(port))
    served = csps("serve", *config, cwd=folder)
    assert served.returncode == 0, served.stdout + served.stderr
    for text in ("(right)", "time to first token", "plan: exact attention", "curl", "csps stop"):
        assert text in served.stdout
    assert httpx.get(f"http://127.0.0.1:{port}/health").is_success

    with commands_in(folder):
        assert main(["serve", *config[:-1], str(port + 1)]) == 1
        refused = capsys.readouterr().err
        assert f"http_options.port {port}, which cannot become {port + 1}" in refused
        assert refused.count("\n") == 1

        assert main(["demo", *config]) == 0
        assert "(right)" in capsys.readouterr().out


def test_a_port_in_use_is_one_line_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert main(["serve", "--config", str(ROOT / "config.yaml"), "--port", str(port)]) == 1
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert f"port {port}" in refused
    assert not (tmp_path / "run").exists()

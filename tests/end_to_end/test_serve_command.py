"""What a new user does first: `make serve` is `csps serve`, from nothing to a right answer."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from csps.cli import main

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 350


def csps(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "csps.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def write_config(folder: Path, port: int, model_dir: Path, name: str) -> list[str]:
    """A server of few processes; returns the arguments that name it."""
    application = {
        "name": "csps",
        "route_prefix": "/",
        "import_path": "csps.services.app:build",
        "args": {
            "model": str(model_dir),
            "served_model_name": name,
            "prefill": {"instances": 1},
            "decode": {"instances": 1},
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return ["--config", str(path), "--port", str(port)]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands run, those in this process, too: importing Ray takes others seconds."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert main(["stop"]) == 0


def test_the_first_answer_is_right_and_the_server_stays(
    folder: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", str(ROOT / "config.yaml"), "--port", str(port))
    served = csps("serve", *config, cwd=folder)
    assert served.returncode == 0, served.stdout + served.stderr
    for told in ("(right)", "time to first token", "plan: exact attention", "curl", "make stop"):
        assert told in served.stdout
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{url}/health").is_success

    assert main(["serve", *config[:-1], str(port + 1)]) == 1
    refused = capsys.readouterr().err
    assert f"http_options.port {port}, which cannot become {port + 1}" in refused
    assert refused.count("\n") == 1

    assert main(["demo", *config]) == 0
    assert "(right)" in capsys.readouterr().out

    assert main(["stop"]) == 0
    assert "stopped" in capsys.readouterr().out
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert not (folder / "run" / "ray-token").exists()


@pytest.mark.slow
def test_another_configuration_replaces_the_application(
    folder: Path, port: int, tiny_llama: Path
) -> None:
    for name in ("first", "second"):
        config = write_config(folder, port, tiny_llama, name)
        served = csps("serve", "--no-demo", *config, cwd=folder)
        assert served.returncode == 0, served.stdout + served.stderr
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert [model["id"] for model in models] == [name]


def test_a_port_in_use_is_one_line_and_starts_nothing(
    folder: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert main(["serve", "--config", str(ROOT / "config.yaml"), "--port", str(port)]) == 1
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert f"port {port}" in refused
    assert not (folder / "run").exists()

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

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 350


def csps(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
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
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    csps("stop", cwd=tmp_path)


def test_the_first_answer_is_right_and_the_server_stays(folder: Path, port: int) -> None:
    config = ("--config", str(ROOT / "config.yaml"), "--port", str(port))
    served = csps("serve", *config, cwd=folder)
    assert served.returncode == 0, served.stdout + served.stderr
    for told in ("(right)", "time to first token", "plan: exact attention", "curl", "make stop"):
        assert told in served.stdout
    url = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{url}/health").is_success

    elsewhere = csps("serve", *config[:-1], str(port + 1), cwd=folder)
    assert elsewhere.returncode == 1
    assert f"http_options.port {port}, which cannot become {port + 1}" in elsewhere.stderr
    assert elsewhere.stderr.count("\n") == 1

    again = csps("demo", *config, cwd=folder)
    assert "(right)" in again.stdout

    assert "stopped" in csps("stop", cwd=folder).stdout
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


def test_a_port_in_use_is_one_line_and_starts_nothing(folder: Path, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        refused = csps(
            "serve", "--config", str(ROOT / "config.yaml"), "--port", str(port), cwd=folder
        )
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert f"port {port}" in refused.stderr
    assert not (folder / "run").exists()

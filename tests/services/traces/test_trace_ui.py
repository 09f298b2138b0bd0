"""A trace viewer that is started, and a configuration that points at it."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port

from csps.protocols.core.errors import ConfigError, FaultError
from csps.services.launch import serve_command
from csps.services.launch.deploy_config import DeployConfig
from csps.services.launch.trace_command import main
from csps.services.launch.trace_ui import phoenix

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = f"""#!{sys.executable}
import http.server, os, sys
assert sys.argv[1:] == ["serve"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()
address = os.environ["PHOENIX_HOST"], int(os.environ["PHOENIX_PORT"])
http.server.HTTPServer(address, Handler).serve_forever()
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "phoenix"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_it_runs_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    with phoenix(program(tmp_path, STAND_IN), port=free_port(), run_dir=tmp_path / "run") as url:
        assert httpx.get(f"{url}/healthz").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")


def test_a_viewer_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    broken = program(tmp_path, "#!/bin/sh\nexit 3\n")
    with (
        pytest.raises(FaultError, match=r"phoenix.log"),
        phoenix(broken, port=free_port(), run_dir=tmp_path / "run"),
    ):
        raise AssertionError("it has not started")
    with (
        pytest.raises(ConfigError, match="make trace-ui"),
        phoenix(tmp_path / "nothing", port=free_port(), run_dir=tmp_path / "run"),
    ):
        raise AssertionError("it has not started")


@pytest.mark.parametrize("which", ["browser", "grpc"])
def test_a_viewer_of_somebody_else_is_neither_used_nor_ended(tmp_path: Path, which: str) -> None:
    """Though it answers as ours would."""
    others = free_port()
    port = others if which == "browser" else others - 1
    viewer = program(tmp_path, STAND_IN)
    with phoenix(viewer, port=others, run_dir=tmp_path / "theirs") as url:
        with (
            pytest.raises(ConfigError, match=rf"port {others} on 127.0.0.1 cannot be used"),
            phoenix(viewer, port=port, run_dir=tmp_path / "ours"),
        ):
            raise AssertionError("it has not started")
        assert httpx.get(f"{url}/healthz").status_code == 200


@pytest.fixture
def own_ending() -> Iterator[None]:
    """Return what SIGTERM does here once a test is over."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_ending")
def test_sigterm_ends_the_viewer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send it before and after the server has started."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "config.yaml", tmp_path)
    viewer, port = program(tmp_path, STAND_IN), free_port()

    def serve(config: DeployConfig, **_: Any) -> None:
        traces = config.settings.telemetry.otlp_endpoint
        assert traces == f"http://127.0.0.1:{port}/v1/traces"
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve_command, "serve", serve)
    with pytest.raises(SystemExit) as ended:
        main(["ui", "--phoenix", str(viewer), "--port", str(port)])
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz")

"""Run Arize Phoenix on this machine, to which a server sends its traces (`make trace-ui`)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from csps.protocols.core.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.launch.preflight import check_port

HOST = "127.0.0.1"
CHOOSING = '`make trace-ui ARGS="--port 6010"`, which takes 6011 as well'
START_DEADLINE_S = 180.0
"""Limit for Phoenix to start; it creates its database first."""
STOP_DEADLINE_S = 20.0
POLL_S = 0.2


@contextmanager
def phoenix(program: Path, *, port: int, run_dir: Path) -> Iterator[str]:
    """Run Phoenix; yield its URL when it listens, and end it afterwards.

    Raises:
        ConfigError: the program cannot be started, or another process listens on one of its ports.
        FaultError: it ended at once; the message names its log.
        DeadlineExceeded: it does not come up.
    """
    for wanted in (port, grpc_port(port)):  # or another viewer could answer
        check_port(HOST, wanted, setting=CHOOSING)
    folder = (run_dir / "phoenix").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    url, log = f"http://{HOST}:{port}", folder / "phoenix.log"
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                [program, "serve"], env=_environment(folder, port), stdout=out, stderr=out
            )
        except OSError as error:
            raise ConfigError(f"{program}: {error.strerror}; `make trace-ui` installs it") from None
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def grpc_port(port: int) -> int:
    """Return the gRPC port of the viewer that listens on `port`."""
    return port + 1


def _environment(folder: Path, port: int) -> dict[str, str]:
    """Return Phoenix's environment: loopback only, no downloads, no reports."""
    return {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": HOST,
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port(port)),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        if process.poll() is not None:
            raise FaultError(f"Phoenix did not start; see {log}")
        try:
            if httpx.get(f"{url}/healthz", timeout=2.0, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise DeadlineExceeded("starting Phoenix", START_DEADLINE_S)
        time.sleep(POLL_S)

"""The whole server on a real Ray, for the duration of a benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from csps.protocols.core.errors import ConfigError
from csps.services.launch import ray_head
from csps.services.launch.deploy_config import read_config
from csps.services.launch.serve_command import deploy

READY_S = 240.0
"""Time limit for Ray, the four deployments and both gangs."""


@contextlib.contextmanager
def deployed(args: dict[str, Any], *, port: int = 8123) -> Iterator[str]:
    """Deploy the application with these settings, yield its base URL, and stop it afterwards.

    Raises:
        ConfigError: a server already runs from this directory, and would be stopped as well.
    """
    if (head := ray_head.find_head(ray_head.RUN_DIR)) is not None:
        raise ConfigError(f"a server runs here (process {head.pid}): end it first with `csps stop`")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(serve_config(args, port)))
        command = [sys.executable, "-m", "csps.cli"]
        serve = [*command, "serve", "--config", str(config), "--no-demo"]
        try:
            subprocess.run(serve, check=True, timeout=READY_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            subprocess.run([*command, "stop"], check=True, timeout=READY_S)


def serve_config(args: dict[str, Any], port: int) -> dict[str, Any]:
    """Return the configuration for `csps serve --config` with these settings."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "csps",
                "route_prefix": "/",
                "import_path": "csps.services.app:build",
                # Prompts come again here, and are to be computed.
                "args": {"kv_reuse": {"enabled": False}, **args},
            }
        ],
    }


def deployed_beside(application: dict[str, Any], url: str) -> None:
    """Add an application to the deployed one, for comparison, and wait until it answers."""
    head = ray_head.find_head(ray_head.RUN_DIR)
    assert head is not None, "nothing is deployed from this directory"
    config = read_config(ray_head.RUN_DIR / "deployed.yaml")
    both = {**config.data, "applications": [*config.data["applications"], application]}
    deploy(dataclasses.replace(config, data=both), head, ray_head.RUN_DIR)
    deadline = time.monotonic() + READY_S
    while not httpx.get(f"{url}/-/routes").json().get(application["route_prefix"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{application['name']} was not up within {READY_S:g} s")
        time.sleep(0.3)


def running(deployment: str) -> set[int]:
    """Return the processes of one of the server's deployments."""
    head = ray_head.find_head(ray_head.RUN_DIR)
    assert head is not None, "nothing is deployed from this directory"
    url = f"{head.dashboard}/api/serve/applications/"
    answer = httpx.get(url, headers=head.headers, timeout=READY_S).json()
    replicas = answer["applications"]["csps"]["deployments"][deployment]["replicas"]
    return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


@contextlib.contextmanager
def process(command: list[str], *, ready_url: str, **environment: str) -> Iterator[str]:
    """Run another server for comparison, and end its process group afterwards."""
    started = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(ready_url, started)
        yield ready_url
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _wait_for(url: str, started: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if started.poll() is not None:
            raise RuntimeError(f"{started.args} ended with {started.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code < 500:
                return
        time.sleep(0.3)
    raise TimeoutError(f"{url} did not answer within {READY_S:g} s")

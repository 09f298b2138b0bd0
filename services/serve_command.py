"""`csps serve` and `csps stop`: a server on this machine, from nothing to the first answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from csps.protocols.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services import preflight, ray_head
from csps.services.demo_command import demo
from csps.services.deploy_config import DeployConfig, read_config
from csps.services.ray_head import RayHead

RUN_DIR = Path("run")
"""State of the server that was started from this directory: log, token, process id, traces."""
READY_DEADLINE_S = 300.0
DELETE_DEADLINE_S = 60.0
POLL_S = 0.5
HTTP_TIMEOUT_S = 5.0


def serve(config_path: Path, *, port: int | None, with_demo: bool) -> None:
    """Start Ray, deploy, wait until ready, ask a first question; leaves the server running.

    Raises:
        ConfigError, FaultError: why there is no server, in one line.
    """
    preflight.check_python()
    config = read_config(config_path, port=port)
    head = ray_head.recall(RUN_DIR)
    if head is None:
        head = _start(config)
    else:
        _say(f"Ray is already running (process {head.pid}); deploying onto it")
    deploy(config, head, RUN_DIR)
    wait_ready(config, head, say=_say)
    _say(f"ready: {config.url}/v1 serves '{config.settings.model_name}'")
    if with_demo:
        demo(config)


def stop() -> None:
    """Let running requests finish, then end the server that `serve` started here."""
    head = ray_head.recall(RUN_DIR)
    if head is None:
        _say("no server was started from this directory")
    else:
        _say("waiting for running requests ...")
        with suppress(httpx.HTTPError):
            undeploy(head)
        head.stop()
        _say("stopped")
    ray_head.forget(RUN_DIR)


def check_config(config_path: Path) -> None:
    """Say whether a configuration can be deployed."""
    config = read_config(config_path)
    settings = config.settings
    ranks = f"{settings.prefill.ranks} prefill and {settings.decode.ranks} decode ranks"
    _say(f"{config_path} is fine: '{settings.model_name}' on {ranks}, at {config.url}")


def deploy(config: DeployConfig, head: RayHead, run_dir: Path) -> None:
    """`serve deploy`; returns when Ray has accepted the configuration."""
    path = run_dir / "deployed.yaml"
    path.write_text(yaml.safe_dump(config.data, sort_keys=False))
    serve_cli = [sys.executable, "-m", "ray.serve.scripts", "deploy"]
    done = subprocess.run(
        [*serve_cli, "--address", head.dashboard, str(path)],
        env=head.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise FaultError(f"serve deploy failed: {_last_line(done.stderr or done.stdout)}")


def undeploy(head: RayHead) -> None:
    """Delete all applications; returns when they have drained and are gone."""
    url = f"{head.dashboard}/api/serve/applications/"
    # Not DELETE, which ends the HTTP proxies as well, with whoever is connected to them.
    nothing: dict[str, list[str]] = {"applications": []}
    httpx.put(url, json=nothing, headers=head.headers, timeout=HTTP_TIMEOUT_S).raise_for_status()
    deadline = time.monotonic() + DELETE_DEADLINE_S
    while time.monotonic() < deadline and _applications(head):
        time.sleep(POLL_S)


def wait_ready(
    config: DeployConfig,
    head: RayHead,
    *,
    say: Callable[[str], None],
    deadline_s: float = READY_DEADLINE_S,
) -> None:
    """Wait until `/health` says ready, and say what is being waited for.

    Raises:
        ConfigError: the application cannot be built.
        FaultError: Ray has ended.
        DeadlineExceeded: it takes too long.
    """
    deadline, said = time.monotonic() + deadline_s, ""
    while time.monotonic() < deadline:
        if not head.alive:
            raise FaultError(f"Ray has ended; see {head.log_file}")
        trouble = _health(config)
        if trouble is None:
            return
        status = _progress(_applications(head), trouble)
        if status != said:
            say(f"  {status}")
            said = status
        time.sleep(POLL_S)
    raise DeadlineExceeded(f"deployment ({said})", deadline_s)


def _start(config: DeployConfig) -> RayHead:
    preflight.check_port(config.host, config.port)
    preflight.check_memory(config.settings.prefill.ranks + config.settings.decode.ranks)
    _say("starting Ray on loopback ...")
    head = ray_head.start_head(RUN_DIR)
    ray_head.remember(head, RUN_DIR)
    return head


def _health(config: DeployConfig) -> str | None:
    """None when ready, else what is missing."""
    try:
        response = httpx.get(f"{config.url}/health", timeout=HTTP_TIMEOUT_S)
    except httpx.TransportError:
        return "starting"
    if response.is_success:
        return None
    try:
        return str(response.json()["reason"])
    except (ValueError, KeyError, TypeError):
        return "starting"


def _applications(head: RayHead) -> dict[str, Any]:
    url = f"{head.dashboard}/api/serve/applications/"
    with suppress(httpx.TransportError, json.JSONDecodeError):
        response = httpx.get(url, headers=head.headers, timeout=HTTP_TIMEOUT_S)
        applications: dict[str, Any] = response.json().get("applications") or {}
        return applications
    return {}


def _progress(applications: dict[str, Any], trouble: str) -> str:
    """One line: replicas that run, by deployment, and what the router waits for.

    Raises:
        ConfigError: deployment has failed for good.
    """
    for application in applications.values():
        if application["status"] == "DEPLOY_FAILED":
            raise ConfigError(f"deployment failed: {_last_line(application['message'])}")
        counts = [_count(name, it) for name, it in sorted(application["deployments"].items())]
        return ", ".join(counts) + f" ({trouble})" if counts else "building the application"
    return "starting Serve"


def _count(name: str, deployment: dict[str, Any]) -> str:
    replicas = deployment["replicas"]
    running = sum(replica["state"] == "RUNNING" for replica in replicas)
    return f"{name} {running}/{deployment['target_num_replicas']}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _say(text: str) -> None:
    print(text, flush=True)

"""`csps serve` and `csps stop`: a server on this machine, from nothing to the first answer."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import yaml

from csps.protocols.errors import DeadlineExceeded, FaultError
from csps.services.launch import preflight, ray_head
from csps.services.launch.demo_command import demo
from csps.services.launch.deploy_config import IMPORT_PATH, DeployConfig, read_config
from csps.services.launch.memory_need import memory_need
from csps.services.launch.model_check import check_model
from csps.services.launch.ray_head import RUN_DIR, RayHead
from csps.services.launch.serve_status import (
    APPLICATIONS_PATH,
    HTTP_TIMEOUT_S,
    POLL_S,
    ServeStatus,
    last_line,
    wait_for_status,
)
from csps.services.launch.settings import Settings

READY_DEADLINE_S = 300.0
"""Unless `--ready-timeout` says otherwise: large weights take long to read."""
DEPLOY_DEADLINE_S = 180.0
"""For Ray to start Serve and to accept a configuration."""
DELETE_GRACE_S = 30.0
"""For applications to go once their requests have had `drain_s`."""
FREED_DEADLINE_S = 10.0
"""For the system to take back the memory of processes that have just ended."""


def serve(
    config_path: Path,
    *,
    port: int | None,
    with_demo: bool,
    ready_deadline_s: float = READY_DEADLINE_S,
) -> None:
    """Start Ray, deploy, wait until ready, ask a first question; leaves the server running.

    Where a server runs already, its application is replaced if it is not the one of this file.

    Raises:
        ConfigError, FaultError: why there is no server, in one line.
    """
    preflight.check_python()
    config = read_config(config_path, port=port)
    check_model(config.settings)
    running = _running_head(config)
    head = running or _start(config)
    deploy(config, head, RUN_DIR)
    wait_ready(config, head, say=_say, deadline_s=ready_deadline_s)
    _say(f"ready: {config.url}/v1 serves '{config.settings.model_name}'")
    if with_demo:
        demo(config, "first request" if running is None else "request")


def stop() -> None:
    """Let running requests finish, then end the server that `serve` started here."""
    head = ray_head.recall(RUN_DIR)
    if head is None:
        _say("no server was started from this directory")
    else:
        _say("waiting for running requests ...")
        # Whatever hinders it, the processes have to go.
        with suppress(FaultError, OSError):
            undeploy(head)
        head.stop()
        _say("stopped")
    ray_head.forget(RUN_DIR)


def check_config(config_path: Path) -> None:
    """Say whether a configuration can be deployed."""
    config = read_config(config_path)
    settings = config.settings
    check_model(settings)
    ranks = " and ".join(f"{gang.ranks} {role}" for role, gang in settings.gangs.items()) + " ranks"
    _say(f"{config_path} is fine: '{settings.model_name}' on {ranks}, at {config.url}")


def deploy(config: DeployConfig, head: RayHead, run_dir: Path) -> None:
    """`serve deploy`; returns when Ray has accepted the configuration.

    Raises:
        FaultError: it has not, and why.
    """
    path = run_dir / "deployed.yaml"
    path.write_text(yaml.safe_dump(config.data, sort_keys=False))
    serve_cli = [sys.executable, "-m", "ray.serve.scripts", "deploy"]
    try:
        done = subprocess.run(
            [*serve_cli, "--address", head.dashboard, str(path)],
            env=head.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=DEPLOY_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded("serve deploy", DEPLOY_DEADLINE_S) from None
    if done.returncode != 0:
        raise FaultError(f"serve deploy failed: {last_line(done.stderr or done.stdout)}")


def undeploy(head: RayHead) -> None:
    """Delete all applications; returns when they have drained and are gone.

    Raises:
        FaultError: Ray does not take the order, or they do not go.
    """
    # Not DELETE, which ends the HTTP proxies as well, with whoever is connected to them.
    nothing: dict[str, list[str]] = {"applications": []}
    status = wait_for_status(head)
    if not status.applications:
        return
    try:
        head.put(APPLICATIONS_PATH, nothing, timeout_s=HTTP_TIMEOUT_S).raise_for_status()
    except httpx.HTTPError as exc:
        raise FaultError(f"Ray does not remove the applications: {exc!r}") from None
    patience_s = status.drain_s + DELETE_GRACE_S
    deadline = time.monotonic() + patience_s
    while wait_for_status(head).applications:
        if time.monotonic() > deadline:
            raise DeadlineExceeded("removing the applications", patience_s)
        time.sleep(POLL_S)


def wait_ready(
    config: DeployConfig,
    head: RayHead,
    *,
    say: Callable[[str], None],
    deadline_s: float = READY_DEADLINE_S,
) -> None:
    """Wait until what was deployed takes requests, and say what is being waited for.

    Raises:
        ConfigError: the application cannot be built.
        FaultError: Ray has ended, or does not answer.
        DeadlineExceeded: it takes too long.
    """
    deadline, said = time.monotonic() + deadline_s, ""
    while time.monotonic() < deadline:
        status = wait_for_status(head)
        # Only then: before, the old application's router may answer on the same port.
        trouble = _health(config) if status.runs(config) else "starting"
        if trouble is None:
            return
        line = status.progress(config, trouble)
        if line != said:
            say(f"  {line}")
            said = line
        time.sleep(POLL_S)
    raise DeadlineExceeded(f"deployment ({said})", deadline_s)


def _running_head(config: DeployConfig) -> RayHead | None:
    """The head that an earlier command left, ready for a deployment; None if there is none.

    Raises:
        ConfigError: it runs, but cannot become what the configuration asks for.
        FaultError: what it has to give up does not go.
    """
    head = ray_head.recall(RUN_DIR)
    if head is None:
        return None
    if not head.alive:
        _say("ending what is left of an earlier server, whose Ray was killed ...")
        head.stop()
        ray_head.forget(RUN_DIR)
        return None
    _say(f"Ray is already running (process {head.pid}); deploying onto it")
    _clear(head, config)
    return head


def _clear(head: RayHead, config: DeployConfig) -> None:
    """Remove the application that runs, if it is another one.

    Serve could replace it in place, but would hold the weights of both meanwhile, and mix their
    answers.
    """
    status = wait_for_status(head)
    status.check_http_options(config)
    if not status.http_options:
        preflight.check_port(config.host, config.port)
    if status.comes(config):
        return
    need = memory_need(config.settings, ray_runs=True)
    if status.applications:
        preflight.check_memory_at_all(need)
        if (freed := _taken(status)) is not None:
            preflight.check_memory(need, freed=freed)
        _say("replacing the application that runs; waiting for its requests ...")
        undeploy(head)
    preflight.wait_memory(need, FREED_DEADLINE_S if status.applications else 0)


def _taken(status: ServeStatus) -> int | None:
    """Bytes of main memory that the applications take at most; None where they do not tell."""
    taken = 0
    for application in status.applications.values():
        deployed = application.get("deployed_app_config") or {}
        if deployed.get("import_path") != IMPORT_PATH:
            return None
        try:
            settings = Settings.model_validate(deployed.get("args") or {})
            taken += memory_need(settings, ray_runs=True).total
        except ValueError:  # of another release, or its model is not there any more
            return None
    return taken


def _start(config: DeployConfig) -> RayHead:
    preflight.check_port(config.host, config.port)
    preflight.check_memory(memory_need(config.settings))
    _say("starting Ray on loopback ...")
    return ray_head.start_head(RUN_DIR)


def _health(config: DeployConfig) -> str | None:
    """None when ready, else what is missing."""
    try:
        response = httpx.get(f"{config.url}/health", timeout=HTTP_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return "starting"
    if response.is_success:
        return None
    try:
        return str(response.json()["reason"])
    except (ValueError, KeyError, TypeError):
        return "starting"


def _say(text: str) -> None:
    print(text, flush=True)

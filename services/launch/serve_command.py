"""Run `csps serve` and `csps stop`: take a server on this machine from nothing to its first answer.

`ServeStatus` reads Ray Serve's answers about the applications of a head, and describes progress in
lines for the terminal.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from csps.protocols.core.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.launch import preflight, ray_head
from csps.services.launch.ask_command import DEPLOYED_FILE
from csps.services.launch.demo_command import demo, usage_hints
from csps.services.launch.deploy_config import IMPORT_PATH, DeployConfig
from csps.services.launch.preflight import check_model, dequantization
from csps.services.launch.ray_head import RUN_DIR, RayHead, command_for
from csps.services.planning.checks import (
    check_listening,
    check_places,
    check_resources,
    resources_here,
)
from csps.services.planning.hardware import Hardware, gpus_here
from csps.services.planning.memory import memory_need, on_gpus
from csps.services.planning.plan import lines, make_plan
from csps.services.settings.credentials import KEYS_VARIABLE, known_keys
from csps.services.settings.settings import Settings

_log = logging.getLogger(__name__)

APPLICATIONS_PATH = "/api/serve/applications/"
HTTP_TIMEOUT_S = 5.0
ANSWER_DEADLINE_S = 60.0
"""Limit for a dashboard that is busy, or that has only just started."""
POLL_S = 0.5
_INFORMATIVE_MARKS = ("Error:", "Resources required")
"""Marks of a deployment's message that says more than that it is slow."""


@dataclass(frozen=True, kw_only=True)
class ServeStatus:
    """One answer of Serve's REST API."""

    applications: Mapping[str, Any] = field(default_factory=dict)
    http_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the proxies that run; empty if there are none yet."""

    def runs(self, config: DeployConfig) -> bool:
        """Return True if this configuration runs and nothing of an earlier one is left."""
        return self._matches(config, "RUNNING")

    def is_deploying(self, config: DeployConfig) -> bool:
        """Return True if this configuration runs or is being deployed."""
        return self._matches(config, "RUNNING", "DEPLOYING")

    def is_replaced_in_place(self, config: DeployConfig) -> bool:
        """Return True if Serve updates what runs, and does not remove it for something else.

        Where a deployment has failed, the one before it may still serve.
        """
        states = {name: application["status"] for name, application in self.applications.items()}
        return states.keys() == {config.application_name} and states[config.application_name] in (
            "RUNNING",
            "DEPLOYING",
            "DEPLOY_FAILED",
            "UNHEALTHY",
        )

    def _matches(self, config: DeployConfig, *states: str) -> bool:
        application = self.applications.get(config.application_name) or {}
        deployed = application.get("deployed_app_config") or {}
        # Serve returns what was submitted, so a changed place of the code counts too.
        return deployed == config.application and application["status"] in states

    @property
    def drain_s(self) -> float:
        """Longest time that the running applications give their requests when they have to end."""
        deployed = (
            application.get("deployed_app_config") or {}
            for application in self.applications.values()
        )
        default = Settings.model_fields["drain_s"].default
        return max(
            (float((app.get("args") or {}).get("drain_s", default)) for app in deployed),
            default=0.0,
        )

    def check_http_options(self, config: DeployConfig) -> None:
        """Compare HTTP options with those in force: Serve reads them only when it starts.

        Raises:
            ConfigError: the configuration differs from those in force.
        """
        wanted = config.data["http_options"]
        for name in self.http_options.keys() & wanted.keys():
            if self.http_options[name] != wanted[name]:
                raise ConfigError(
                    f"the running server has http_options.{name} {self.http_options[name]}, which "
                    f"cannot become {wanted[name]} while it runs: run `{command_for('stop')}` first"
                )

    def progress(self, config: DeployConfig, trouble: str) -> str:
        """Return one line: running replicas by deployment, and what the server is waiting for.

        Args:
            trouble: why the server does not take requests.

        Raises:
            ConfigError: deployment has failed for good.
        """
        application = self.applications.get(config.application_name)
        if application is None:
            return "starting Serve"
        deployments = dict(sorted(application["deployments"].items()))
        reasons = "; ".join(
            filter(None, (_reason(name, status) for name, status in deployments.items()))
        )
        if application["status"] == "DEPLOY_FAILED":
            raise ConfigError(f"deployment failed: {reasons or last_line(application['message'])}")
        counts = ", ".join(_count(name, status) for name, status in deployments.items())
        return f"{counts} ({reasons or trouble})" if counts else "building the application"


def read_status(head: RayHead) -> ServeStatus | None:
    """Return Serve's current status, empty if Serve does not run; None if Ray does not answer."""
    try:
        answer = head.get(APPLICATIONS_PATH, timeout_s=HTTP_TIMEOUT_S).json()
    except (httpx.TransportError, json.JSONDecodeError):
        return None
    return ServeStatus(
        applications=answer.get("applications") or {},
        http_options=answer.get("http_options") or {},
    )


def wait_for_status(head: RayHead) -> ServeStatus:
    """Return Serve's status as soon as Ray answers.

    Raises:
        FaultError: Ray has ended, or does not answer in time.
    """
    deadline = time.monotonic() + ANSWER_DEADLINE_S
    while head.alive:
        if (status := read_status(head)) is not None:
            return status
        if time.monotonic() > deadline:
            raise DeadlineExceeded("an answer of Ray's REST API", ANSWER_DEADLINE_S)
        time.sleep(POLL_S)
    raise FaultError(f"Ray has ended; see {head.log_file}")


def last_line(text: str) -> str:
    """Return the last line of a text; of a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _count(name: str, deployment: Mapping[str, Any]) -> str:
    states = Counter(replica["state"] for replica in deployment["replicas"])
    count = f"{name} {states['RUNNING']}/{deployment['target_num_replicas']}"
    # Those that run may be the former version's.
    starting = states["STARTING"] if states["RUNNING"] else 0
    return f"{count} and {starting} starting" if starting else count


def _reason(name: str, deployment: Mapping[str, Any]) -> str:
    """Return what keeps a deployment from starting; empty if Serve names nothing."""
    message = deployment.get("message") or ""
    if deployment.get("status") == "HEALTHY" or not any(
        mark in message for mark in _INFORMATIVE_MARKS
    ):
        return ""
    return f"{name}: {last_line(message)}"


READY_DEADLINE_S = 300.0
"""Default of `--ready-timeout`: large weights take long to read."""
DEPLOY_DEADLINE_S = 180.0
"""Limit for Ray to start Serve and to accept a configuration."""
KEYS_DEADLINE_S = 10.0
"""Limit for a router that runs to take over keys that were edited."""
DELETE_GRACE_S = 30.0
"""Limit for applications to end once their requests have had `drain_s`."""
FREED_DEADLINE_S = 10.0
"""Limit for the system to reclaim the memory of processes that have just ended."""


def serve(
    config: DeployConfig,
    *,
    with_demo: bool,
    ready_deadline_s: float = READY_DEADLINE_S,
    block: bool = False,
) -> None:
    """Start Ray, deploy, wait until ready, ask a first question; leave the server running.

    If a server runs already, its application is replaced unless it has the same configuration.

    Args:
        block: wait for a signal or for Ray's end, and stop the server then.

    Raises:
        ConfigError, FaultError: the server cannot be started; one line says why.
    """
    check(config)
    running = _running_head(config)
    head = running or _start(config)
    deploy(config, head, RUN_DIR)
    wait_ready(config, head, say=_say, deadline_s=ready_deadline_s)
    wait_keys(config)
    _say(f"ready: {config.url}/v1 serves '{config.settings.model_name}'")
    if with_demo:
        demo(config, "first request" if running is None else "request")
    else:
        _say(usage_hints(config))
    if block:
        _stop_on_signal(head)


def _stop_on_signal(head: RayHead) -> None:
    """Wait for SIGINT or SIGTERM, then drain and stop; or for Ray to end by itself.

    Raises:
        FaultError: Ray has ended.
    """
    asked = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: asked.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not asked.wait(POLL_S):
            if not head.alive:
                raise FaultError(f"Ray has ended; see {head.log_file}")
    finally:  # a second signal interrupts the drain
        for number, handler in before.items():
            signal.signal(number, handler)
    stop()


def stop() -> None:
    """Let running requests finish, then end the server that `serve` started here."""
    head = ray_head.find_head(RUN_DIR)
    if head is None:
        _say("no server was started from this directory")
    else:
        _say("waiting for running requests ...")
        # Even if the drain fails, the processes must end.
        with suppress(FaultError, OSError):
            undeploy(head)
        head.stop()
        _say("stopped")
    ray_head.discard_head(RUN_DIR)


def check_config(config: DeployConfig, path: Path, hardware: Hardware | None) -> None:
    """Report if a configuration can be deployed, and what it comes to.

    Args:
        hardware: GPUs to plan for in place of this machine, of which only the model is then used.
    """
    settings = config.settings
    if hardware is not None:
        _check_model(settings)
    else:
        check(config)
        if ray_head.find_head(RUN_DIR) is None:  # or the port may be its own
            preflight.check_port(config.host, config.port)
        preflight.check_memory_at_all(memory_need(settings))
        if any(on_gpus(role, settings) for role in settings.gangs):
            hardware = gpus_here()
    plan = make_plan(settings, hardware)
    ranks = " and ".join(f"{gang.ranks} {role}" for role, gang in settings.gangs.items()) + " ranks"
    _say(f"{path} is fine: '{settings.model_name}' on {ranks}, at {config.url}")
    for line in lines(plan):
        _say(f"  {line}")


def check(config: DeployConfig) -> None:
    """Check all that needs no server: the model, and what this machine has.

    Raises:
        ConfigError: the configuration cannot be deployed here.
    """
    preflight.check_python()
    _check_model(config.settings)
    check_resources(config.settings, resources_here())
    check_places(config.settings)
    check_listening(config.host)


def _check_model(settings: Settings) -> None:
    """Check that the model can be served, and say what quantized weights will take."""
    check_model(settings)
    for line in dequantization(settings):
        _say(line)


def deploy(config: DeployConfig, head: RayHead, run_dir: Path) -> None:
    """Run `serve deploy`; return when Ray has accepted the configuration.

    Raises:
        FaultError: Ray rejected the configuration; the message says why.
    """
    _log.info("deploying %s to %s", config.application_name, head.dashboard)
    path = run_dir / DEPLOYED_FILE
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
    """Delete all applications; return when they have drained and are gone.

    Raises:
        FaultError: Ray rejects the request, or the applications do not end in time.
    """
    # Not DELETE, which ends the HTTP proxies as well, with every connection to them.
    nothing: dict[str, list[str]] = {"applications": []}
    status = wait_for_status(head)
    if not status.applications:
        return
    try:
        head.put(APPLICATIONS_PATH, nothing, timeout_s=HTTP_TIMEOUT_S).raise_for_status()
    except httpx.HTTPError as exc:
        raise FaultError(f"Ray did not remove the applications: {exc!r}") from None
    _log.info("undeploying %d applications, drain %.0f s", len(status.applications), status.drain_s)
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
    """Wait until the deployed application accepts requests; report what it is waiting for.

    Raises:
        ConfigError: the application cannot be built.
        FaultError: Ray has ended, or does not answer.
        DeadlineExceeded: it takes too long.
    """
    deadline, said = time.monotonic() + deadline_s, ""
    while time.monotonic() < deadline:
        status = wait_for_status(head)
        # Not before it runs: the old application's router may answer on the same port.
        trouble = _health(config) if status.runs(config) else "starting"
        if trouble is None:
            return
        line = status.progress(config, trouble)
        if line != said:
            say(f"  {line}")
            said = line
        time.sleep(POLL_S)
    raise DeadlineExceeded(f"deployment ({said})", deadline_s)


def wait_keys(config: DeployConfig) -> None:
    """Wait until a running server has taken over the present API keys.

    Raises:
        FaultError: it does not.
    """
    deadline = time.monotonic() + KEYS_DEADLINE_S
    for entry in known_keys(config.settings.api_keys_file):
        *_, key = entry.split()
        while not _is_accepted(config, key):
            if time.monotonic() > deadline:
                raise FaultError(
                    f"the server at {config.url} does not take over the API keys; its router's log "
                    "says why it keeps others"
                )
            time.sleep(POLL_S)


def _is_accepted(config: DeployConfig, key: str) -> bool:
    try:
        response = httpx.get(
            f"{config.url}/v1/models",
            headers={"Authorization": f"Bearer {key}"},
            timeout=HTTP_TIMEOUT_S,
            trust_env=False,
        )
    except httpx.TransportError:
        return False
    return response.is_success


def _running_head(config: DeployConfig) -> RayHead | None:
    """Return the head that an earlier command left, ready for a deployment; None if there is none.

    Raises:
        ConfigError: it runs, but cannot take the configuration.
        FaultError: its old application does not end.
    """
    head = ray_head.find_head(RUN_DIR)
    if head is None:
        return None
    if not head.alive or head.missing:
        _say("ending the rest of an earlier server, whose Ray was killed ...")
        head.stop()
        ray_head.discard_head(RUN_DIR)
        return None
    head.check_variable(KEYS_VARIABLE)
    _say(f"Ray is already running (process {head.pid}); deploying onto it")
    _clear(head, config)
    return head


def _clear(head: RayHead, config: DeployConfig) -> None:
    """Make way for the application, unless it runs already.

    One of the same name is replaced in place, without an error that its clients see
    (`services.cluster.handover`). Its ranks wait for memory, if that does not hold both.
    """
    status = wait_for_status(head)
    status.check_http_options(config)
    if not status.http_options:
        preflight.check_port(config.host, config.port)
    if status.is_deploying(config):
        return
    need = memory_need(config.settings, ray_runs=True)
    if status.applications:
        preflight.check_memory_at_all(need)
        if (freed := _memory_in_use(status)) is not None:
            preflight.check_memory(need, freed=freed)
        if status.is_replaced_in_place(config):
            _say("updating the running application, which serves until the new one is ready ...")
            return
        _say("replacing the running application; waiting for its requests ...")
        undeploy(head)
    preflight.wait_memory(need, FREED_DEADLINE_S if status.applications else 0)


def _memory_in_use(status: ServeStatus) -> int | None:
    """Return the most bytes of main memory that the applications take; None if unknown."""
    used = 0
    for application in status.applications.values():
        deployed = application.get("deployed_app_config") or {}
        if deployed.get("import_path") != IMPORT_PATH:
            return None
        try:
            settings = Settings.model_validate(deployed.get("args") or {})
            used += memory_need(settings, ray_runs=True).total
        except ValueError:  # of another release, or its model was deleted
            return None
    return used


def _start(config: DeployConfig) -> RayHead:
    preflight.check_port(config.host, config.port)
    preflight.check_memory(memory_need(config.settings))
    _say("starting Ray on loopback ...")
    return ray_head.start_head(RUN_DIR)


def _health(config: DeployConfig) -> str | None:
    """Return None if the server is ready, else what is missing."""
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

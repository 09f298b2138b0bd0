"""What Ray Serve says about the applications of a head, in lines for whoever waits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from csps.protocols.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.launch.deploy_config import DeployConfig
from csps.services.launch.ray_head import RayHead
from csps.services.launch.settings import Settings

APPLICATIONS_PATH = "/api/serve/applications/"
HTTP_TIMEOUT_S = 5.0
ANSWER_DEADLINE_S = 60.0
"""For a dashboard that is busy, or that has only just started."""
POLL_S = 0.5
_WORTH_TELLING = ("Error:", "Resources required")
"""Marks of a deployment's message that says more than that it takes long."""


@dataclass(frozen=True, kw_only=True)
class ServeStatus:
    """One answer of Serve's REST API."""

    applications: Mapping[str, Any] = field(default_factory=dict)
    http_options: Mapping[str, Any] = field(default_factory=dict)
    """Of the proxies that run; empty where there are none yet."""

    def runs(self, config: DeployConfig) -> bool:
        """What this configuration describes is up, and nothing of an earlier one is left."""
        return self._is_of(config, "RUNNING")

    def comes(self, config: DeployConfig) -> bool:
        """What this configuration describes is up, or on its way."""
        return self._is_of(config, "RUNNING", "DEPLOYING")

    def _is_of(self, config: DeployConfig, *states: str) -> bool:
        application = self.applications.get(config.application_name) or {}
        deployed = application.get("deployed_app_config") or {}
        same = deployed.get("args") == config.application_args
        return same and application["status"] in states

    @property
    def drain_s(self) -> float:
        """Longest that what runs lets its requests take once it has to end."""
        deployed = (it.get("deployed_app_config") or {} for it in self.applications.values())
        default = Settings.model_fields["drain_s"].default
        return max(
            (float((it.get("args") or {}).get("drain_s", default)) for it in deployed), default=0.0
        )

    def check_http_options(self, config: DeployConfig) -> None:
        """Serve takes HTTP options when it starts, and ignores others from then on.

        Raises:
            ConfigError: the configuration has others than those in force.
        """
        wanted = config.data["http_options"]
        for name in self.http_options.keys() & wanted.keys():
            if self.http_options[name] != wanted[name]:
                raise ConfigError(
                    f"the running server has http_options.{name} {self.http_options[name]}, which "
                    f"cannot become {wanted[name]} while it runs: run `make stop` first"
                )

    def progress(self, config: DeployConfig, trouble: str) -> str:
        """One line: replicas that run, by deployment, and what is being waited for.

        Args:
            trouble: why the server does not take requests.

        Raises:
            ConfigError: deployment has failed for good.
        """
        application = self.applications.get(config.application_name)
        if application is None:
            return "starting Serve"
        deployments = dict(sorted(application["deployments"].items()))
        told = "; ".join(filter(None, (_told(*it) for it in deployments.items())))
        if application["status"] == "DEPLOY_FAILED":
            raise ConfigError(f"deployment failed: {told or last_line(application['message'])}")
        counts = ", ".join(_count(*it) for it in deployments.items())
        return f"{counts} ({told or trouble})" if counts else "building the application"


def read_status(head: RayHead) -> ServeStatus | None:
    """What Serve says now, which is an empty status where it does not run; None: no answer."""
    try:
        answer = head.get(APPLICATIONS_PATH, timeout_s=HTTP_TIMEOUT_S).json()
    except (httpx.TransportError, json.JSONDecodeError):
        return None
    return ServeStatus(
        applications=answer.get("applications") or {},
        http_options=answer.get("http_options") or {},
    )


def wait_for_status(head: RayHead) -> ServeStatus:
    """What Serve says, as soon as it says something.

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
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _count(name: str, deployment: Mapping[str, Any]) -> str:
    running = sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
    return f"{name} {running}/{deployment['target_num_replicas']}"


def _told(name: str, deployment: Mapping[str, Any]) -> str:
    """What keeps a deployment from starting; empty if Serve names nothing."""
    message = deployment.get("message") or ""
    if deployment.get("status") == "HEALTHY" or not any(it in message for it in _WORTH_TELLING):
        return ""
    return f"{name}: {last_line(message)}"

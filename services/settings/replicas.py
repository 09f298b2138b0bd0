"""Fix the number of replicas of each deployment, which no override in a Serve file may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ray import serve

from csps.protocols.core.errors import ConfigError, abridged
from csps.protocols.gang.members import GangRole
from csps.services.settings.settings import Settings

ONE_OF_EACH = {
    "Router": "it knows all requests of its gangs, and two would assign the same KV slots",
    "Registry": "it records the members of each gang, and two would disagree",
    "Configurator": "the router connects to one",
}
"""Deployments with one replica, and why."""
GANGS: dict[str, GangRole] = {
    "PrefillGang": "prefill",
    "DecodeGang": "decode",
    "ElasticGang": "elastic",
}
"""Deployments with a replica for each rank, and the section that counts them. A cell has those
whose section is set."""
SCALE_OUT = "deploy more cells behind a load balancer to serve more requests"


def check_override(deployment: Mapping[str, Any], settings: Settings) -> None:
    """Raise if an entry of `applications.deployments` changes the number of replicas.

    Raises:
        ConfigError: it changes the number; the message says why that is not allowed.
    """
    name = str(deployment.get("name"))
    if name not in ONE_OF_EACH and GANGS.get(name) not in settings.gangs:
        return  # no such deployment: Serve reports it
    if deployment.get("autoscaling_config") is not None:
        raise ConfigError(f"{name}.autoscaling_config: {_reason(name)}")
    wanted = deployment.get("num_replicas")
    if wanted is not None and wanted != _count(name, settings):
        raise _refusal(name, wanted)


def only_one(cls: type) -> type:
    """Return a subclass of `cls` whose replica fails to start if it is one of several.

    `serve deploy` accepts overrides that `check_override` has not seen, and applies them after the
    application was built. Serve then shows the `ConfigError` as the deployment's state.
    """

    class OnlyOne(cls):  # type: ignore[misc]
        # Not `__init__`: some constructors are asynchronous, and Serve checks which.
        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            context = serve.get_replica_context()
            if context.world_size != 1:
                raise _refusal(context.deployment, context.world_size)
            replica: Self = super().__new__(cls)
            return replica

    return OnlyOne


def _refusal(name: str, count: object) -> ConfigError:
    return ConfigError(f"{name}.num_replicas is {abridged(count)}: {_reason(name)}")


def _count(name: str, settings: Settings) -> int:
    return settings.gangs[GANGS[name]].ranks if name in GANGS else 1


def _reason(name: str) -> str:
    if name in GANGS:
        role = GANGS[name]
        return f"a gang has {role}.instances * {role}.tp replicas; set these"
    return f"there is one {name.lower()}: {ONE_OF_EACH[name]}; {SCALE_OUT}"

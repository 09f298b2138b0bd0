"""Ray as a replica sees it: its node, its application, and generations in the GCS.

`RayGenerations` implements `Generations` in the key-value store of Ray's GCS, which lives as long
as the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import ray
from ray import serve
from ray.experimental import internal_kv

from csps.protocols.core.errors import ConfigError, abridged
from csps.protocols.core.topology import Location
from csps.services.cluster.handover import ServingRollouts
from csps.services.settings.settings import Settings

SERVER_LABEL = "csps.io/server"
"""Label of a Ray node (`ray start --labels`): its machine's Rack-Server id, such as 0-3."""
_NAMESPACE = "csps"
T = TypeVar("T")


def listen_host(settings: Settings) -> str:
    """Return the address to listen on: the one from the settings, or the node's own."""
    return _node_address() if settings.host == "auto" else settings.host


def labelled_location(labels: Mapping[str, Any], gpu: int) -> Location:
    """Return the location of a GPU, from the Rack-Server id that labels its node.

    Nodes without a label count as one server.

    Raises:
        ConfigError: the label is not a Rack-Server id.
    """
    server = str(labels.get(SERVER_LABEL, "0-0"))
    try:
        return Location.parse(f"{server}-{gpu}")
    except ConfigError:
        raise ConfigError(
            f"node label {SERVER_LABEL} is {abridged(server)}; allowed are two decimal numbers "
            "of at most 9 digits, without leading zeros, rack and server, like 0-3"
        ) from None


def own_labels() -> dict[str, Any]:
    """Return the labels of this process's node."""
    labels: dict[str, Any] = ray.get_runtime_context().get_node_labels()
    return labels


def own_actor() -> Any:
    """Return a handle of this process's Ray actor."""
    return ray.get_runtime_context().current_actor


def application_name() -> str:
    """Return the application of this replica; several may share a Ray cluster."""
    return serve.get_replica_context().app_name


def holds_gangs(settings: Settings) -> bool:
    """Return whether all nodes together have the CPUs and GPUs of a cell's gangs."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gangs = settings.gangs.values()
    cpus = sum(gang.ranks * gang.num_cpus for gang in gangs)
    gpus = sum(gang.ranks * gang.num_gpus for gang in gangs)
    return total.get("CPU", 0) >= cpus and total.get("GPU", 0) >= gpus


class GangStarts:
    """Whether the gangs of this rollout lack nothing but the room that the former ones take."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._given_up = False
        """Serve has given the update up. It forgets that with the next update, of which this
        rollout is no part."""

    def only_lack_room(self) -> bool:
        """Return False if no nodes hold the gangs, or if their ranks fail when they start."""
        application = serve.status().applications[application_name()]
        self._given_up = self._given_up or application.status == "DEPLOY_FAILED"
        failing = self._given_up or any(
            deployment.status_trigger == "REPLICA_STARTUP_FAILED"
            or "failed to start" in deployment.message
            for deployment in application.deployments.values()
        )
        return not failing and holds_gangs(self._settings)


def _node_address() -> str:
    """Return this node's address as the cluster knows it.

    `ray.util.get_node_ip_address` is wrong in a worker: it returns the address of whichever
    interface leads out of the machine, which `ray start --node-ip-address` may have ruled out.
    """
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == node_id)


class RayGenerations:
    """A counter of one application.

    The store has neither increments nor transactions, but it can refuse to overwrite. The counter
    is the largest of the keys `NAME/number`, and creating a key claims its number. Heartbeats are
    the keys `NAME-held/number`.
    """

    def __init__(self, name: str) -> None:
        """Store the name; contact nobody yet.

        Args:
            name: shared by all users of the counter or of the heartbeats, such as "csps/routers".
        """
        self._prefix, self._heartbeat_prefix = f"{name}/", f"{name}-held/"
        # Threads of its own: a GCS that does not answer holds each for a minute.
        self._threads = ThreadPoolExecutor(2, "gcs")

    async def _call(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        call = partial(function, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def claim(self) -> int:
        return await self._call(self._claim)

    async def publish_heartbeat(self, number: int, heartbeat: int) -> None:
        key = f"{self._heartbeat_prefix}{number}"
        await self._call(
            internal_kv._internal_kv_put,
            key,
            str(heartbeat).encode(),
            overwrite=True,
            namespace=_NAMESPACE,
        )

    async def withdraw_heartbeat(self, number: int) -> None:
        key = f"{self._heartbeat_prefix}{number}"
        await self._call(internal_kv._internal_kv_del, key, namespace=_NAMESPACE)

    async def heartbeats(self) -> dict[int, int]:
        return await self._call(self._read_heartbeats)

    def _read_heartbeats(self) -> dict[int, int]:
        heartbeats = {}
        for key in internal_kv._internal_kv_list(self._heartbeat_prefix, namespace=_NAMESPACE):
            heartbeat = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if heartbeat is not None:  # withdrawn meanwhile
                heartbeats[int(key.decode().removeprefix(self._heartbeat_prefix))] = int(heartbeat)
        return heartbeats

    def _claim(self) -> int:
        newest = max(self._numbers(), default=0)
        while True:
            number = newest + 1
            taken = internal_kv._internal_kv_put(
                self._key(number), b"", overwrite=False, namespace=_NAMESPACE
            )
            # A key that could be created may be an old one that was deleted meanwhile; then there
            # is a larger one.
            numbers = self._numbers()
            newest = max(numbers)
            if not taken and newest == number:
                self._discard([older for older in numbers if older < number])
                return number

    def _numbers(self) -> list[int]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
        return [int(key.decode().removeprefix(self._prefix)) for key in keys]

    def _discard(self, numbers: list[int]) -> None:
        for number in numbers:
            internal_kv._internal_kv_del(self._key(number), namespace=_NAMESPACE)

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"


def serving_rollouts(rollout: int) -> ServingRollouts:
    """Return the rollouts of this replica's application whose routers serve."""
    return ServingRollouts(RayGenerations(f"{application_name()}/serving"), rollout)

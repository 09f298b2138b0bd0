"""What a replica knows of the machine it runs on.

`Generations` in the key-value store of Ray's GCS, which lives as long as the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.experimental import internal_kv

from csps.protocols.core.errors import ConfigError, abridged
from csps.protocols.core.topology import Location
from csps.services.settings.settings import Settings

SERVER_LABEL = "csps.io/server"
"""Label of a Ray node (`ray start --labels`): the Rack-Server id of its machine, such as 0-3."""


def listen_host(settings: Settings) -> str:
    """The interface to listen on: the one that the operator named, or the node's own."""
    return _node_address() if settings.host == "auto" else settings.host


def labelled_location(labels: Mapping[str, Any], gpu: int) -> Location:
    """A GPU of a node, by the Rack-Server id that the operator gave the node; nodes without one
    are all taken for one server.

    Raises:
        ConfigError: the label is no such id.
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
    """Of the node that this process runs on."""
    labels: dict[str, Any] = ray.get_runtime_context().get_node_labels()
    return labels


def _node_address() -> str:
    """This node's address as the cluster knows it.

    Not `ray.util.get_node_ip_address`: in a worker that is the address of whichever interface
    leads out of the machine, which `ray start --node-ip-address` may have ruled out.
    """
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == node_id)


_NAMESPACE = "csps"


def application_name() -> str:
    """Of the application that this replica belongs to; several may share a Ray cluster."""
    return serve.get_replica_context().app_name


class RayGenerations:
    """One counter of one application.

    The store cannot add and has no transactions, but it can refuse to overwrite: the counter is
    the largest of the keys `NAME/number`, and claiming a number is making its key. What is held
    stands under `NAME-held/number`.
    """

    def __init__(self, name: str) -> None:
        """Ask for nothing yet.

        Args:
            name: the same for all who share the counter, such as "csps/routers".
        """
        self._prefix, self._priority_prefix = f"{name}/", f"{name}-held/"

    async def claim(self) -> int:
        return await asyncio.to_thread(self._claim)

    async def claim_priority(self, number: int, heartbeat: int) -> None:
        key = f"{self._priority_prefix}{number}"
        await asyncio.to_thread(
            internal_kv._internal_kv_put,
            key,
            str(heartbeat).encode(),
            overwrite=True,
            namespace=_NAMESPACE,
        )

    async def release_priority(self, number: int) -> None:
        key = f"{self._priority_prefix}{number}"
        await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=_NAMESPACE)

    async def priorities(self) -> dict[int, int]:
        return await asyncio.to_thread(self._read_priorities)

    def _read_priorities(self) -> dict[int, int]:
        priorities = {}
        for key in internal_kv._internal_kv_list(self._priority_prefix, namespace=_NAMESPACE):
            heartbeat = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if heartbeat is not None:  # released meanwhile
                priorities[int(key.decode().removeprefix(self._priority_prefix))] = int(heartbeat)
        return priorities

    def _claim(self) -> int:
        newest = max(self._numbers(), default=0)
        while True:
            number = newest + 1
            taken = internal_kv._internal_kv_put(
                self._key(number), b"", overwrite=False, namespace=_NAMESPACE
            )
            # A key that could be made may be an old one that was tidied away meanwhile; then
            # there is a larger one.
            numbers = self._numbers()
            newest = max(numbers)
            if not taken and newest == number:
                self._discard([it for it in numbers if it < number])
                return number

    def _numbers(self) -> list[int]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
        return [int(key.decode().removeprefix(self._prefix)) for key in keys]

    def _discard(self, numbers: list[int]) -> None:
        for number in numbers:
            internal_kv._internal_kv_del(self._key(number), namespace=_NAMESPACE)

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"

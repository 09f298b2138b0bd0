"""What a replica knows of the machine it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from csps.protocols.errors import ConfigError, abridged
from csps.protocols.topology import Location
from csps.services.launch.settings import Settings

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

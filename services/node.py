"""What a replica knows of the machine it runs on."""

from __future__ import annotations

from typing import Any

import ray

from csps.services.settings import Settings

SERVER_LABEL = "csps.io/server"
"""Label of a Ray node (`ray start --labels`): the Rack-Server id of its machine."""


def listen_host(settings: Settings) -> str:
    """The interface to listen on: the one that the operator named, or the node's own."""
    return _node_address() if settings.host == "auto" else settings.host


def server_id() -> str:
    """The Rack-Server id that the operator gave this node; without one all share a server."""
    labels: dict[str, Any] = ray.get_runtime_context().get_node_labels()
    return str(labels.get(SERVER_LABEL, "0-0"))


def _node_address() -> str:
    """This node's address as the cluster knows it.

    Not `ray.util.get_node_ip_address`: in a worker that is the address of whichever interface
    leads out of the machine, which `ray start --node-ip-address` may have ruled out.
    """
    node_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == node_id)

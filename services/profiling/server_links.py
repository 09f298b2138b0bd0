"""Measure the links of a running server, each of whose ranks may be on another machine.

Ray starts a process beside each of the server's ranks; the ranks themselves are not touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from csps.protocols.core.errors import ConfigError, DeadlineExceeded, FaultError
from csps.protocols.gang.members import GangMembers
from csps.services.cluster.membership import ClusterView
from csps.services.cluster.ray_context import labelled_location
from csps.services.launch.deploy_config import DeployConfig
from csps.services.launch.serve_command import last_line
from csps.services.profiling.links import LocalLinkProbe
from csps.services.settings.credentials import ClusterSecret
from csps.services.settings.settings import Settings

GANG_S = 60.0
"""Limit for the registry to name the gang that computes prompts."""


@dataclass(frozen=True, kw_only=True)
class ServerRank:
    """One rank of the gang that computes prompts."""

    location: str
    host: str
    node_id: str


class RemoteLinkProbe:
    """Probe on the machine of one of Ray's nodes."""

    def __init__(self, node_id: str, device: str, num_gpus: float, secret: ClusterSecret) -> None:
        # No CPUs of its own: it runs beside a rank that has reserved them.
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        probe = ray.remote(num_cpus=0)(LocalLinkProbe).options(scheduling_strategy=there)
        self._probe: Any = probe.remote(device, num_gpus, secret)

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        await _answer(self._probe.start.remote(gpu, arguments))

    async def line(self) -> str:
        return str(await _answer(self._probe.line.remote()))

    async def stop(self) -> None:
        with suppress(RayError):  # gone, and its process with it
            await self._probe.stop.remote()


async def server_ranks(config: DeployConfig) -> list[ServerRank]:
    """Return the ranks of this configuration's application, in rank order. Connects to the Ray
    cluster that the environment names.

    Raises:
        ConfigError: there is no such cluster, or no such server in it.
        DeadlineExceeded: the gang is not complete in time.
    """
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        applications = serve.status().applications
    except (RayError, ConnectionError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster at RAY_ADDRESS: {error}") from None
    if config.application_name not in applications:
        raise ConfigError(
            f"no application {config.application_name!r} in the Ray cluster at RAY_ADDRESS; start "
            "the server, or unset the variable to measure between ranks of this machine alone"
        )
    gang = await _gang(config)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return _placed(gang, config.settings, [node for node in nodes if node["Alive"]])


async def _gang(config: DeployConfig) -> GangMembers:
    """Return the gang that computes prompts, once it is complete."""
    registry = serve.get_deployment_handle("Registry", config.application_name)
    version = -1
    try:
        async with asyncio.timeout(GANG_S):
            while True:
                view: ClusterView
                version, view = await registry.wait_change.remote(version)
                if gang := view.gang(config.settings.prefilling_role):
                    return gang
    except TimeoutError:
        raise DeadlineExceeded("the ranks' registration", GANG_S) from None


def _placed(
    gang: GangMembers, settings: Settings, nodes: Sequence[dict[str, Any]]
) -> list[ServerRank]:
    """Return the nodes of the ranks, by the addresses at which they listen.

    Raises:
        ConfigError: an address is not a node's.
    """
    by_address = {str(node["NodeManagerAddress"]): node for node in nodes}
    named = settings.topology.of(settings.prefilling_role)
    found = []
    for rank, address in enumerate(gang.ranks):
        node = nodes[0] if len(nodes) == 1 else by_address.get(address.host)
        if node is None:
            raise ConfigError(f"no Ray node has the address {address.host} of rank {rank}")
        location = named[rank] if named else str(labelled_location(node["Labels"], rank))
        found.append(ServerRank(location=location, host=address.host, node_id=node["NodeID"]))
    return found


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayError as error:
        reason = last_line(str(error))
        raise FaultError(f"a link probe beside a rank failed: {reason}") from None

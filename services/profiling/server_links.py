"""Measuring the links of a server that runs, of which each rank may be on another machine.

Ray starts a process beside each of the server's ranks; the ranks themselves go on as they are.
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
from csps.services.settings.settings import Settings

GANG_S = 60.0
"""For the registry to name the gang that computes prompts."""


@dataclass(frozen=True, kw_only=True)
class ServerRank:
    """One of the gang that computes prompts."""

    location: str
    host: str
    node_id: str


class RemoteLinkProbe:
    """On the machine of one of Ray's nodes."""

    def __init__(self, node_id: str, device: str, num_gpus: float) -> None:
        # Beside a rank, which keeps what it has asked Ray for.
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        end = ray.remote(num_cpus=0)(LocalLinkProbe).options(scheduling_strategy=there)
        self._end: Any = end.remote(device, num_gpus)

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        await _answer(self._end.start.remote(gpu, arguments))

    async def line(self) -> str:
        return str(await _answer(self._end.line.remote()))

    async def stop(self) -> None:
        with suppress(RayError):  # gone, and its process with it
            await self._end.stop.remote()


async def server_ranks(config: DeployConfig) -> list[ServerRank]:
    """Of the application of this configuration, in rank order. Connects to the Ray cluster that
    the environment names.

    Raises:
        ConfigError: there is none, or no such server in it.
        DeadlineExceeded: its gang is not complete.
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
    """The gang that computes prompts, as soon as it is complete."""
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
    """Where the ranks are, by the addresses at which they listen.

    Raises:
        ConfigError: they do not tell the nodes apart.
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
        why = last_line(str(error))
        raise FaultError(f"a process beside a rank failed: {why}") from None

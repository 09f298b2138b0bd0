"""The Serve replica that hosts one rank of a gang.

Ray Serve places the ranks of a gang together and replaces the whole gang when one dies. A replica
is a thin shell: the rank has its own threads and talks to the router and to other ranks itself. No
part of a request passes through the shell or through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.gang import GangContext
from ray.serve.handle import DeploymentHandle

import csps
from csps.actors.worker.rank_config import RankConfig
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.members import GangRole, RankAddress
from csps.protocols.rpc.tls import Tls
from csps.services.cluster.handover import wait_for_former_router
from csps.services.cluster.membership import Directory, Member
from csps.services.cluster.ray_context import (
    RayGenerations,
    application_name,
    labelled_location,
    listen_host,
    own_actor,
    own_labels,
    serving_rollouts,
)
from csps.services.cluster.registry import Registration, Registry, RegistryDirectory
from csps.services.settings.credentials import ClusterSecret
from csps.services.settings.devices import check_gpus, resolve_device
from csps.services.settings.settings import Settings
from csps.services.telemetry import tracing

if TYPE_CHECKING:
    # `services.app` imports this module where torch is not needed.
    from csps.actors.comm.rendezvous import HostedStore, StoreAddress
    from csps.actors.worker.rank import Rank

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1
ROOM_POLL_S = 1.0
UPDATE_S = 600.0
"""Time for the next rollout to become ready, until which the former router serves with ranks that
an update has removed, as from a pair to an elastic gang."""


class GangRank:
    """One rank of one gang in one Serve replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an async constructor
        self,
        role: GangRole,
        settings: Settings,
        secret: ClusterSecret,
        registry: DeploymentHandle[Registry],
        rollout: int,
    ) -> None:
        self._patience_s = UPDATE_S + settings.drain_s
        gang = _gang_context()
        self._flush_spans = tracing.install(f"csps-{role}", settings.telemetry, rank=gang.rank)
        began = time.monotonic()
        directory = RegistryDirectory(registry, rollout)
        if gang.rank == 0:
            try:
                await _wait_for_room(settings, directory)
            finally:  # one that cannot start has a place as well, and none must be made for it
                await directory.begin(gang.gang_id, role)
        config = rank_config(role, settings, gang, host=listen_host(settings))
        tls = settings.load_tls()
        store, publishing = await _rendezvous_store(gang, config, secret, tls, directory)
        try:
            self._rank = _make_rank(config, secret, store)
            self._address = await asyncio.to_thread(self._rank.start)
        finally:
            if publishing is not None:
                publishing.end()
        member = await self._member(role, gang, rollout)
        self._registration = Registration(gang.rank, partial(registry.join.remote, member))
        logger.info(
            "%s rank %d of gang %s is up after %.1f s at %s:%d",
            role, gang.rank, gang.gang_id, time.monotonic() - began, *self._address,
        )  # fmt: skip
        await wait_for_former_router(serving_rollouts(rollout), self.check_health)

    def check_health(self) -> None:
        """Raise, for Serve, if the rank cannot go on; Serve then replaces its gang."""
        self._rank.check_health()
        self._registration.check()

    async def __del__(self) -> None:
        rank = getattr(self, "_rank", None)
        if rank is None:  # the constructor did not get that far
            return
        if registration := getattr(self, "_registration", None):
            registration.end()
        await _router_detached(rank, self._patience_s)
        await asyncio.to_thread(rank.close)
        self._flush_spans()

    async def _member(self, role: GangRole, gang: GangContext, rollout: int) -> Member:
        host, port = self._address
        return Member(
            role=role,
            gang_id=gang.gang_id,
            world_size=gang.world_size,
            address=RankAddress(rank=gang.rank, host=host, port=port),
            rollout=rollout,
            incarnation=await _incarnation(role) if gang.rank == 0 else 0,
            replica=own_actor(),
        )


def rank_config(role: GangRole, settings: Settings, gang: GangContext, *, host: str) -> RankConfig:
    """Return the configuration of one rank."""
    # Imported here: the application is built by processes that do not need torch.
    from csps.services.planning.memory import kv_slots, window_slots

    section = settings.gangs[role]
    check_gpus(settings)
    files = settings.kv_files_of(role)
    return RankConfig(
        model_dir=str(settings.model_dir),
        model_overrides=settings.model_overrides,
        role=role,
        rank=gang.rank,
        world_size=gang.world_size,
        tp=section.tp,
        gang_id=gang.gang_id,
        kv_slots=kv_slots(role, settings),
        window_slots=window_slots(role, settings),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        weight_dtype=settings.weight_dtype,
        device=resolve_device(settings.device, section.num_gpus),
        threads=section.threads,
        host=host,
        location=location(role, settings, gang.rank),
        max_positions=settings.max_positions,
        kv_in_flight_bytes=settings.kv_transfer.in_flight_bytes,
        kv_receiving_backends=settings.kv_transfer.receiving_backends,
        kv_checksum=settings.kv_transfer.checksum,
        kv_files_path=None if files is None else files.path,
        release=csps.__version__,
        kv_files_bytes=0 if files is None else files.bytes,
        tls=None if settings.tls is None else settings.tls.files,
        quantum_ms=settings.quantum_ms,
    )


def location(role: GangRole, settings: Settings, rank: int) -> str:
    """Return the rank's Rack-Server-GPU id, from the settings or from its node's label.

    With a label, the rank's number stands for its GPU's; it only has to differ within the server.

    Raises:
        ConfigError: the label is not a Rack-Server id; Serve then shows why the rank does not
            start.
    """
    named = settings.topology.of(role)
    return named[rank] if named else str(labelled_location(own_labels(), rank))


async def _incarnation(role: GangRole) -> int:
    """Give a new gang of this role its number. The count outlives the registry."""
    return await RayGenerations(f"{application_name()}/{role}-gangs").claim()


def _gang_context() -> GangContext:
    gang = serve.get_replica_context().gang_context
    assert gang is not None, "the rank was deployed without GangSchedulingConfig"
    return gang


async def _wait_for_room(settings: Settings, directory: Directory) -> None:
    """Wait while main memory is short and a former rollout's gangs live, which are in the way.

    Ray places ranks by CPUs and GPUs, and does not know how much memory they will fill.

    Raises:
        ConfigError: they live, and memory would not do without them either: they serve on.
    """
    # Imported late: `services.app` imports this module where torch is not needed.
    from csps.services.launch.preflight import check_memory, check_memory_at_all
    from csps.services.planning.memory import memory_need

    said = False
    need = await asyncio.to_thread(memory_need, settings, ray_runs=True)
    while True:
        try:
            return check_memory(need)
        except ConfigError as error:
            if not said:
                logger.info("looking for a former rollout's gangs to wait for: %s", error)
            said = True
        try:
            census = await directory.census()
        except Exception as exc:  # Serve decides what it raises
            logger.info("the gang directory does not answer, retrying: %s", type(exc).__name__)
        else:
            if census.outdated:
                check_memory_at_all(need)
            elif census.settled:
                return None  # a gang that is not loaded in full may do with less
        await asyncio.sleep(ROOM_POLL_S)


async def _rendezvous_store(
    gang: GangContext,
    config: RankConfig,
    secret: ClusterSecret,
    tls: Tls | None,
    directory: RegistryDirectory,
) -> tuple[HostedStore | StoreAddress, Registration | None]:
    """Host the gang's rendezvous store on rank 0, and find it on the other ranks.

    Returns:
        The store, and on rank 0 its publication, to be ended when all ranks have come: until then
        the registry may be restarted.
    """
    from csps.actors.comm.rendezvous import StoreAddress, host_store

    if gang.rank > 0:
        return StoreAddress(*await directory.wait_for_store(gang.gang_id)), None
    hosted = await asyncio.to_thread(host_store, config.host, secret.value, tls)
    address = hosted.address
    publish = partial(
        directory.publish_store, gang.gang_id, address.host, address.port, config.role
    )
    return hosted, Registration(gang.rank, publish)


def _make_rank(
    config: RankConfig, secret: ClusterSecret, store: HostedStore | StoreAddress
) -> Rank:
    from csps.actors.worker.rank import Rank

    return Rank(config, secret=secret.value, store=store)


async def _router_detached(rank: Rank, deadline_s: float) -> None:
    """Wait until the router has detached, at most `deadline_s` seconds.

    Serve stops all deployments at once, but the router still needs the ranks while it drains.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while rank.attached:  # noqa: ASYNC110 (it changes on another thread)
                await asyncio.sleep(DRAIN_POLL_S)

"""Connections to all ranks of one gang: what routers, tests and benchmarks command it by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from csps.protocols.core.errors import ConfigError, ConnectionLost
from csps.protocols.core.topology import Topology
from csps.protocols.gang.members import GangMembers, GangRole, RankAddress
from csps.protocols.gang.messages import Attach, RankDescription, RankStats
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import pack, unpack

_log = logging.getLogger(__name__)
T = TypeVar("T")

OnNotification = Callable[["GangClient", int, str, Any], None]
"""Called with gang, rank, method and payload, on the event loop."""


class GangClient:
    """A gang whose every rank answers to this process.

    It lives as long as all of its connections: when one closes, `lost` resolves and the gang is
    hung up on; ranks then drop whatever they did for this client.
    """

    def __init__(
        self,
        role: GangRole,
        members: GangMembers,
        on_notification: OnNotification,
        *,
        deadline_s: float = 10.0,
    ) -> None:
        """Connect to nobody yet.

        Args:
            role: what the gang is used for; its ranks must be of this role, or elastic.
            members: where its ranks are, and what they must call their gang.
            on_notification: told whatever a rank tells.
            deadline_s: to connect, and for calls that name no deadline of their own.
        """
        self.role = role
        self.gang_id = members.gang_id
        self.members = members
        self._on_notification = on_notification
        self._deadline_s = deadline_s
        self._router_id = ""
        self._clients: dict[int, RpcClient] = {}
        self.descriptions: tuple[RankDescription, ...] = ()
        """What the ranks say of themselves, in rank order; empty before `describe`, `attach`."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves to the reason."""

    # --- attaching ---

    async def connect(self, *, secret: bytes, router_id: str) -> None:
        """Open a connection to every rank; all or none.

        Raises:
            FaultError: a rank cannot be reached in time, or does not know the secret.
        """
        self._router_id = router_id
        try:
            await together(self._open(address, secret) for address in self.members.ranks)
        except BaseException:
            self.disconnect("connecting failed")
            raise

    async def check_free(self, generation: int) -> None:
        """Whether a router of this generation may take every rank over.

        Raises:
            RanksHeld: another router still commands a rank.
            Superseded: a newer router has attached to a rank before.
        """
        await self.call_all("may_attach", self._attach_message(generation))

    async def describe(self) -> None:
        """Learn what every rank is, whoever commands it.

        Raises:
            ConfigError: the ranks do not describe one gang, or do not stand where its ranks may.
        """
        self._learn(await self.call_all("describe"))

    async def attach(self, generation: int) -> None:
        """Take every rank over; all or none.

        Raises:
            FaultError: a rank refuses, as in `check_free`, or does not answer.
            ConfigError: as in `describe`.
        """
        try:
            self._learn(await self.call_all("attach", self._attach_message(generation)))
        except BaseException:
            self.disconnect("attaching failed")
            raise

    def _attach_message(self, generation: int) -> dict[str, Any]:
        return pack(Attach(router_id=self._router_id, generation=generation))

    async def _open(self, address: RankAddress, secret: bytes) -> None:
        rank = address.rank
        client = await RpcClient.connect(
            address.host,
            address.port,
            secret=secret,
            name=self._router_id,
            deadline_s=self._deadline_s,
            on_notification=lambda method, payload: self._on_notification(
                self, rank, method, payload
            ),
        )
        self._clients[rank] = client
        client.closed.add_done_callback(lambda closed: self._closed(rank, closed.result()))

    def _closed(self, rank: int, reason: ConnectionLost) -> None:
        self.disconnect(f"rank {rank} of {self.role} gang {self.gang_id}: {reason}")

    def _learn(self, answers: Iterable[Any]) -> None:
        self.descriptions = tuple(unpack(RankDescription, answer) for answer in answers)
        self._check_descriptions()

    def _check_descriptions(self) -> None:
        first = self.descriptions[0]
        for rank, it in enumerate(self.descriptions):
            expected = (self.gang_id, rank, self.world_size, first.tp, first.model_fingerprint)
            found = (it.gang_id, it.rank, it.world_size, it.tp, it.model_fingerprint)
            if found != expected:
                raise ConfigError(f"rank {rank} says it is {found}, expected {expected}")
            if it.role not in (self.role, "elastic"):
                raise ConfigError(f"rank {rank} is a {it.role} rank, not {self.role}")
        if self.world_size % first.tp:
            raise ConfigError(f"{self.world_size} ranks are no multiple of tp={first.tp}")
        self._check_locations()

    def _check_locations(self) -> None:
        """Whoever plans or schedules trusts them from here on."""
        ids = [description.location for description in self.descriptions]
        try:
            Topology.of_gang(ids, ranks=self.world_size, tp=self.tp)
        except ConfigError as error:
            raise ConfigError(f"{self.role} gang {self.gang_id}: {error}") from None

    def disconnect(self, reason: str) -> None:
        """Close all connections. Idempotent."""
        for client in self._clients.values():
            client.end(ConnectionLost(reason))
        if not self.lost.done():
            self.lost.set_result(reason)

    async def close(self) -> None:
        """Hang up, and wait until every connection is closed."""
        self.disconnect("closed by this side")
        for client in self._clients.values():
            await client.close()

    # --- facts ---

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.members.ranks)

    @property
    def tp(self) -> int:
        """Ranks per instance."""
        return self.descriptions[0].tp

    @property
    def instances(self) -> int:
        """Copies of the weights."""
        return self.world_size // self.tp

    def ranks_of(self, instance: int) -> range:
        """The ranks of an instance."""
        return range(instance * self.tp, (instance + 1) * self.tp)

    def instance_of(self, rank: int) -> int:
        """The instance of a rank."""
        return rank // self.tp

    @property
    def capacities(self) -> tuple[int, ...]:
        """KV slots by instance: every rank of one holds the same tokens, with its own heads."""
        return tuple(
            min(self.descriptions[rank].kv_slots for rank in self.ranks_of(instance))
            for instance in range(self.instances)
        )

    @property
    def locations(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of the instances: of their first ranks, whose server all share."""
        return tuple(description.location for description in self.descriptions[:: self.tp])

    # --- talking ---

    async def call(
        self, rank: int, method: str, payload: Any = None, *, deadline_s: float | None = None
    ) -> Any:
        """Ask one rank."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        return await self._clients[rank].call(method, payload, deadline_s=deadline_s)

    async def call_all(
        self, method: str, payload: Any = None, *, deadline_s: float | None = None
    ) -> list[Any]:
        """Ask every rank the same at once; answers in rank order, or the first error."""
        return await together(
            self.call(rank, method, payload, deadline_s=deadline_s)
            for rank in range(self.world_size)
        )

    async def stats(self) -> list[RankStats]:
        """What the ranks hold and do now."""
        return [unpack(RankStats, answer) for answer in await self.call_all("stats")]

    def notify(self, rank: int, method: str, payload: Any = None) -> None:
        """Tell one rank; nothing if the gang is lost, because everyone is about to be told."""
        try:
            self._clients[rank].notify(method, payload)
        except ConnectionLost as exc:
            _log.debug("%s not sent: %s", method, exc)

    def notify_all(self, method: str, payload: Any = None) -> None:
        """Tell every rank the same."""
        for rank in range(self.world_size):
            self.notify(rank, method, payload)

    def keep_alive(self) -> None:
        """Renew the lease on every rank; due every `fence.KEEP_ALIVE_S`."""
        self.notify_all("keep_alive")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once. The first error cancels the others and is raised as it is."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(coroutine) for coroutine in work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]

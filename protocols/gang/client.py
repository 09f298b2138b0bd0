"""Connections to all ranks of one gang, over which routers, tests and benchmarks command it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from csps.protocols.core.errors import ConfigError, ConnectionLost, DeadlineExceeded
from csps.protocols.core.topology import Topology
from csps.protocols.gang.members import (
    LATE_PINGS,
    SILENT_PINGS,
    GangMembers,
    GangRole,
    RankAddress,
)
from csps.protocols.gang.messages import Attach, RankDescription, RankStats
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import pack, unpack
from csps.protocols.rpc.tls import Tls

_log = logging.getLogger(__name__)
T = TypeVar("T")

OnNotification = Callable[["GangClient", int, str, Any], None]
"""Called with gang, rank, method and payload, on the event loop."""


class GangClient:
    """A gang whose ranks all answer to this process.

    The client lives as long as all of its connections. When one closes, `lost` resolves and the
    others are closed; ranks then drop whatever they did for this client.
    """

    def __init__(
        self,
        role: GangRole,
        members: GangMembers,
        on_notification: OnNotification,
        *,
        deadline_s: float = 10.0,
    ) -> None:
        """Store what is needed to connect; `connect` opens the connections.

        Args:
            role: what the gang is used for; its ranks must have this role, or be elastic.
            members: addresses of its ranks, and the id that they must report.
            on_notification: called for every notification of a rank.
            deadline_s: for connecting, and for calls without a deadline of their own.
        """
        self.role = role
        self.gang_id = members.gang_id
        self.members = members
        self._on_notification = on_notification
        self._deadline_s = deadline_s
        self._router_id = ""
        self._clients: dict[int, RpcClient] = {}
        self.descriptions: tuple[RankDescription, ...] = ()
        """Descriptions of the ranks, in rank order; empty before `describe` or `attach`."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future that resolves to the reason when the gang is lost."""
        self.given_up = False
        """True if the gang was given up because a rank is silent or hangs. Its processes may look
        healthy to others."""

    async def connect(self, *, secret: bytes, router_id: str, tls: Tls | None = None) -> None:
        """Open a connection to every rank; all or none.

        Raises:
            FaultError: a rank cannot be reached in time, or does not know the secret.
        """
        self._router_id = router_id
        try:
            await together(self._open(address, secret, tls) for address in self.members.ranks)
        except BaseException:
            self.disconnect("connecting failed")
            raise

    async def check_free(self, generation: int) -> None:
        """Check that a router of this generation may take every rank over.

        Raises:
            RanksHeld: another router still commands a rank.
            Superseded: a newer router has attached to a rank before.
        """
        await self._ask_all("may_attach", self._attach_message(generation))

    async def describe(self) -> None:
        """Ask every rank for its description, whoever commands it.

        Raises:
            ConfigError: the ranks do not describe one gang, or their locations are not allowed.
        """
        self._learn(await self._ask_all("describe"))

    async def attach(self, generation: int) -> None:
        """Take every rank over; all or none.

        Raises:
            FaultError: a rank refuses, as in `check_free`, or does not answer.
            ConfigError: as in `describe`.
        """
        try:
            self._learn(await self._ask_all("attach", self._attach_message(generation)))
        except BaseException:
            self.disconnect("attaching failed")
            raise
        _log.info(
            "router %s, generation %d, attached to %s gang %s (%d ranks)",
            self._router_id,
            generation,
            self.role,
            self.gang_id,
            self.world_size,
        )

    async def _ask_all(self, method: str, payload: Any = None) -> list[Any]:
        """Ask all ranks what a rank that lives answers at once."""
        try:
            return await self.call_all(method, payload)
        except DeadlineExceeded:
            self.given_up = True
            raise

    def _attach_message(self, generation: int) -> dict[str, Any]:
        return pack(Attach(router_id=self._router_id, generation=generation))

    async def _open(self, address: RankAddress, secret: bytes, tls: Tls | None) -> None:
        rank = address.rank
        try:
            client = await RpcClient.connect(
                address.host,
                address.port,
                secret=secret,
                name=self._router_id,
                deadline_s=self._deadline_s,
                on_notification=partial(self._on_notification, self, rank),
                tls=tls,
            )
        except DeadlineExceeded:
            self.given_up = True
            raise
        self._clients[rank] = client
        client.closed.add_done_callback(lambda closed: self._closed(rank, closed.result()))

    def _closed(self, rank: int, reason: ConnectionLost) -> None:
        self.given_up |= not self.lost.done() and isinstance(reason.__cause__, TimeoutError)
        self.disconnect(f"rank {rank} of {self.role} gang {self.gang_id}: {reason}")

    def _learn(self, answers: Iterable[Any]) -> None:
        self.descriptions = tuple(unpack(RankDescription, answer) for answer in answers)
        self._check_descriptions()

    def _check_descriptions(self) -> None:
        first = self.descriptions[0]
        for rank, described in enumerate(self.descriptions):
            expected = (self.gang_id, rank, self.world_size, first.tp, first.model_fingerprint)
            found = (
                described.gang_id,
                described.rank,
                described.world_size,
                described.tp,
                described.model_fingerprint,
            )
            if found != expected:
                raise ConfigError(f"rank {rank} says it is {found}, expected {expected}")
            if described.role not in (self.role, "elastic"):
                raise ConfigError(
                    f"rank {rank} of gang {self.gang_id} is a {described.role} rank; "
                    f"allowed are {self.role} and elastic"
                )
        if self.world_size % first.tp:
            raise ConfigError(
                f"gang {self.gang_id} has {self.world_size} ranks, not a multiple of tp={first.tp}"
            )
        self._check_locations()

    def _check_locations(self) -> None:
        """Check that the locations are those of a gang, since planning and scheduling trust
        them."""
        ids = [description.location for description in self.descriptions]
        try:
            Topology.of_gang(ids, ranks=self.world_size, tp=self.tp)
        except ConfigError as error:
            raise ConfigError(f"{self.role} gang {self.gang_id}: {error}") from None

    def give_up(self, reason: str) -> None:
        """Close all connections to a gang that does not do what it owes: it is to be replaced."""
        self.given_up |= not self.lost.done()
        self.disconnect(reason)

    def disconnect(self, reason: str) -> None:
        """Close all connections. Idempotent."""
        for client in self._clients.values():
            client.end(ConnectionLost(reason))
        if not self.lost.done():
            _log.debug("%s gang %s disconnected: %s", self.role, self.gang_id, reason)
            self.lost.set_result(reason)

    async def close(self) -> None:
        """Close all connections, and wait until they are closed."""
        self.disconnect("closed by this side")
        for client in self._clients.values():
            await client.close()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members.ranks)

    @property
    def tp(self) -> int:
        """Number of ranks per instance."""
        return self.descriptions[0].tp

    @property
    def instances(self) -> int:
        """Number of instances (copies of the weights)."""
        return self.world_size // self.tp

    def ranks_of(self, instance: int) -> range:
        """Return the ranks of an instance."""
        return range(instance * self.tp, (instance + 1) * self.tp)

    def instance_of(self, rank: int) -> int:
        """Return the instance of a rank."""
        return rank // self.tp

    @property
    def capacities(self) -> tuple[int, ...]:
        """KV slots by instance. Every rank of an instance holds the same tokens, with its own
        heads."""
        return tuple(
            min(self.descriptions[rank].kv_slots for rank in self.ranks_of(instance))
            for instance in range(self.instances)
        )

    @property
    def window(self) -> int:
        """Positions that layers with slots of their own see; 0: there are none."""
        return self.descriptions[0].window

    @property
    def window_slots(self) -> tuple[int, ...]:
        """Slots in these layers by instance."""
        return tuple(description.window_slots for description in self.descriptions[:: self.tp])

    @property
    def locations(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of the instances, which are those of their first ranks."""
        return tuple(description.location for description in self.descriptions[:: self.tp])

    async def call(
        self, rank: int, method: str, payload: Any = None, *, deadline_s: float | None = None
    ) -> Any:
        """Call a method of one rank."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        return await self._clients[rank].call(method, payload, deadline_s=deadline_s)

    async def call_all(
        self, method: str, payload: Any = None, *, deadline_s: float | None = None
    ) -> list[Any]:
        """Call a method of all ranks at once; return answers in rank order, or raise the first
        error."""
        return await together(
            self.call(rank, method, payload, deadline_s=deadline_s)
            for rank in range(self.world_size)
        )

    async def stats(self) -> list[RankStats]:
        """Return the statistics of all ranks."""
        return [unpack(RankStats, answer) for answer in await self.call_all("stats")]

    def notify(self, rank: int, method: str, payload: Any = None) -> None:
        """Send a notification to one rank; do nothing if the gang is lost."""
        try:
            self._clients[rank].notify(method, payload)
        except ConnectionLost as exc:  # `lost` has resolved, so the router learns of it anyway
            _log.debug("%s not sent to rank %d of %s: %s", method, rank, self.gang_id, exc)

    def notify_all(self, method: str, payload: Any = None) -> None:
        """Send a notification to every rank."""
        for rank in range(self.world_size):
            self.notify(rank, method, payload)

    def keep_alive(self, *, renew: bool = True) -> None:
        """Ping every rank, and disconnect if one has left `SILENT_PINGS` unanswered; due every
        `members.KEEP_ALIVE_S`.

        Pings are counted rather than timed: after a stall of this process, which delays both, the
        answers that have arrived meanwhile are read before the next ping is sent.

        Args:
            renew: send the heartbeat by which ranks know that their router lives.
        """
        for rank, client in self._clients.items():
            if client.unanswered >= SILENT_PINGS:
                name = f"rank {rank} of {self.role} gang {self.gang_id}"
                self.give_up(f"{name} does not answer: {client.unanswered} pings")
                return
            client.ping()
        if renew:
            self.notify_all("keep_alive")

    @property
    def answering(self) -> bool:
        """True if every rank has answered a ping of late."""
        return all(client.unanswered <= LATE_PINGS for client in self._clients.values())


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. The first error cancels the others and is raised unwrapped."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(coroutine) for coroutine in work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]

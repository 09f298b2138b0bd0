"""The gangs and the KV link between them, as the directory names them and as long as they live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from csps.protocols.errors import (
    ConfigError,
    CspsError,
    GangLost,
    RanksHeld,
    Superseded,
)
from csps.protocols.fence import KEEP_ALIVE_S
from csps.protocols.gang_client import GangClient, together
from csps.protocols.gang_members import GangRole
from csps.protocols.messages import ConnectKv, LinkBroken
from csps.protocols.schema import pack, unpack
from csps.services.cluster.directory import ClusterView, Directory
from csps.services.cluster.fencing import Fencing
from csps.services.cluster.generations import Generations

_log = logging.getLogger(__name__)
PAIR: tuple[GangRole, ...] = ("prefill", "decode")
UNUSABLE = "what is there cannot be used, see the router's log"
"""All that `phase` says of a mistake of the operator's, which names addresses and paths."""
STANDBY = "another router still serves"
"""What `phase` says of a successor, which waits."""


@dataclass(frozen=True, kw_only=True)
class ClusterDeadlines:
    """Seconds."""

    attach_s: float = 10.0
    """To connect to a rank, and again for it to accept this router."""
    link_s: float = 60.0
    """For all ranks of both gangs to form their common process group."""
    retry_s: float = 0.5
    """Pause after a failed attempt, unless the directory has news earlier."""
    close_s: float = 5.0
    """For the background tasks to end."""


@dataclass(frozen=True, kw_only=True)
class KvLink:
    """The KV-transfer connection from a prefill gang to a decode gang, while it stands. An elastic
    gang is linked to itself, without a connection, as long as it lives."""

    prefill: GangClient
    decode: GangClient
    epoch: str
    """`generation.counter`, never used again; KV of another epoch is refused by the ranks."""

    @property
    def own(self) -> bool:
        """Of a gang to itself."""
        return self.prefill is self.decode


class ClusterListener(Protocol):
    """Whoever uses the gangs. Callbacks on the event loop, one for each fact.

    A gang is up before a link of it is, and its link is down before the gang is. A link may go
    down and another one come up between the same two gangs, which keep all that they hold.
    """

    @property
    def busy(self) -> bool:
        """There are requests, begun or waiting."""
        ...

    def gang_up(self, gang: GangClient) -> None:
        """Every rank of the gang is attached."""

    def gang_down(self, gang: GangClient, reason: str) -> None:
        """The gang is gone with all it held; the other one lives on."""

    def link_up(self, link: KvLink) -> None:
        """The two gangs can exchange KV."""

    def link_down(self, link: KvLink, reason: str) -> None:
        """They no longer can: KV that has not landed over this link never will."""

    def notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        """A rank of a gang that is up has sent a notification."""


class Cluster:
    """Follows the directory: attaches to gangs that appear and links them, over and over.

    One task follows the directory, another works towards what it says. That one is started over
    whenever something changes, so an attempt to reach ranks that have vanished holds up nothing.

    Args:
        roles: of the gangs that serve: a pair, or "elastic" alone.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        secret: bytes,
        router_id: str,
        generations: Generations,
        deadlines: ClusterDeadlines | None = None,
        roles: Sequence[GangRole] = PAIR,
    ) -> None:
        self._directory, self._roles = directory, tuple(roles)
        self._fencing = Fencing(generations, secret=secret, router_id=router_id)
        self._deadlines = deadlines or ClusterDeadlines()
        self._listener: ClusterListener | None = None
        self._view = ClusterView()
        self._gangs: dict[GangRole, GangClient] = {}
        self._changed = asyncio.Event()
        self._place_in_doubt = asyncio.Event()
        """A gang was lost just now, or found to be of use or of none."""
        self._model: str | None = None
        """Fingerprint of the last attached gang's."""
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._links = 0
        self.link: KvLink | None = None
        """The current one; None while the cluster is not ready."""
        self.trouble = "not started"
        """Why the cluster is not ready, for logs: it names addresses. `phase` is for clients."""
        self._reported = ""
        self._obstacle = ""
        """What the last attempt met with, where clients may know."""

    def listen(self, listener: ClusterListener) -> None:
        """Tell `listener` from now on."""
        assert self._listener is None, "a cluster has one listener"
        self._listener = listener

    @property
    def phase(self) -> str:
        """What the cluster waits for, in words that tell a client nothing of its inside; empty
        when it is ready."""
        if self.link is not None:
            return ""
        return f"{self._awaited}: {self._obstacle}" if self._obstacle else self._awaited

    @property
    def generation(self) -> int:
        """What ranks tell this router from older ones by; 0 until granted. A gang that is up was
        attached under it; when another router was newer, all gangs go down and it is a new one."""
        return self._fencing.generation

    @property
    def _awaited(self) -> str:
        missing = [role for role in self._roles if role not in self._gangs]
        return _waiting_for(missing) if missing else "connecting the gangs"

    async def start(self) -> None:
        """Begin; the listener is told of gangs and links."""
        self._tasks = [
            asyncio.create_task(self._follow(), name="follow the directory"),
            asyncio.create_task(self._keep_connected(), name="keep gangs connected"),
            asyncio.create_task(self._keep_leases(), name="keep the leases of gangs"),
            asyncio.create_task(self._keep_place(), name="keep the place before newer routers"),
        ]

    def drain(self) -> None:
        """Take no gang over any more, and keep those that there are: a successor may have the
        ones that replace them."""
        self._draining = True

    async def close(self) -> None:
        """Hang up on all ranks, which drop whatever they do for this router."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadlines.close_s)
        for gang in list(self._gangs.values()):
            self._lose(gang, "the router shuts down")
        await self._go_first(False)

    # --- following the directory ---

    async def _follow(self) -> None:
        version = -1
        while True:
            try:
                version, view = await self._directory.wait_change(version)
            except Exception as exc:  # whatever a directory of another process may raise
                _log.warning("the directory does not answer: %s", exc)
                await asyncio.sleep(self._deadlines.retry_s)
                continue
            if view != self._view:
                self._view = view
                self._changed.set()

    async def _keep_connected(self) -> None:
        while True:
            self._changed.clear()
            await _wait(self._changed, await self._attempt())

    async def _attempt(self) -> float | None:
        """Work towards the view until done, failed or outdated; returns how long to pause."""
        work = asyncio.create_task(self._connect())
        news = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({work, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            work.cancel()  # changes nothing if it is done
            await asyncio.wait({work, news})
        if work.cancelled():
            return None
        error = work.exception()
        self._meet_with(_obstacle(error))
        if error is None:
            return None
        self._report(error)
        return self._deadlines.retry_s

    def _meet_with(self, obstacle: str) -> None:
        former, self._obstacle = self._obstacle, obstacle
        if (former == UNUSABLE) != (obstacle == UNUSABLE):
            self._place_in_doubt.set()

    def _report(self, error: BaseException) -> None:
        """Keep the reason; say it aloud once, not at every attempt."""
        if (trouble := str(error)) != self._reported:
            expected = isinstance(error, CspsError)
            _log.warning("cluster not ready: %s", error, exc_info=None if expected else error)
        self.trouble = self._reported = trouble

    async def _connect(self) -> None:
        if not self._draining:
            self._drop_replaced()
            await self._attach_found()
        await self._link_gangs()

    def _drop_replaced(self) -> None:
        for gang in list(self._gangs.values()):
            members = self._view.gang(gang.role)
            if members is None or members.gang_id == gang.gang_id:
                continue
            # A directory that had to start again may know an older gang before it knows ours.
            if members.incarnation >= gang.members.incarnation:
                self._lose(gang, f"gang {gang.gang_id} was replaced by {members.gang_id}")

    # --- attaching and losing gangs ---

    async def _attach_found(self) -> None:
        found = [
            GangClient(role, members, self._notified, deadline_s=self._deadlines.attach_s)
            for role in self._roles
            if role not in self._gangs and (members := self._view.gang(role)) is not None
        ]
        try:
            model = self._model if self._busy else None
            await self._fencing.attach(found, self._attached, model=model)
        except Superseded as error:
            for gang in list(self._gangs.values()):
                self._lose(gang, str(error))
            raise

    def _attached(self, gang: GangClient) -> None:
        self._gangs[gang.role] = gang
        self._model = gang.descriptions[0].model_fingerprint
        gang.lost.add_done_callback(lambda lost: self._lose(gang, lost.result()))
        _log.info("attached to %s gang %s (%d ranks)", gang.role, gang.gang_id, gang.world_size)
        if self._listener is not None:
            self._listener.gang_up(gang)

    async def _keep_leases(self) -> None:
        while True:
            for gang in self._gangs.values():
                gang.keep_alive()
            await asyncio.sleep(KEEP_ALIVE_S)

    @property
    def _busy(self) -> bool:
        return self._listener is not None and self._listener.busy

    async def _keep_place(self) -> None:
        """Go before newer routers while requests have lost what computes them."""
        while True:
            self._place_in_doubt.clear()
            usable = self._obstacle != UNUSABLE
            await self._go_first(self._busy and self.link is None and usable and not self._draining)
            await _wait(self._place_in_doubt, KEEP_ALIVE_S)

    async def _go_first(self, wanted: bool) -> None:
        try:
            await self._fencing.go_first(wanted)
        except Exception as exc:  # whatever a store of another process may raise
            _log.warning("cannot say who goes first: %s", exc)

    def _notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        if self._gangs.get(gang.role) is not gang:
            return
        if method == "link_broken":
            self._link_broken(gang, unpack(LinkBroken, payload))
        elif self._listener is not None:
            self._listener.notified(gang, rank, method, payload)

    def _lose(self, gang: GangClient, reason: str) -> None:
        if self._gangs.get(gang.role) is not gang:
            return
        del self._gangs[gang.role]
        gang.hang_up(reason)
        self._unlink(reason)
        self.trouble = reason
        _log.warning("lost %s gang %s: %s", gang.role, gang.gang_id, reason)
        if self._listener is not None:
            self._listener.gang_down(gang, reason)
        self._place_in_doubt.set()
        self._changed.set()

    # --- linking ---

    async def _link_gangs(self) -> None:
        if self.link is not None:
            return
        gangs = [self._gangs[role] for role in self._roles if role in self._gangs]
        if len(gangs) < len(self._roles):
            self.trouble = self._awaited
            return
        prefill, decode = gangs[0], gangs[-1]
        self._links += 1
        epoch = f"{self.generation}.{self._links}"
        if prefill is not decode:
            await self._connect_gangs(prefill, decode, epoch)
        if prefill.lost.done() or decode.lost.done():
            raise GangLost("a gang was lost while it was linked")
        self._declare_ready(KvLink(prefill=prefill, decode=decode, epoch=epoch))

    async def _connect_gangs(self, prefill: GangClient, decode: GangClient, epoch: str) -> None:
        _check_agree(prefill, decode)
        message = pack(_link_message(prefill, decode, epoch))
        self.trouble = f"linking gangs {prefill.gang_id} and {decode.gang_id}"
        deadline_s = self._deadlines.link_s
        await together(
            gang.call_all("connect_kv", message, deadline_s=deadline_s)
            for gang in (prefill, decode)
        )

    def _declare_ready(self, link: KvLink) -> None:
        self.link, self.trouble, self._reported = link, "", ""
        _log.info(
            "ready: gangs %s and %s, epoch %s",
            link.prefill.gang_id, link.decode.gang_id, link.epoch,
        )  # fmt: skip
        if self._listener is not None:
            self._listener.link_up(link)

    def _link_broken(self, gang: GangClient, message: LinkBroken) -> None:
        """Both gangs may be well: only the connection is made anew."""
        if self.link is None or message.epoch != self.link.epoch:
            return
        reason = f"rank {message.rank} of {gang.role} gang {gang.gang_id} lost {message.reason}"
        _log.warning("the KV-transfer connection %s is broken: %s", message.epoch, reason)
        self._unlink(reason)
        self.trouble = reason
        self._changed.set()

    def _unlink(self, reason: str) -> None:
        link, self.link = self.link, None
        if link is not None and self._listener is not None:
            self._listener.link_down(link, reason)


def _obstacle(error: BaseException | None) -> str:
    if isinstance(error, ConfigError):
        return UNUSABLE
    return STANDBY if isinstance(error, RanksHeld | Superseded) else ""


def _waiting_for(roles: Sequence[GangRole]) -> str:
    named = (f"an {role}" if role == "elastic" else f"a {role}" for role in roles)
    return f"waiting for {' and '.join(named)} gang"


def _check_agree(prefill: GangClient, decode: GangClient) -> None:
    """KV of one gang must mean the same to the other."""
    ours, theirs = prefill.descriptions[0], decode.descriptions[0]
    for name in ("model_fingerprint", "layers"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ConfigError(
                f"prefill and decode serve different models: {name} "
                f"{getattr(ours, name)} against {getattr(theirs, name)}"
            )


def _link_message(prefill: GangClient, decode: GangClient, epoch: str) -> ConnectKv:
    host = decode.descriptions[0]
    return ConnectKv(
        epoch=epoch,
        store_host=host.store_host,
        store_port=host.store_port,
        prefill_ranks=prefill.world_size,
        decode_ranks=decode.world_size,
        prefill_tp=prefill.tp,
        decode_tp=decode.tp,
    )


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most that long if a time is given."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

"""Both gangs and the KV link between them, as the directory names them and as long as they live."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from csps.protocols.errors import ConfigError, CspsError, DeadlineExceeded, GangLost
from csps.protocols.gang_client import GangClient, together
from csps.protocols.gang_members import GangRole
from csps.protocols.messages import ConnectBridge
from csps.protocols.schema import pack
from csps.services.directory import ClusterView, Directory

_log = logging.getLogger(__name__)
_ROLES: tuple[GangRole, GangRole] = ("prefill", "decode")
UNUSABLE = "what is there cannot be used, see the router's log"
"""All that `phase` says of a mistake of the operator's, which names addresses and paths."""


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
    """The KV-transfer connection from a prefill gang to a decode gang, while it stands."""

    prefill: GangClient
    decode: GangClient
    epoch: str
    """Names this connection; KV of another one is refused by the ranks."""

    def gang(self, role: GangRole) -> GangClient:
        """The gang of `role`."""
        return self.prefill if role == "prefill" else self.decode


class ClusterListener(Protocol):
    """Callbacks on the event loop, one for each fact.

    A gang is up before a link of it is, and its link is down before the gang is. A link may go
    down and another one come up between the same two gangs, which keep all that they hold.
    """

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
    """

    def __init__(
        self,
        directory: Directory,
        *,
        secret: bytes,
        router_id: str,
        deadlines: ClusterDeadlines | None = None,
    ) -> None:
        self._directory = directory
        self._secret, self._router_id = secret, router_id
        self._deadlines = deadlines or ClusterDeadlines()
        self._listener: ClusterListener | None = None
        self._view = ClusterView()
        self._gangs: dict[GangRole, GangClient] = {}
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._attachments = 0
        # Milliseconds since 1970: a router that was restarted must not reuse an epoch.
        self._links = time.time_ns() // 1_000_000
        self.link: KvLink | None = None
        """The current one; None while the cluster is not ready."""
        self.trouble = "not started"
        """Why the cluster is not ready, for logs: it names addresses. `phase` is for clients."""
        self._reported = ""
        self._misconfigured = False
        """Nothing will do until the operator has changed something."""

    def listen(self, listener: ClusterListener) -> None:
        """Tell `listener` from now on."""
        assert self._listener is None, "a cluster has one listener"
        self._listener = listener

    def gang(self, role: GangRole) -> GangClient | None:
        """The attached gang of `role`, linked or not."""
        return self._gangs.get(role)

    @property
    def phase(self) -> str:
        """What the cluster waits for, in words that tell a client nothing of its inside; empty
        when it is ready."""
        if self.link is not None:
            return ""
        return f"{self._awaited}: {UNUSABLE}" if self._misconfigured else self._awaited

    @property
    def _awaited(self) -> str:
        missing = [role for role in _ROLES if role not in self._gangs]
        return _waiting_for(missing) if missing else "connecting the gangs"

    async def start(self) -> None:
        """Begin; `wait_ready` tells when both gangs are linked."""
        self._tasks = [
            asyncio.create_task(self._follow(), name="follow the directory"),
            asyncio.create_task(self._keep_connected(), name="keep gangs connected"),
        ]

    async def close(self) -> None:
        """Hang up on all ranks, which drop whatever they do for this router."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadlines.close_s)
        for gang in list(self._gangs.values()):
            self._lose(gang, "the router shuts down")

    async def wait_ready(self, deadline_s: float) -> KvLink:
        """Wait until both gangs are attached and linked."""
        try:
            async with asyncio.timeout(deadline_s):
                while self.link is None:
                    await self._ready.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"cluster start ({self.trouble})", deadline_s) from None
        return self.link

    def reset(self, role: GangRole, reason: str) -> None:
        """Give up what the gang is doing: hang up, and attach to whoever is there then."""
        if (gang := self._gangs.get(role)) is not None:
            self._lose(gang, reason)

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
        self._misconfigured = isinstance(error, ConfigError)
        if error is None:
            return None
        self._report(error)
        return self._deadlines.retry_s

    def _report(self, error: BaseException) -> None:
        """Keep the reason; say it aloud once, not at every attempt."""
        if (trouble := str(error)) != self._reported:
            expected = isinstance(error, CspsError)
            _log.warning("cluster not ready: %s", error, exc_info=None if expected else error)
        self.trouble = self._reported = trouble

    async def _connect(self) -> None:
        self._drop_replaced()
        results = await asyncio.gather(*map(self._attach, _ROLES), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result
        await self._link_gangs()

    def _drop_replaced(self) -> None:
        for gang in list(self._gangs.values()):
            members = self._view.gang(gang.role)
            if members is not None and members.gang_id != gang.gang_id:
                self._lose(gang, f"gang {gang.gang_id} was replaced by {members.gang_id}")

    # --- attaching and losing gangs ---

    async def _attach(self, role: GangRole) -> None:
        members = self._view.gang(role)
        if role in self._gangs or members is None:
            return
        gang = GangClient(role, members, self._notified)
        self._attachments += 1
        await gang.attach(
            secret=self._secret,
            # A new name each time, so that a rank which this router was attached to before drops
            # what it still does for it.
            router_id=f"{self._router_id}.{self._attachments}",
            deadline_s=self._deadlines.attach_s,
        )
        self._gangs[role] = gang
        gang.lost.add_done_callback(lambda lost: self._lose(gang, lost.result()))
        _log.info("attached to %s gang %s (%d ranks)", role, gang.gang_id, gang.world_size)
        if self._listener is not None:
            self._listener.gang_up(gang)

    def _notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        if self._listener is not None and self._gangs.get(gang.role) is gang:
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
        self._changed.set()

    # --- linking ---

    async def _link_gangs(self) -> None:
        if self.link is not None:
            return
        prefill, decode = self._gangs.get("prefill"), self._gangs.get("decode")
        if prefill is None or decode is None:
            self.trouble = self._awaited
            return
        _check_agree(prefill, decode)
        self._links += 1
        epoch = f"{prefill.gang_id}.{decode.gang_id}.{self._links}"
        message = pack(_link_message(prefill, decode, epoch))
        self.trouble = f"linking gangs {prefill.gang_id} and {decode.gang_id}"
        deadline_s = self._deadlines.link_s
        await together(
            gang.call_all("connect_bridge", message, deadline_s=deadline_s)
            for gang in (prefill, decode)
        )
        if prefill.lost.done() or decode.lost.done():
            raise GangLost("a gang was lost while it was linked")
        self._declare_ready(KvLink(prefill=prefill, decode=decode, epoch=epoch))

    def _declare_ready(self, link: KvLink) -> None:
        self.link, self.trouble, self._reported = link, "", ""
        self._ready.set()
        _log.info("ready: epoch %s", link.epoch)
        if self._listener is not None:
            self._listener.link_up(link)

    def _unlink(self, reason: str) -> None:
        link, self.link = self.link, None
        self._ready.clear()
        if link is not None and self._listener is not None:
            self._listener.link_down(link, reason)


def _waiting_for(roles: Sequence[GangRole]) -> str:
    return f"waiting for a {' and a '.join(roles)} gang"


def _check_agree(prefill: GangClient, decode: GangClient) -> None:
    """KV of one gang must mean the same to the other."""
    ours, theirs = prefill.descriptions[0], decode.descriptions[0]
    for name in ("model_fingerprint", "layers"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ConfigError(
                f"prefill and decode serve different models: {name} "
                f"{getattr(ours, name)} against {getattr(theirs, name)}"
            )


def _link_message(prefill: GangClient, decode: GangClient, epoch: str) -> ConnectBridge:
    host = decode.descriptions[0]
    return ConnectBridge(
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

"""The router's attachment to gangs: it attaches, links, renews leases, and detaches.

`Cluster` tells its listener of gangs and links. `Reconciler` is the control loop behind it: it
works towards what the directory says whenever that changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from csps.protocols.core.errors import (
    ConfigError,
    CspsError,
    RanksHeld,
    Superseded,
)
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import KEEP_ALIVE_S, GangRole
from csps.protocols.gang.messages import LinkBroken
from csps.protocols.rpc.tls import Tls
from csps.services.cluster.fencing import Fencing, Generations
from csps.services.cluster.kv_links import KvLink, KvLinks
from csps.services.cluster.membership import ClusterView, Directory

_log = logging.getLogger(__name__)
PAIR: tuple[GangRole, ...] = ("prefill", "decode")
UNUSABLE = "gang rejected, see the router's log"
"""Text of `phase` after an operator's mistake; only the log names addresses and paths."""
STANDBY = "another router still serves"
"""Text of `phase` on a successor that waits."""


@dataclass(frozen=True, kw_only=True)
class ClusterDeadlines:
    """Deadlines in seconds."""

    attach_s: float = 10.0
    """Deadline for connecting to a rank, and again for the rank to accept this router."""
    link_s: float = 60.0
    """Deadline for all ranks of both gangs to form their common process group."""
    retry_s: float = 0.5
    """Pause after a failed attempt, unless the directory has news earlier."""
    close_s: float = 5.0
    """Deadline for the background tasks to end."""
    silence_s: float = 20.0
    """Time for which the directory may fail before this router renews its leases no longer: it may
    be cut off from Ray, which then starts another router. A registry that is replaced is back
    earlier."""
    replace_s: float = 10.0
    """Deadline for the directory to have a gang replaced."""
    replace_pause_s: float = 60.0
    """Pause before another gang of a role is replaced, unless the last one could be attached: over
    a broken network no gang can be reached."""


class ClusterListener(Protocol):
    """Receives facts about gangs and links, as callbacks on the event loop.

    `gang_up` comes before `link_up`, and `link_down` before `gang_down`. A link may go down and
    another one come up between the same two gangs, which keep their KV.
    """

    @property
    def busy(self) -> bool:
        """Return whether there are requests, waiting or begun."""
        ...

    def gang_up(self, gang: GangClient) -> None:
        """Take a gang of which every rank is attached."""

    def gang_down(self, gang: GangClient, reason: str) -> None:
        """Drop a lost gang with all its KV; the other gang lives on."""

    def link_up(self, link: KvLink) -> None:
        """Take a link over which two gangs can transfer KV."""

    def link_down(self, link: KvLink, reason: str) -> None:
        """Drop a broken link; KV not received over it never will be."""

    def stands_by(self, waits: bool) -> None:
        """Learn that another router still serves with the gangs, or no longer does."""

    def notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        """Take a notification from a rank, perhaps of a gang that is not or no longer attached.

        One named `link_broken` is for `Cluster.link_broken`.
        """


class Cluster:
    """Attaches to gangs that appear, links them, and fences other routers off.

    Args:
        directory: names the gangs that serve.
        secret: authenticates the router to the ranks.
        tls: encrypts the connections to ranks, if given.
        router_id: identifies this router to the ranks.
        generations: store of router generations.
        roles: roles of the gangs that serve: a pair, or "elastic" alone.
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
        tls: Tls | None = None,
    ) -> None:
        self._roles = tuple(roles)
        self._fencing = Fencing(generations, secret=secret, router_id=router_id, tls=tls)
        self._deadlines = deadlines or ClusterDeadlines()
        self._directory = directory
        self._reconciler = Reconciler(
            directory, self._connect, self._attempted, retry_s=self._deadlines.retry_s
        )
        self._links = KvLinks(self._link_up, self._link_down, deadline_s=self._deadlines.link_s)
        self._listener: ClusterListener | None = None
        self._gangs: dict[GangRole, GangClient] = {}
        self._priority_in_doubt = asyncio.Event()
        """Set when a gang was lost, or an attempt found gangs usable or unusable."""
        self._model: str | None = None
        """Fingerprint of the last attached gang's model."""
        self._tasks: list[asyncio.Task[None]] = []
        self._replaced: dict[GangRole, asyncio.Task[None]] = {}
        """Requests to replace a gang of a role, until one of it was attached or a pause is over."""
        self._draining = False
        self.trouble = "not started"
        """Why the cluster is not ready, for logs: it names addresses. `phase` is for clients."""
        self._reported = ""
        self._obstacle = ""
        """Cause of the last failure, in words that clients may read."""
        self._standing_by = False

    def listen(self, listener: ClusterListener) -> None:
        """Report gangs and links to `listener` from now on."""
        assert self._listener is None, "the cluster already has a listener"
        self._listener = listener

    @property
    def link(self) -> KvLink | None:
        """Return the current link; None while the cluster is not ready."""
        return self._links.current

    @property
    def phase(self) -> str:
        """Return what the cluster waits for, in words that clients may read; empty when ready."""
        silent = [gang.role for gang in self._gangs.values() if not gang.answering]
        if silent:
            return f"the {silent[0]} gang does not answer"
        if self.link is not None:
            return ""
        return f"{self._awaited}: {self._obstacle}" if self._obstacle else self._awaited

    @property
    def fault(self) -> BaseException | None:
        """Return the error with which a background task ended: a bug, after which gangs are no
        longer attached, or leases no longer renewed."""
        ended = (task for task in self._tasks if task.done() and not task.cancelled())
        return next(filter(None, (task.exception() for task in ended)), None)

    @property
    def generation(self) -> int:
        """Return the generation by which ranks tell this router from older ones; 0 until granted.

        An attached gang was attached under it. When another router turns out to be newer, all gangs
        go down and the next generation is claimed.
        """
        return self._fencing.generation

    @property
    def _awaited(self) -> str:
        missing = [role for role in self._roles if role not in self._gangs]
        return _waiting_for(missing) if missing else "connecting the gangs"

    async def start(self) -> None:
        """Start following the directory; the listener is told of gangs and links."""
        self._tasks = [
            asyncio.create_task(self._reconciler.follow(), name="follow the directory"),
            asyncio.create_task(self._reconciler.work(), name="keep gangs connected"),
            asyncio.create_task(self._renew_leases(), name="renew the leases of gangs"),
            asyncio.create_task(
                self._renew_takeover_priority(), name="renew the takeover priority"
            ),
        ]

    def stand_by(self, waits: bool) -> None:
        """Learn that a former rollout's router still serves, and has this one's gangs wait."""
        if waits != self._standing_by:
            self._standing_by = waits
            self._set_obstacle(STANDBY if waits else "")

    def drain(self) -> None:
        """Attach to no more gangs but keep the attached ones: new gangs may belong to a
        successor."""
        self._draining = True

    async def close(self) -> None:
        """Disconnect from all ranks, which drop their work for this router."""
        tasks = [*self._tasks, *self._replaced.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._deadlines.close_s)
        for gang in list(self._gangs.values()):
            self._lose(gang, "the router shuts down")
        await self._set_takeover_priority(False)

    # --- attempts ---

    def _attempted(self, error: BaseException | None) -> None:
        self._set_obstacle(_obstacle(error) or (STANDBY if self._standing_by else ""))
        if error is not None:
            self._report(error)

    def _set_obstacle(self, obstacle: str) -> None:
        former, self._obstacle = self._obstacle, obstacle
        if (former == UNUSABLE) != (obstacle == UNUSABLE):
            self._priority_in_doubt.set()
        if (former == STANDBY) != (obstacle == STANDBY) and self._listener is not None:
            self._listener.stands_by(obstacle == STANDBY)

    def _report(self, error: BaseException) -> None:
        """Keep the reason; log it once and not at every attempt."""
        if (trouble := str(error)) != self._reported:
            expected = isinstance(error, CspsError)
            _log.warning("cluster not ready: %s", error, exc_info=None if expected else error)
        self.trouble = self._reported = trouble

    async def _connect(self, view: ClusterView) -> None:
        if not self._draining:
            self._drop_replaced(view)
            await self._attach_found(view)
        await self._link_gangs()

    def _drop_replaced(self, view: ClusterView) -> None:
        for gang in list(self._gangs.values()):
            members = view.gang(gang.role)
            if members is None or members.gang_id == gang.gang_id:
                continue
            # A restarted directory may know an older gang before it knows the attached one.
            if members.incarnation >= gang.members.incarnation:
                self._lose(gang, f"gang {gang.gang_id} was replaced by {members.gang_id}")

    # --- attaching and losing gangs ---

    async def _attach_found(self, view: ClusterView) -> None:
        listener = self._listener
        assert listener is not None, "the cluster has no listener"
        found = [
            GangClient(role, members, listener.notified, deadline_s=self._deadlines.attach_s)
            for role in self._roles
            if role not in self._gangs and (members := view.gang(role)) is not None
        ]
        if not found and self.generation:
            return  # without asking a store that may not answer while the gangs do
        try:
            # A retried request must go on with the model that it began with.
            model = self._model if self._busy else None
            await self._fencing.attach(found, self._attached, model=model)
        except Superseded as error:
            for gang in list(self._gangs.values()):
                self._lose(gang, str(error))
            raise
        finally:
            for gang in found:
                if self._gangs.get(gang.role) is not gang:
                    self._replace_given_up(gang)

    def _attached(self, gang: GangClient) -> None:
        self._gangs[gang.role] = gang
        self._model = gang.descriptions[0].model_fingerprint
        if replaced := self._replaced.pop(gang.role, None):
            replaced.cancel()
        gang.lost.add_done_callback(lambda lost: self._lose(gang, lost.result()))
        _log.info(
            "attached to %s gang %s (%d ranks, generation %d)",
            gang.role, gang.gang_id, gang.world_size, self.generation,
        )  # fmt: skip
        if self._listener is not None:
            self._listener.gang_up(gang)

    async def _renew_leases(self) -> None:
        while True:
            renew = self._reconciler.failing_s <= self._deadlines.silence_s
            for gang in self._gangs.values():
                gang.keep_alive(renew=renew)  # one given up is lost in the next loop iteration
            await asyncio.sleep(KEEP_ALIVE_S)

    @property
    def _busy(self) -> bool:
        return self._listener is not None and self._listener.busy

    async def _renew_takeover_priority(self) -> None:
        """Claim priority over newer routers while requests lack a gang."""
        while True:
            self._priority_in_doubt.clear()
            usable = self._obstacle != UNUSABLE
            await self._set_takeover_priority(
                self._busy and self.link is None and usable and not self._draining
            )
            await wait_at_most(self._priority_in_doubt, KEEP_ALIVE_S)

    async def _set_takeover_priority(self, wanted: bool) -> None:
        try:
            await self._fencing.set_takeover_priority(wanted)
        except Exception as exc:  # whatever a store of another process may raise
            _log.warning("failed to update router priority: %s", exc)

    def link_broken(self, gang: GangClient, broken: LinkBroken) -> None:
        """Link two gangs again whose link a rank found broken; ignore older links."""
        if reason := self._links.broken(gang, broken):
            self.trouble = reason
            self._reconciler.retry_now()

    def _lose(self, gang: GangClient, reason: str) -> None:
        if self._gangs.get(gang.role) is not gang:
            return
        del self._gangs[gang.role]
        gang.disconnect(reason)
        self._links.disconnect(reason)
        self.trouble = reason
        _log.warning("lost %s gang %s: %s", gang.role, gang.gang_id, reason)
        if self._listener is not None:
            self._listener.gang_down(gang, reason)
        self._priority_in_doubt.set()
        self._reconciler.retry_now()
        self._replace_given_up(gang)

    # --- replacing ---

    def _replace_given_up(self, gang: GangClient) -> None:
        """Have a gang replaced of which a rank is silent or hangs: the process may be frozen, or
        healthy for everybody but this router."""
        if gang.given_up and gang.role not in self._replaced and not self._draining:
            self._replaced[gang.role] = asyncio.create_task(self._replace(gang))

    async def _replace(self, gang: GangClient) -> None:
        try:
            async with asyncio.timeout(self._deadlines.replace_s):
                known = await self._directory.replace(gang.gang_id)
        except Exception as exc:  # whatever a directory of another process may raise
            _log.warning("%s gang %s was not replaced: %s", gang.role, gang.gang_id, exc)
        else:
            if known:
                _log.warning("%s gang %s is being replaced", gang.role, gang.gang_id)
                await asyncio.sleep(self._deadlines.replace_pause_s)
        del self._replaced[gang.role]

    # --- linking ---

    async def _link_gangs(self) -> None:
        if self.link is not None:
            return
        gangs = [self._gangs[role] for role in self._roles if role in self._gangs]
        if len(gangs) < len(self._roles):
            self.trouble = self._awaited
            return
        prefill, decode = gangs[0], gangs[-1]
        self.trouble = f"linking gangs {prefill.gang_id} and {decode.gang_id}"
        await self._links.connect(prefill, decode, generation=self.generation)

    def _link_up(self, link: KvLink) -> None:
        self.trouble, self._reported = "", ""
        if self._listener is not None:
            self._listener.link_up(link)

    def _link_down(self, link: KvLink, reason: str) -> None:
        if self._listener is not None:
            self._listener.link_down(link, reason)


def _obstacle(error: BaseException | None) -> str:
    if isinstance(error, ConfigError):
        return UNUSABLE
    return STANDBY if isinstance(error, RanksHeld | Superseded) else ""


def _waiting_for(roles: Sequence[GangRole]) -> str:
    named = (f"an {role}" if role == "elastic" else f"a {role}" for role in roles)
    return f"waiting for {' and '.join(named)} gang"


class Reconciler:
    """Works towards what the directory says, over and over.

    One task follows the directory, another one works. The work starts over whenever something
    changes, so an attempt to reach ranks that have vanished delays nothing.

    Args:
        reconcile: one attempt at what a view says, until nothing is left to do.
        ended: called after each attempt that was not outdated, with its error, if any.
        retry_s: pause after a failed attempt, unless there is news earlier.
    """

    def __init__(
        self,
        directory: Directory,
        reconcile: Callable[[ClusterView], Coroutine[Any, Any, None]],
        ended: Callable[[BaseException | None], None],
        *,
        retry_s: float,
    ) -> None:
        self._directory, self._reconcile, self._ended = directory, reconcile, ended
        self._retry_s = retry_s
        self._view = ClusterView()
        self._changed = asyncio.Event()
        self._failing_since: float | None = None

    @property
    def failing_s(self) -> float:
        """Time since the directory began to fail; 0 if it answered last."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def retry_now(self) -> None:
        """Start another attempt: what the last one achieved is lost."""
        self._changed.set()

    async def follow(self) -> None:
        """Follow the directory, for ever."""
        version = -1
        while True:
            try:
                version, view = await self._directory.wait_change(version)
            except Exception as exc:  # whatever a directory of another process may raise
                _log.warning("the gang directory does not answer, retrying: %s", exc)
                self._failing_since = self._failing_since or time.monotonic()
                await asyncio.sleep(self._retry_s)
                continue
            self._failing_since = None
            if view != self._view:
                self._view = view
                self._changed.set()

    async def work(self) -> None:
        """Make one attempt after another, for ever."""
        while True:
            self._changed.clear()
            await wait_at_most(self._changed, await self._attempt())

    async def _attempt(self) -> float | None:
        """Work towards the view until done, failed or outdated; return how long to pause."""
        work = asyncio.create_task(self._reconcile(self._view))
        news = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({work, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            work.cancel()  # no effect if it is done
            await asyncio.wait({work, news})
        if work.cancelled():
            return None
        error = work.exception()
        self._ended(error)
        return None if error is None else self._retry_s


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most `seconds` if given."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

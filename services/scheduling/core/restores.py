"""Reads KV back from files before a request starts, where that is faster than to compute it.

Each waiting request is considered once, when few are before it. It waits while its gang reads, but
not for longer than it would take to compute what is read: then it starts without. What was read
joins the prefix cache in any case, as if the gang had retained it all the time. If an instance
could not read its part, nothing is retained, and the files count as gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from functools import partial

from csps.protocols.core.placement import tokens_on
from csps.services.scheduling.core.promises import Promises
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.events.events import (
    GangId,
    RequestId,
    Restored,
    Saved,
    SequenceId,
    gang_of,
)
from csps.services.scheduling.events.limits import SECOND_NS, Timer, Timers
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.saved_runs import Restorable
from csps.services.scheduling.state.state import Gang, Live, PrefixRef, Priority, Request, Round

_log = logging.getLogger(__name__)

AHEAD = 8
"""Requests at the head of each queue that are considered: KV that is read long before it is needed
takes slots from others."""
OVERHEAD_NS = 5_000_000
"""Time of a restore besides reading: two messages, and files to be found and opened."""


class Restore(Live, kw_only=True, eq=False):
    """Files that are being read."""

    gang: Gang
    request: Request
    found: Restorable
    began_ns: int
    timer: Timer
    """Timer that ends the request's wait."""
    ref: PrefixRef | None
    """Reference to the cached prefix that the KV follows."""
    good: bool = True
    """False once an instance could not read its part."""


class Restores:
    """Restores under way, and the requests that wait for them."""

    def __init__(
        self,
        this_round: Round,
        timers: Timers,
        gangs: Gangs,
        requests: Requests,
        promises: Promises,
        prefix: PrefixCache,
    ) -> None:
        self._round, self._timers, self._gangs = this_round, timers, gangs
        self._requests, self._promises, self._prefix = requests, promises, prefix
        self._reading: dict[tuple[GangId, SequenceId], Restore] = {}
        self._waiting: dict[RequestId, None] = {}
        """Requests that wait for files."""

    @property
    def refs(self) -> Iterator[PrefixRef]:
        """References to prefixes that are being extended."""
        return (restore.ref for restore in self._reading.values() if restore.ref is not None)

    def startable(
        self, queues: Mapping[Priority, Many[Request]]
    ) -> Mapping[Priority, Many[Request]]:
        """Return the queues without requests that wait for files."""
        if not self._waiting:
            return queues
        return {
            priority: [request for request in queue if request.id not in self._waiting]
            for priority, queue in queues.items()
        }

    # --- beginning ---

    def begin(self) -> None:
        """Begin to read what the next requests want."""
        if not any(map(len, self._prefix.saved.values())):
            return
        for queue in self._requests.queue.startable.values():
            for request in queue[:AHEAD]:
                if request.hashes and not request.attempts and not request.restored:
                    self._consider(request)

    def _consider(self, request: Request) -> None:
        for gang in {pair.prefill.id: pair.prefill for pair in self._gangs.pairs}.values():
            found = self._prefix.restorable(request, gang)
            if found is None:
                continue
            computing_ns = self._computing_ns(request, gang, found)
            request.restored = not self._pays_off(gang, found, computing_ns)
            if not request.restored and self._has_room(request, gang, found):
                self._begin(request, gang, found, computing_ns)
            return

    def _computing_ns(self, request: Request, gang: Gang, found: Restorable) -> int:
        """Predict how long it takes to compute what files have; 0 if that is unknown."""
        tokens = request.prompt_tokens
        without_ns, _ = self._promises.prompt_ns(tokens, found.start, gang)
        with_ns, _ = self._promises.prompt_ns(tokens, found.stop, gang)
        return without_ns - with_ns

    def _pays_off(self, gang: Gang, found: Restorable, computing_ns: int) -> bool:
        most = max(tokens_on(found.slices).values())
        speed = self._prefix.saved[gang.id].bytes_per_s
        read_ns = OVERHEAD_NS + most * gang.kv_bytes_per_token * SECOND_NS // max(1, speed)
        return read_ns < computing_ns and self._prefix.may_cache(gang, found.slices)

    def _has_room(self, request: Request, gang: Gang, found: Restorable) -> bool:
        """Return whether all slots are empty now; if others can be evicted, evict."""
        needed = tokens_on(found.slices)
        instances = self._gangs.instances
        if any(count > instances[instance].free_slots for instance, count in needed.items()):
            return False
        ref = self._ref(request, gang, found)  # what it follows must not be evicted for it
        empty = self._prefix.make_room(needed)
        if ref is not None:
            self._prefix.unref(ref)
        return empty

    def _ref(self, request: Request, gang: Gang, found: Restorable) -> PrefixRef | None:
        return self._prefix.ref(request, gang, found.start) if found.start else None

    def _begin(self, request: Request, gang: Gang, found: Restorable, computing_ns: int) -> None:
        source, now_ns = self._gangs.next_id("sequence"), self._round.now_ns
        request.restored = True
        self._waiting[request.id] = None
        self._reading[gang.id, source] = Restore(
            gang=gang,
            request=request,
            found=found,
            began_ns=now_ns,
            timer=self._timers.at(now_ns + computing_ns, partial(self._release, request)),
            ref=self._ref(request, gang, found),
        )
        self._prefix.restore(gang, source, found)
        _log.debug(
            "reading tokens %d to %d of request %d from files as sequence %d",
            *(found.start, found.stop, request.id, source),
        )

    def _release(self, request: Request) -> None:
        """Let a request start, whatever has become of its files."""
        self._waiting.pop(request.id, None)
        self._round.stale = True

    # --- events ---

    def saved(self, event: Saved) -> None:
        """Note what an instance has in files."""
        if (saved := self._prefix.saved.get(gang_of(event.instance))) is not None:
            saved.add(event.instance, event.runs, event.bytes_per_s)
            self._round.stale = True

    def restored(self, event: Restored) -> None:
        """Note that an instance has read its part, or could not."""
        of = gang_of(event.instance), event.sequence_id
        if (restore := self._reading.get(of)) is None:
            return
        self._gangs.note_heartbeat(event.instance)
        expected = tokens_on(restore.found.slices).get(event.instance, 0)
        restore.good = restore.good and event.tokens == expected
        if self._prefix.answered(restore.gang, event.sequence_id, event.instance):
            del self._reading[of]
            self._end(event.sequence_id, restore)

    def _end(self, source: SequenceId, restore: Restore) -> None:
        gang, found = restore.gang, restore.found
        saved, took_ns = self._prefix.saved[gang.id], self._round.now_ns - restore.began_ns
        if restore.good:
            read = max(tokens_on(found.slices).values()) * gang.kv_bytes_per_token
            saved.note_speed(read * SECOND_NS // max(1, took_ns))
        else:
            saved.forget(part.name for part in found.parts)
        self._prefix.restored(gang, source, restore.request, found, good=restore.good)
        if restore.ref is not None:
            self._prefix.unref(restore.ref)
        self._timers.cancel(restore.timer)
        self._release(restore.request)

    def drop(self, gang: Gang) -> None:
        """Drop what a gang that is gone was reading."""
        for of in [of for of in self._reading if of[0] == gang.id]:
            restore = self._reading.pop(of)
            self._timers.cancel(restore.timer)
            restore.request.restored = False
            self._release(restore.request)

    def check(self) -> None:
        """Assert that requests wait only for files that are being read."""
        reading = {restore.request.id for restore in self._reading.values()}
        assert self._waiting.keys() <= reading, "a request waits for files that nobody reads"

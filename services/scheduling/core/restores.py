"""Reads KV back from files before a request starts, where that is faster than to compute it.

A gang that has come up lists its files first; requests that may want some wait for the list, but
not long. Then each waiting request is considered once, when few are before it. It waits while its
gang reads, but not for longer than it would take to compute what is read: then it starts without.
What was read joins the prefix cache in any case, as if the gang had retained it all the time. If an
instance could not read its part, nothing is retained, and the files count as gone.

Where reading and computing a prompt take similar times, an idle prefill gang does both at once: it
computes the prompt's *front*, whose KV depends on nothing, while it reads the KV behind that. The
front is a request to the policy, which plans it like any other, and nobody who may start comes
before it. It ends at the beginning of a file, so that both ends are predicted to come as early as
possible. KV read behind a front is retained after the front's own KV. Once a front has started, its
request waits for the end of it, which the deadlines of steps bound.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from functools import partial
from operator import ge

from csps.configurator.costs.cost_table import EXACT
from csps.protocols.attention.plan import AUTO, RING_CLASSES
from csps.protocols.core.placement import tokens_on
from csps.services.scheduling.core.promises import Promises
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.events.events import (
    GangId,
    InstanceId,
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
LISTING_NS = 2 * SECOND_NS
"""Longest wait for the list of what a gang has in files."""
OVERHEAD_NS = 5_000_000
"""Time of a restore besides reading: two messages, and files to be found and opened."""
EXACT_CLASSES = frozenset((EXACT, AUTO, *RING_CLASSES))
"""Classes of requests whose KV is the same whatever is computed with it."""
FRONT_SAVES = 5
"""Smallest saving for which a front is computed, as 1/N of the time. Predictions err by about as
much."""


class Restore(Live, kw_only=True, eq=False):
    """Files that are being read."""

    gang: Gang
    request: Request
    found: Restorable
    began_ns: int
    """Time since when nothing else is read before it."""
    timer: Timer
    """Timer that ends the request's wait."""
    ref: PrefixRef | None
    """Reference to the cached prefix that the KV follows."""
    front: Request | None = None
    """Beginning of the prompt that is computed meanwhile."""
    front_over: bool = True
    """False until the front has ended, if there is one."""
    took_ns: int | None = None
    """Time of reading, once all instances have answered."""
    good: bool = True
    """False once an instance could not read its part."""


class Listing(Live, kw_only=True, eq=False):
    """Gang that has not listed its files yet."""

    unlisted: dict[InstanceId, None]
    """Instances that still owe their list."""
    timer: Timer
    """Timer that ends the wait."""


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
        self._listing: dict[GangId, Listing] = {}
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
        """Return the queues without requests that wait for files, or for a list of them. Fronts
        that have not started stand for their requests."""
        unlisted = self._listing and all(
            pair.prefill.id in self._listing or pair.decode.id in self._listing
            for pair in self._gangs.pairs
        )
        if not self._waiting and not unlisted:
            return queues
        fronts = self._requests.fronts
        return {
            priority: [
                fronts.get(request.id, request)
                for request in queue
                if not (unlisted and _may_read(request))
                if not self._waits(request)
            ]
            for priority, queue in queues.items()
        }

    def blocked(self) -> list[Request]:
        """Return the blocked requests that do not wait for files: nobody passes one that does."""
        return [request for request in self._requests.blocked if not self._waits(request)]

    def _waits(self, request: Request) -> bool:
        """Return whether a request waits for files, and no front stands for it."""
        return request.id in self._waiting and request.id not in self._requests.fronts

    # --- lists ---

    def add(self, gang: Gang) -> None:
        """Wait for the list of files of a gang that has come up."""
        if gang.id in self._prefix.saved:
            until_ns = self._round.now_ns + LISTING_NS
            self._listing[gang.id] = Listing(
                unlisted={instance.id: None for instance in gang.instances},
                timer=self._timers.at(until_ns, partial(self._listed, gang.id)),
            )

    def _listed(self, gang: GangId) -> None:
        """Let requests start on a gang, whether it has listed its files or not."""
        if (listing := self._listing.pop(gang, None)) is not None:
            self._timers.cancel(listing.timer)
        self._round.stale = True

    # --- beginning ---

    def begin(self) -> None:
        """Begin to read what the next requests want."""
        if not any(map(len, self._prefix.saved.values())):
            return
        first = True
        for queue in self._requests.queue.startable.values():
            for request in queue[:AHEAD]:
                if _may_read(request):
                    self._consider(request, first=first)
                first = first and request.id in self._waiting
            first = first and len(queue) <= AHEAD

    def _consider(self, request: Request, *, first: bool) -> None:
        """Begin to read what a request wants.

        Args:
            first: all before it wait for files, so that a front of it starts first.
        """
        for pair in self._gangs.pairs:
            if (found := self._restorable(request, pair.decode)) is None:
                continue
            rest = request.prompt_tokens - found.stop
            if pair.decode.may_prefill or rest > self._prefix.settings.decode_rest_tokens:
                continue
            # It computes the rest itself, in place of the prefill gang.
            cached = self._prefix.longest(request, pair.prefill.id)
            computing_ns, _ = self._promises.prompt_ns(
                request.prompt_tokens, cached.tokens if cached else 0, pair.prefill
            )
            if self._pays_off(pair.decode, found, computing_ns):
                self._begin_with_room(request, pair.decode, found, computing_ns)
                return
        for gang in {pair.prefill.id: pair.prefill for pair in self._gangs.pairs}.values():
            if (found := self._restorable(request, gang)) is None:
                continue
            computing_ns = self._computing_ns(request, gang, found)
            part = self._first_part(request, gang, found, computing_ns, first=first)
            request.restored = part is None
            if part is not None:
                self._begin_with_room(request, gang, found, computing_ns, first_part=part)
            return

    def _restorable(self, request: Request, gang: Gang) -> Restorable | None:
        """Return what files have of a prompt behind what its gang has cached; None if nothing, or
        if it is not listed yet."""
        return None if gang.id in self._listing else self._prefix.restorable(request, gang)

    def _computing_ns(self, request: Request, gang: Gang, found: Restorable) -> int:
        """Predict how long it takes to compute what files have; 0 if that is unknown."""
        tokens = request.prompt_tokens
        without_ns, _ = self._promises.prompt_ns(tokens, found.start, gang)
        with_ns, _ = self._promises.prompt_ns(tokens, found.stop, gang)
        return without_ns - with_ns

    def _first_part(
        self, request: Request, gang: Gang, found: Restorable, computing_ns: int, *, first: bool
    ) -> int | None:
        """Return the first part that is worth reading, behind a front if it is not the first of
        all; None if none is."""
        if not self._prefix.may_cache(gang, found.slices):
            return None
        alone_ns = min(self._reading_ns(gang, found), computing_ns)
        if first and self._may_split(request, gang) and self._is_idle(gang):
            # The more is computed, the less is read: best is one of the two where both take alike.
            times_ns = partial(self._at_once_ns, gang, found)
            parts = [
                number
                for number, part in enumerate(found.parts)
                if number and self._requests.may_be_front(request, part.start)
            ]
            even = bisect_left(parts, True, key=lambda part: ge(*times_ns(part)))
            ends = ((max(times_ns(part)), part) for part in parts[max(0, even - 1) : even + 1])
            best_ns, best = min(ends, default=(alone_ns, 0))
            if alone_ns - best_ns > alone_ns // FRONT_SAVES:
                return best
        return 0 if self._pays_off(gang, found, computing_ns) else None

    def _at_once_ns(self, gang: Gang, found: Restorable, part: int) -> tuple[int, int]:
        """Predict how long it takes to compute what is before a part, and to read the rest."""
        behind = found.from_part(part)
        front_ns, _ = self._promises.prompt_ns(behind.start, found.start, gang)
        return OVERHEAD_NS + front_ns, self._reading_ns(gang, behind)

    def _may_split(self, request: Request, gang: Gang) -> bool:
        """Return whether a front of a request can be computed where files are read: on a gang that
        only prefills, as others compute what they decode."""
        return (
            not gang.may_decode
            and request.cls in EXACT_CLASSES
            and not self._prefix.settings.decode_rest_tokens
            and all(pair.prefill is gang for pair in self._gangs.pairs)
        )

    def _is_idle(self, gang: Gang) -> bool:
        """Return whether a front would be computed at once."""
        return not self._requests.fronts and not any(instance.steps for instance in gang.instances)

    def _pays_off(self, gang: Gang, found: Restorable, computing_ns: int) -> bool:
        reading_ns = self._reading_ns(gang, found)
        return reading_ns < computing_ns and self._prefix.may_cache(gang, found.slices)

    def _reading_ns(self, gang: Gang, found: Restorable) -> int:
        """Predict how long it takes to read what files have, behind what is being read."""
        tokens = tokens_on(found.slices)
        for before in self._unread(gang):
            for instance in tokens.keys() & before.keys():
                tokens[instance] += before[instance]
        most = max(tokens.values())
        speed = self._prefix.saved[gang.id].bytes_per_s
        return OVERHEAD_NS + most * gang.kv_bytes_per_token * SECOND_NS // max(1, speed)

    def _unread(self, gang: Gang) -> Iterator[dict[InstanceId, int]]:
        """Yield the tokens on each instance of all that a gang is reading: an instance reads one
        after another."""
        for restore in self._reading.values():
            if restore.gang is gang and restore.took_ns is None:
                yield tokens_on(restore.found.slices)

    def _begin_with_room(
        self,
        request: Request,
        gang: Gang,
        found: Restorable,
        computing_ns: int,
        *,
        first_part: int = 0,
    ) -> None:
        """Begin to read if there is room.

        Args:
            computing_ns: longest wait.
            first_part: what is before it is computed meanwhile.
        """
        if not self._has_room(request, gang, found):
            return
        front, behind = None, found.from_part(first_part)
        if first_part:
            block = self._prefix.settings.block_tokens
            front = self._requests.begin_front(request, behind.start, block)
        self._begin(request, gang, behind, computing_ns, found.start, front)

    def _has_room(self, request: Request, gang: Gang, found: Restorable) -> bool:
        """Return whether all slots are empty now; if others can be evicted, evict."""
        needed = tokens_on(found.slices)
        instances = self._gangs.instances
        if any(count > instances[instance].free_slots for instance, count in needed.items()):
            return False
        ref = self._ref(request, gang, found.start)  # what it follows must not be evicted for it
        empty = self._prefix.make_room(needed)
        if ref is not None:
            self._prefix.unref(ref)
        return empty

    def _ref(self, request: Request, gang: Gang, tokens: int) -> PrefixRef | None:
        return self._prefix.ref(request, gang, tokens) if tokens else None

    def _begin(
        self,
        request: Request,
        gang: Gang,
        found: Restorable,
        computing_ns: int,
        cached: int,
        front: Request | None,
    ) -> None:
        source, now_ns = self._gangs.next_id("sequence"), self._round.now_ns
        request.restored = True
        # A front counts as what runs, and what is read is no work.
        _, request.work_ns = self._promises.prompt_ns(request.prompt_tokens, found.stop, gang)
        self._waiting[request.id] = None
        self._reading[gang.id, source] = Restore(
            gang=gang,
            request=request,
            found=found,
            began_ns=now_ns,
            timer=self._timers.at(
                now_ns + computing_ns, partial(self._wait_no_longer, (gang.id, source))
            ),
            ref=self._ref(request, gang, cached),
            front=front,
            front_over=front is None,
        )
        self._prefix.restore(gang, source, found)
        _log.debug(
            "reading tokens %d to %d of request %d from files as sequence %d%s",
            *(found.start, found.stop, request.id, source),
            "" if front is None else f", computing from token {cached} meanwhile",
        )

    def _wait_no_longer(self, of: tuple[GangId, SequenceId]) -> None:
        """Let a request start before all is read. A front that has started is waited for: its
        request would compute the same beside it."""
        restore = self._reading[of]
        front = restore.front
        if restore.front_over or (front is not None and front.sequence is None):
            self._release(restore.request)

    def _release(self, request: Request) -> None:
        """Let a request start, whatever has become of its files."""
        if request.id in self._waiting:
            del self._waiting[request.id]
            self._promises.predict_times(request)
        self._requests.give_up_front(request.id)
        self._round.stale = True

    # --- events ---

    def saved(self, event: Saved) -> None:
        """Note what an instance has in files."""
        gang = gang_of(event.instance)
        if (saved := self._prefix.saved.get(gang)) is not None:
            saved.add(event.instance, event.runs, event.bytes_per_s)
            self._round.stale = True
        if event.listed and (listing := self._listing.get(gang)) is not None:
            listing.unlisted.pop(event.instance, None)
            if not listing.unlisted:
                self._listed(gang)

    def restored(self, event: Restored) -> None:
        """Note that an instance has read its part, or could not."""
        of = gang_of(event.instance), event.sequence_id
        if (restore := self._reading.get(of)) is None:
            return
        self._gangs.note_heartbeat(event.instance)
        expected = tokens_on(restore.found.slices).get(event.instance, 0)
        restore.good = restore.good and event.tokens == expected
        if self._prefix.answered(restore.gang, event.sequence_id, event.instance):
            restore.took_ns = self._round.now_ns - restore.began_ns
            self._go_on_behind(restore)
            self._note_read(restore)
            self._end_if_over(of, restore)

    def _go_on_behind(self, over: Restore) -> None:
        """Note that what waited behind a restore is read from now on."""
        instances = tokens_on(over.found.slices).keys()
        for behind in self._reading.values():
            if behind.gang is over.gang and instances & tokens_on(behind.found.slices).keys():
                behind.began_ns = self._round.now_ns

    def _note_read(self, restore: Restore) -> None:
        """Note how fast files were read, or that they are gone."""
        saved, found = self._prefix.saved[restore.gang.id], restore.found
        if restore.good and restore.took_ns is not None:
            read = max(tokens_on(found.slices).values()) * restore.gang.kv_bytes_per_token
            saved.note_speed(read * SECOND_NS // max(1, restore.took_ns))
        else:
            saved.forget(part.name for part in found.parts)

    def end_fronts(self) -> None:
        """Note which fronts are over. What has become of them, the prefix cache knows."""
        for of, restore in list(self._reading.items()):
            front = restore.front
            if front is None or restore.front_over or not self._is_over(front):
                continue
            restore.front_over = True
            known = self._prefix.beginning(restore.request, restore.gang.id, restore.found.start)
            if known is not None and known.tokens == restore.found.start:
                before = restore.ref
                restore.ref = self._ref(restore.request, restore.gang, known.tokens)
                if before is not None:
                    self._prefix.unref(before)
            self._end_if_over(of, restore)
            if of in self._reading and restore.timer.at_ns <= self._round.now_ns:
                self._release(restore.request)

    def _is_over(self, front: Request) -> bool:
        if front.sequence is None:
            return self._requests.fronts.get(front.id) is not front
        return front.sequence.over

    def _end_if_over(self, of: tuple[GangId, SequenceId], restore: Restore) -> None:
        """End a restore once its files are read and its front is over."""
        if restore.took_ns is None or not restore.front_over:
            return
        del self._reading[of]
        gang, found, request = restore.gang, restore.found, restore.request
        self._prefix.restored(gang, of[1], request, found, good=restore.good)
        if restore.ref is not None:
            self._prefix.unref(restore.ref)
        self._timers.cancel(restore.timer)
        self._release(request)

    def drop(self, gang: Gang) -> None:
        """Drop what a gang that is gone was listing and reading.

        Reading, or computing a front, may be what killed it: the next gang reads once more for a
        request, and computes no other front of it.
        """
        self._listed(gang.id)
        for of in [of for of in self._reading if of[0] == gang.id]:
            restore = self._reading.pop(of)
            self._timers.cancel(restore.timer)
            request, front = restore.request, restore.front
            request.lost_restores += 1
            front_started = front is not None and front.sequence is not None
            request.restored = front_started or request.lost_restores > 1
            self._release(request)

    def check(self) -> None:
        """Assert that requests wait only for files that are being listed or read."""
        assert self._listing.keys() <= self._prefix.saved.keys(), "a gang that is gone lists files"
        reading = {restore.request.id for restore in self._reading.values()}
        assert self._waiting.keys() <= reading, "a request waits for files that nobody reads"


def _may_read(request: Request) -> bool:
    """Return whether a request may wait for files: once, and not after a fault."""
    return bool(request.hashes) and not request.attempts and not request.restored

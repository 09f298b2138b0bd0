"""One pair of gangs in a round of the policy `csps`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice

import msgspec

from csps.services.scheduling.cost import EXACT, Choice
from csps.services.scheduling.decisions import (
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    Ride,
    StartPlan,
)
from csps.services.scheduling.ids import GangId, InstanceId, RequestId
from csps.services.scheduling.policies.csps_options import CspsOptions
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, DecodeOverlay, Placed
from csps.services.scheduling.policies.decode_rides import DecodeRides
from csps.services.scheduling.policies.near_rooms import Group, NearRooms
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.policies.reuse import Reuse, Reuses, reuse_plan
from csps.services.scheduling.ring_rows import in_zigzag
from csps.services.scheduling.shares import bounds_of, level_shares
from csps.services.scheduling.view import PairView, RequestView, View

FILLERS_PASS = 8
"""Waiting prompts that others may pass to fill the slack of a step."""


class Verdict(IntEnum):
    """What becomes of a request in a round; the least is the best."""

    STARTS = 0
    WAITS = 1
    """For instances to finish other steps."""
    TOO_LATE = 2
    """It would pass somebody who is blocked for longer than is allowed."""
    BLOCKED = 3
    """There are not slots enough."""


class _Job(msgspec.Struct, eq=False):
    """A step that is being put together."""

    group: list[Spot]
    cls: str
    strategy: str
    urgent: bool
    members: list[tuple[RequestView, Placed]] = msgspec.field(default_factory=list)
    tokens: int = 0
    predicted_ns: int = 0
    shares: list[int] | None = None
    """Tokens for each of the group; None for a single instance."""


_Wait = tuple[int, int, int, int, int, Spot]
"""How long an urgent prompt waits on an instance, the least is the best: time of urgent steps, time
that its long steps were delayed by, when it is free, its place, its version, and itself."""


class CspsPair:
    """What starts on a pair of gangs in this round."""

    def __init__(
        self, pair: PairView, view: View, options: CspsOptions, decode: DecodeOptions
    ) -> None:
        self._options, self._cost, self._now_ns = options, view.cost, view.now_ns
        self._gang, self._max_positions = pair.decode, pair.max_positions
        self._prefill = PrefillOverlay(pair.prefill, view.now_ns, options)
        self._decode = DecodeOverlay(pair.decode, decode)
        self._view, self._prefill_gang = view, pair.prefill.id
        self._reuses = Reuses(self._prefill, view.cost)
        self._rides = DecodeRides(pair.decode, view.cost, decode)
        self._jobs: list[_Job] = []
        self._rest: list[StartPlan | Ride] = []
        """Of prompts that are computed behind what was kept of them."""
        self._batches: dict[tuple[InstanceId, str], _Job] = {}
        self._started: dict[RequestId, None] = {}
        self._rooms: NearRooms | None = None
        self._waits: list[_Wait] | None = None
        self._by_ns: dict[InstanceId, int] = {}
        """When the urgent steps of an instance must be over, or a member of one would pass
        somebody for too long."""
        short = max(1, options.short_tokens)
        self._turn_ns = self._cost.best(EXACT, self._prefill.single, 0, short).time_ns
        self._vain: dict[str, tuple[int, int]] = {}
        """Tokens and time of a short prompt of a class that found no instance."""

    def started(self, request: RequestView) -> bool:
        """The request has a place."""
        return request.id in self._started

    def plans(self) -> Iterator[StartPlan | Ride]:
        """Everything that starts here."""
        yield from map(_plan, self._jobs)
        yield from self._rest

    # --- short prompts ---

    def start_urgent(self, request: RequestView, end_by_ns: int | None) -> Verdict:
        """Compute a short prompt inside whatever runs on the instance where it waits least."""
        tokens = request.prompt_tokens
        placed = self._place(request)
        if placed is None:
            return Verdict.BLOCKED
        waited_ns = self._now_ns - request.submitted_ns
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens, waited_ns)
        spot = self._least_wait(request, choice.time_ns)
        soonest_ns = None if spot is None else spot.urgent_ns + choice.time_ns
        if self._start_end(request, placed, soonest_ns, end_by_ns):
            return Verdict.STARTS
        if spot is None:
            roomy = any(it.free >= tokens for it in self._prefill.spots)
            return Verdict.WAITS if roomy else Verdict.BLOCKED
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request)
        if by_ns is not None and self._now_ns + spot.urgent_ns + choice.time_ns > by_ns:
            return Verdict.TOO_LATE
        self._add(self._batch(spot, request, choice), request, placed)
        self._bound_urgent(spot, by_ns)
        if self._rooms is not None:
            self._rooms.update(spot)
        return Verdict.STARTS

    def _bound_urgent(self, spot: Spot, by_ns: int | None) -> None:
        """Have the urgent steps of an instance over by then."""
        if by_ns is not None:
            self._by_ns[spot.id] = min(by_ns, self._by_ns.get(spot.id, by_ns))

    def start_end(self, request: RequestView, end_by_ns: int | None, *, in_turn: bool) -> bool:
        """Compute the end of a longer prompt, if that is short and all before it was kept.

        Args:
            in_turn: nobody before it in its line waits, so that it may also start as a long one.
        """
        most = self._options.short_tokens
        if not (self._left(request, self._prefill_gang) <= most or self._may_ride(request)):
            return False
        placed = self._place(request)
        if placed is None:
            return False
        reuse = self._long_reuse(request) if in_turn else None
        soonest_ns = None if reuse is None else reuse.ends_ns - self._now_ns
        return self._start_end(request, placed, soonest_ns, end_by_ns)

    def _left(self, request: RequestView, gang: GangId) -> int:
        """What a gang would have to compute of a prompt."""
        cached = self._view.cached(request, gang)
        return request.prompt_tokens - (cached.tokens if cached else 0)

    def _may_ride(self, request: RequestView) -> bool:
        return self._rides.most > 0 and self._left(request, self._gang.id) <= self._rides.most

    def _start_end(
        self,
        request: RequestView,
        placed: Placed,
        soonest_ns: int | None,
        end_by_ns: int | None,
    ) -> bool:
        """Compute the end of a prompt inside whatever runs on the instances that have kept what
        comes before it, or in an iteration of the gang that will decode it: wherever it is over
        first, if that is no later than elsewhere.

        Args:
            soonest_ns: when it would be computed elsewhere, from now on; None if nobody can.
        """
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request) - self._now_ns
        within_ns = min((it for it in (soonest_ns, by_ns) if it is not None), default=None)
        cached = self._view.cached(request, self._prefill_gang)
        reuse = self._reuses.end(request, cached, self._options.short_tokens)
        if reuse is not None:
            if within_ns is None or reuse.urgent_end_ns <= within_ns:
                within_ns = reuse.urgent_end_ns
            else:
                reuse = None
        if ride := self._rides.ride(request, placed, within_ns):
            self._rest.append(ride)
        elif reuse is not None:
            self._start_urgent_reuse(request, reuse, placed, by_ns)
        else:
            return False
        self._decode.take(placed, request.output_tokens)
        self._started[request.id] = None
        return True

    def _start_urgent_reuse(
        self, request: RequestView, reuse: Reuse, placed: Placed, by_ns: int | None
    ) -> None:
        self._reuses.take(reuse)
        for spot, tokens in zip(reuse.spots, reuse.shares, strict=True):
            self._bound_urgent(spot, None if by_ns is None else self._now_ns + by_ns)
            self._prefill.start_urgent(spot, tokens, reuse.time_ns)
            if self._rooms is not None:
                self._rooms.update(spot)
        self._rest.append(reuse_plan(request, reuse, placed, urgent=True))

    def _least_wait(self, request: RequestView, predicted_ns: int) -> Spot | None:
        """Where an urgent prompt waits least: behind other urgent ones, and for a part of a layer;
        of the instances that have a turn left for it, or a step that it can be added to. Those who
        wait for a turn share a step when one comes, which costs less than a step for each.

        A part of a long step costs about as much as a short prompt, so it counts as one. Of equal
        instances the one that was overtaken less since it has long steps: the members of a step
        wait for one another, so it is held up least when all are preempted alike.
        """
        tokens = request.prompt_tokens
        vain = self._vain.get(request.cls)  # slots, turns and budgets only become less in a round
        if vain and tokens >= vain[0] and predicted_ns >= vain[1]:
            return None
        heap = self._lines()
        unfit: list[_Wait] = []
        found = None
        while heap and found is None:
            *_, version, spot = heap[0]
            if version != spot.version:  # whatever it was given since makes it wait longer
                heapq.heapreplace(heap, self._wait(spot))
            elif self._prefill.admits(spot, tokens, predicted_ns) and (
                self._prefill.has_turn(spot) or self._growing(spot, request) is not None
            ):
                found = spot
            else:
                unfit.append(heapq.heappop(heap))
        for wait in unfit:
            heapq.heappush(heap, wait)
        if found is None:
            self._vain[request.cls] = tokens, predicted_ns
        return found

    def _lines(self) -> list[_Wait]:
        if self._waits is None:
            self._waits = [self._wait(it) for it in self._prefill.spots]
            heapq.heapify(self._waits)
        return self._waits

    def _wait(self, spot: Spot) -> _Wait:
        wait_ns = spot.urgent_ns + (self._turn_ns if spot.long_steps else 0)
        return wait_ns, spot.overtaken_ns, spot.free_at_ns, spot.order, spot.version, spot

    def _batch(self, spot: Spot, request: RequestView, choice: Choice) -> _Job:
        """The urgent step that this round starts on the instance, or another one, with room and
        time for the request."""
        grown = self._growing(spot, request)
        if grown is not None:
            job, more_ns = grown
            job.predicted_ns += more_ns
            self._prefill.grow_urgent(spot, request.prompt_tokens, more_ns)
            return job
        job = _Job([spot], request.cls, choice.strategy, urgent=True)
        job.predicted_ns = choice.time_ns
        self._batches[spot.id, request.cls] = job
        self._jobs.append(job)
        self._prefill.start_urgent(spot, request.prompt_tokens, choice.time_ns)
        return job

    def _growing(self, spot: Spot, request: RequestView) -> tuple[_Job, int] | None:
        """The urgent step that this round starts on the instance, if the request can be added, and
        how much longer it takes with it."""
        job = self._batches.get((spot.id, request.cls))
        if job is None:
            return None
        total = job.tokens + request.prompt_tokens
        if total > self._options.urgent_batch_tokens:
            return None
        together = self._cost.best(request.cls, self._prefill.single, 0, total)
        more_ns = max(0, together.time_ns - job.predicted_ns)
        return (job, more_ns) if self._may_grow(spot, more_ns) else None

    def _may_grow(self, spot: Spot, more_ns: int) -> bool:
        """A longer step is over later for all of its members, and for those behind it."""
        by_ns = self._by_ns.get(spot.id)
        spare_ns = self._prefill.spare_ns(spot)
        return (by_ns is None or self._now_ns + spot.urgent_ns + more_ns <= by_ns) and (
            spare_ns is None or spare_ns >= more_ns
        )

    # --- longer prompts ---

    def start_long(
        self, line: Sequence[RequestView], index: int, urgent_id: RequestId | None
    ) -> Verdict:
        """Compute a prompt on the group that it fills, with others in the slack of the last SPT.

        Args:
            line: of longer prompts.
            index: of the prompt in the line.
            urgent_id: the oldest short one that this round has not come to.
        """
        request = line[index]
        placed = self._place(request)
        if placed is None:
            return Verdict.BLOCKED
        group = self._near_rooms().group(request.prompt_tokens)
        reuse = self._long_reuse(request)
        if reuse and (group is None or reuse.ends_ns <= self._ends_ns(request, group)):
            self._start_reuse(request, reuse, placed)
            return Verdict.STARTS
        if group is None:
            # With slots enough, only outstanding steps are in the way.
            room = sum(it.free for it in self._prefill.spots)
            return Verdict.WAITS if room >= request.prompt_tokens else Verdict.BLOCKED
        choice = self._best(request, group, request.prompt_tokens)
        job = _Job(group.spots, request.cls, choice.strategy, urgent=False)
        self._add(job, request, placed)
        self._fill(
            job, islice(line, index + 1, index + 1 + self._options.look_ahead), group, urgent_id
        )
        if len(job.members) > 1:
            choice = self._best(request, group, job.tokens)
        self._launch(job, group, choice.time_ns)
        return Verdict.STARTS

    def _ends_ns(self, request: RequestView, group: Group) -> int:
        """When a group will have computed all of a prompt."""
        choice = self._best(request, group, request.prompt_tokens)
        return max(it.free_at_ns for it in group.spots) + choice.time_ns

    def _best(self, request: RequestView, group: Group, tokens: int) -> Choice:
        """How a group computes all of a prompt, and others that fill its last SPT, when it is
        free."""
        waited_ns = max(it.free_at_ns for it in group.spots) - request.submitted_ns
        shape = self._prefill.shape(group.spots)
        return self._cost.best(request.cls, shape, 0, tokens, waited_ns)

    def _long_reuse(self, request: RequestView) -> Reuse | None:
        """The rest of a prompt, where its beginning was kept and around it."""
        cached = self._view.cached(request, self._prefill_gang)
        if cached is None:
            return None
        spots = self._reuses.holders(cached)
        left = request.prompt_tokens - cached.tokens
        if left > len(spots) * self._options.spt_tokens:
            wider = self._near_rooms().group(left)
            ids = {it.id for it in spots}
            spots += [it for it in (wider.spots if wider else ()) if it.id not in ids]
            spots.sort(key=lambda it: it.order)
        if any(it.long_steps >= self._options.jobs_per_instance for it in spots):
            return None
        return self._reuses.on(request, cached, spots)

    def _start_reuse(self, request: RequestView, reuse: Reuse, placed: Placed) -> None:
        self._reuses.take(reuse)
        self._prefill.start_long(request, reuse.spots, reuse.shares, reuse.time_ns)
        self._decode.take(placed, request.output_tokens)
        self._started[request.id] = None
        self._rest.append(reuse_plan(request, reuse, placed))
        self._given(reuse.spots)

    def _launch(self, job: _Job, group: Group, predicted_ns: int) -> None:
        shares = level_shares(job.tokens, group.room)
        assert shares is not None, "fillers exceed the slack"
        used = [(spot, n) for spot, n in zip(group.spots, shares, strict=True) if n]
        job.group, job.shares = [spot for spot, _ in used], [n for _, n in used]
        job.predicted_ns = predicted_ns
        oldest, _ = job.members[0]
        self._prefill.start_long(oldest, job.group, job.shares, predicted_ns)
        self._jobs.append(job)
        self._given(job.group)

    def _given(self, spots: list[Spot]) -> None:
        """Instances were given a long step."""
        for spot in spots:
            self._near_rooms().update(spot)
        # Whoever is younger than this step passes it, and does so in a step of its own.
        ids = {spot.id for spot in spots}
        self._batches = {key: it for key, it in self._batches.items() if key[0] not in ids}

    def _fill(
        self, job: _Job, younger: Iterable[RequestView], group: Group, urgent_id: RequestId | None
    ) -> None:
        """Add younger prompts for the slack of the last SPT, if they would otherwise wait.

        They may pass `FILLERS_PASS` longer ones, for which slots are kept meanwhile, but nobody
        who is blocked, nor a short one that may be found to be: what they take is not given back
        within any bound.
        """
        spt = min(self._options.spt_tokens, *group.room)
        slack = len(group.spots) * spt - job.tokens
        idle = self._prefill.idle
        if slack <= 0 or (idle and idle > sum(not it.long_steps for it in group.spots)):
            return  # an idle instance serves them sooner
        line = self._line_to_last_filler(younger, slack, job.cls, urgent_id)
        if not line:
            return
        passed: list[tuple[Placed, int]] = []
        room = sum(it.free for it in self._prefill.spots) - job.tokens
        for other in line:
            placed = self._place(other)
            room -= other.prompt_tokens
            if placed is None or room < 0:
                break
            if other.prompt_tokens <= slack and other.cls == job.cls:
                slack -= other.prompt_tokens
                self._add(job, other, placed)
            else:
                self._decode.take(placed, other.output_tokens)
                passed.append((placed, other.output_tokens))
        for placed, output_tokens in passed:
            self._decode.put_back(placed, output_tokens)

    def _line_to_last_filler(
        self, younger: Iterable[RequestView], slack: int, cls: str, urgent_id: RequestId | None
    ) -> list[RequestView]:
        """The part of the line that matters for the slack; mostly nobody in it is small enough."""
        line: list[RequestView] = []
        passing = end = 0
        for other in younger:
            if other.blocked_ns is not None or (urgent_id is not None and urgent_id < other.id):
                break
            if other.id in self._started or self._too_long(other):
                continue
            line.append(other)
            if other.prompt_tokens <= slack and other.cls == cls:
                end = len(line)
            elif passing < FILLERS_PASS:
                passing += 1
            else:
                break
        return line[:end]

    def _near_rooms(self) -> NearRooms:
        if self._rooms is None:
            it = self._options
            self._rooms = NearRooms(self._prefill.spots, it.spt_tokens, it.jobs_per_instance)
        return self._rooms

    # --- both ---

    def _too_long(self, request: RequestView) -> bool:
        """Another pair may serve it, but not this one."""
        return request.prompt_tokens + request.output_tokens > self._max_positions

    def _place(self, request: RequestView) -> Placed | None:
        if self._too_long(request):
            return None
        kept = self._view.cached(request, self._gang.id)
        return self._decode.place_behind(kept, request.prompt_tokens, request.output_tokens)

    def _add(self, job: _Job, request: RequestView, placed: Placed) -> None:
        self._decode.take(placed, request.output_tokens)
        self._started[request.id] = None
        job.members.append((request, placed))
        job.tokens += request.prompt_tokens

    def _decode_ns(self, request: RequestView) -> int:
        """How long it takes to draw the whole answer."""
        gang = self._gang
        iteration_ns = gang.iteration_ns or self._cost.iteration_ns(
            1, gang.tp, gang.mastered + 1, request.prompt_tokens
        )
        return iteration_ns * request.output_tokens


def _plan(job: _Job) -> StartPlan:
    shares = job.shares or [job.tokens]
    step = PlannedStep(
        group=tuple([spot.id for spot in job.group]),
        bounds=bounds_of(shares),
        pieces=tuple([PlannedPiece(it.id, 0, it.prompt_tokens) for it, _ in job.members]),
        strategy=job.strategy,
        predicted_ns=job.predicted_ns,
        urgent=job.urgent,
    )
    decode = [DecodePlacement(it.id, placed.shares, placed.master) for it, placed in job.members]
    return StartPlan(steps=(in_zigzag(step),), decode=tuple(decode))

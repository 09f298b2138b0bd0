"""Continuous batching on modeled time: a decode gang jumps to the next end of a request.

Between two changes of the batch, iteration n of a jump takes `a + b * (C + n * B) + c * B` (batch
B, context C at the start of the jump). The end of any iteration is therefore a polynomial in n. All
values are integers in 2^-48 ns, so a jump ends exactly where single iterations would. With
piggybacked prefill, chunks differ from iteration to iteration, so each iteration is a jump.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from csps.configurator.costs.latency import FRACTION_BITS, DecodeCost, HybridCost
from csps.loadgen.simulator.timeline import EventTimeline
from csps.protocols.sequencer.decode_batches import SequenceCursor, chunk_lengths


def cursors(batch_members: Iterable[SimulatedMember]) -> list[SequenceCursor]:
    """Return the cursors of batch members for `chunk_lengths`."""
    return [
        SequenceCursor(
            next=member.computed,
            prompt=member.prompt,
            stop=member.prompt + 1,
            master=member.master,
        )
        for member in batch_members
    ]


@dataclass(eq=False, slots=True)
class SimulatedMember:
    """A sequence of the batch."""

    sequence: int
    context: int
    """Tokens that its first iteration attends to."""
    tokens: int
    """Tokens left to generate when it joins."""
    joined: int = -1
    """Iterations of the batch before its first one; -1 until it has joined."""
    prompt: int = 0
    """Prompt tokens that iterations compute before its first token (piggybacked prefill). The first
    token is not part of `tokens`.
    """
    computed: int = 0
    """Prompt tokens computed so far."""
    first: int = 0
    """Prompt tokens that were computed when it joined."""
    master: int = 0
    """Index of its master."""
    ranks: tuple[int, ...] = ()
    """Instances that take part in its iterations. Empty: all of the gang."""
    ends: list[int] = field(default_factory=list)
    """Ends of the iterations that it decoded in, where groups iterate independently."""

    def ends_ns(self, start: int, stop: int) -> list[int]:
        """Return the ends of its own iterations [start, stop)."""
        return self.ends[start:stop]

    @property
    def prefills(self) -> bool:
        """Return whether its prompt is still being computed."""
        return self.computed < self.prompt

    @property
    def begins(self) -> bool:
        """Return whether no chunk of its prompt has been computed since it joined."""
        return self.computed == self.first


@dataclass(frozen=True, slots=True)
class Jump:
    """Consecutive iterations of an unchanged batch."""

    start_ns: int
    batch: int
    first: int
    """Time of the first iteration, in 2^-48 ns."""
    growth: int
    """Growth of the time from one iteration to the next, in 2^-48 ns."""

    def end_ns(self, iterations: int) -> int:
        """Return the end of the n-th iteration."""
        total = iterations * self.first + self.growth * (iterations * (iterations - 1) // 2)
        return self.start_ns + (total >> FRACTION_BITS)

    def iterations_until(self, t_ns: int, at_most: int) -> int:
        """Return the fewest iterations, at least one, that end at `t_ns` or later."""
        low, high = 1, at_most
        while low < high:
            middle = (low + high) // 2
            if self.end_ns(middle) >= t_ns:
                high = middle
            else:
                low = middle + 1
        return low


def hybrid_iteration(
    start_ns: int,
    cost: HybridCost,
    chunks: Iterable[tuple[SimulatedMember, int]],
    batch: int,
    context: int,
    gap_ns: int,
) -> Jump:
    """Return a jump of one iteration that also computes prompt chunks.

    Args:
        start_ns: begin of the iteration.
        cost: the cost of such iterations.
        chunks: (member, tokens) of each chunk.
        batch: members that decode.
        context: tokens that these attend to together.
        gap_ns: gap after the iteration.
    """
    by_master: dict[int, list[tuple[int, int]]] = {}
    for member, length in chunks:
        by_master.setdefault(member.master, []).append((length, member.computed))
    took = cost.predict_fixed(by_master.values(), batch, context)
    return Jump(start_ns=start_ns, batch=batch, first=took + (gap_ns << FRACTION_BITS), growth=0)


class IterationLog:
    """Finished iterations of a batch, stored as jumps."""

    def __init__(self) -> None:
        self._jumps: list[Jump] = []
        self._before: list[int] = [0]
        """Iterations before each jump; the last entry is the total."""

    @property
    def iterations(self) -> int:
        """Return the number of iterations."""
        return self._before[-1]

    def add(self, jump: Jump, iterations: int) -> None:
        """Add a finished jump of so many iterations."""
        self._jumps.append(jump)
        self._before.append(self.iterations + iterations)

    def tokens(self) -> int:
        """Return the tokens generated in all iterations."""
        counts = zip(self._jumps, pairwise(self._before), strict=True)
        return sum(jump.batch * (stop - start) for jump, (start, stop) in counts)

    def ends_ns(self, start: int, stop: int) -> list[int]:
        """Return the ends of the iterations [start, stop)."""
        ends: list[int] = []
        index = bisect.bisect_right(self._before, start) - 1
        while start < stop:
            before, after = self._before[index : index + 2]
            last = min(stop, after)
            jump = self._jumps[index]
            ends.extend(jump.end_ns(iteration - before + 1) for iteration in range(start, last))
            start, index = last, index + 1
        return ends


class SimulatedBatch:
    """The batch of one decode gang.

    Args:
        timeline: the simulated time.
        cost: the cost of an iteration on this gang.
        gap_ns: gap between two iterations.
        finished: called with each member at the end of the iteration of its last token.
        hybrid: returns the cost of iterations with prompt chunks; called if any member prefills.
        started: called with each piggybacked member when its first chunk begins.
        prefilled: called with each piggybacked member after its first token.
    """

    def __init__(
        self,
        timeline: EventTimeline,
        cost: DecodeCost,
        *,
        gap_ns: int = 0,
        finished: Callable[[SimulatedMember], None],
        hybrid: Callable[[], HybridCost] | None = None,
        started: Callable[[SimulatedMember], None] = lambda _: None,
        prefilled: Callable[[SimulatedMember], None] = lambda _: None,
    ) -> None:
        self._timeline, self._cost, self._gap_ns = timeline, cost, gap_ns
        self._finished, self._hybrid = finished, hybrid
        self._started, self._prefilled = started, prefilled
        self.log = IterationLog()
        self._batch_members: dict[int, SimulatedMember] = {}
        """Members that decode."""
        self._prefilling: dict[int, SimulatedMember] = {}
        """Members that prefill, in order of joining."""
        self._budget = 0
        self._chunks: list[tuple[SimulatedMember, int]] = []
        """Prompt chunks of the jump under way."""
        self._ends: list[tuple[int, int, SimulatedMember]] = []
        """Heap of (last iteration, order of joining, member)."""
        self._joining: list[SimulatedMember] = []
        self._leaving: list[tuple[int, Callable[[], None]]] = []
        self._joined = 0
        self._context = 0
        self._jump: Jump | None = None
        self._length = 0
        """Iterations of the jump under way."""
        self._version = 0

    def __len__(self) -> int:
        return len(self._batch_members) + len(self._prefilling)

    def join(self, member: SimulatedMember) -> None:
        """Decode a sequence from the next iteration on."""
        self._joining.append(member)
        self._stop_soon()

    def piggyback(self, member: SimulatedMember, budget: int) -> None:
        """Prefill a sequence from the next iteration on, then decode it.

        Args:
            member: the sequence.
            budget: prompt tokens that an iteration may compute from now on.
        """
        self._budget = budget
        self.join(member)

    def leave(self, sequence: int, left: Callable[[], None]) -> None:
        """Remove a sequence, if present, after the iteration under way; then call `left`."""
        self._leaving.append((sequence, left))
        self._stop_soon()

    def generated_by(self, member: SimulatedMember) -> int:
        """Return the tokens that a member has generated by now."""
        if member.joined < 0:
            return 0
        return min(member.tokens, self.log.iterations + self._under_way() - member.joined)

    def ends_of(self, member: SimulatedMember, tokens: int) -> tuple[IterationLog, int, int]:
        """Return the log and the range of a member's first iterations in it."""
        return self.log, member.joined, member.joined + tokens

    def _under_way(self) -> int:
        """Return the finished iterations of the present jump."""
        if self._jump is None:
            return 0
        over = self._jump.iterations_until(self._timeline.now_ns, self._length)
        return over if self._jump.end_ns(over) <= self._timeline.now_ns else over - 1

    def _stop_soon(self) -> None:
        """End the jump under way with the present iteration."""
        now_ns = self._timeline.now_ns
        if self._jump is None:
            self._schedule(now_ns)
            return
        length = self._jump.iterations_until(now_ns, self._length)
        if length < self._length:
            self._length = length
            self._schedule(self._jump.end_ns(length))

    def _schedule(self, t_ns: int) -> None:
        self._version += 1
        version = self._version
        self._timeline.at(
            t_ns, lambda: self._between_iterations() if version == self._version else None
        )

    def _between_iterations(self) -> None:
        if self._jump is not None:
            self._close_jump(self._jump)
        for sequence, left in self._leaving:
            self._drop(self._batch_members.get(sequence))
            self._prefilling.pop(sequence, None)
            self._joining = [member for member in self._joining if member.sequence != sequence]
            left()
        self._leaving.clear()
        for member in self._joining:
            if member.prefills:
                self._prefilling[member.sequence] = member
            else:
                self._add(member)
        self._joining.clear()
        if self._prefilling:
            self._begin_hybrid()
        elif self._batch_members:
            self._begin_jump()

    def _close_jump(self, jump: Jump) -> None:
        self._jump = None
        self._context += self._length * jump.batch
        self.log.add(jump, self._length)
        self._close_chunks()
        while self._ends and self._ends[0][0] <= self.log.iterations:
            member = heapq.heappop(self._ends)[2]
            if self._batch_members.get(member.sequence) is member:
                self._drop(member)
                self._finished(member)

    def _close_chunks(self) -> None:
        for member, length in self._chunks:
            member.computed += length
            if not member.prefills:
                del self._prefilling[member.sequence]
                self._prefilled(member)
                if member.tokens:
                    self._add(member)
        self._chunks = []

    def _add(self, member: SimulatedMember) -> None:
        assert member.tokens > 0, f"sequence {member.sequence} joins without tokens to generate"
        member.joined = self.log.iterations
        self._batch_members[member.sequence] = member
        self._context += member.context
        heapq.heappush(self._ends, (self.log.iterations + member.tokens, self._joined, member))
        self._joined += 1

    def _drop(self, member: SimulatedMember | None) -> None:
        if member is not None:
            del self._batch_members[member.sequence]
            self._context -= member.context + self.log.iterations - member.joined

    def _begin_hybrid(self) -> None:
        """Begin one iteration that also computes prompt chunks."""
        batch = len(self._batch_members)
        prefilling = list(self._prefilling.values())
        lengths = chunk_lengths(
            cursors((*self._batch_members.values(), *prefilling)), self._budget
        )[batch:]
        self._chunks = [chunk for chunk in zip(prefilling, lengths, strict=True) if chunk[1]]
        for member, _ in self._chunks:
            if member.begins:
                self._started(member)
        assert self._hybrid is not None, "piggybacked prefill without a hybrid cost"
        now_ns, cost = self._timeline.now_ns, self._hybrid()
        self._jump = hybrid_iteration(
            now_ns, cost, self._chunks, batch, self._context, self._gap_ns
        )
        self._length = 1
        self._schedule(self._jump.end_ns(1))

    def _begin_jump(self) -> None:
        while self._batch_members.get((member := self._ends[0][2]).sequence) is not member:
            heapq.heappop(self._ends)
        batch = len(self._batch_members)
        cost = self._cost.small if batch <= self._cost.tipping_batch else self._cost.large
        first = cost.a + cost.b * self._context + cost.c * batch
        self._jump = Jump(
            start_ns=self._timeline.now_ns,
            batch=batch,
            first=first + (self._gap_ns << FRACTION_BITS),
            growth=cost.b * batch,
        )
        self._length = self._ends[0][0] - self.log.iterations
        self._schedule(self._jump.end_ns(self._length))

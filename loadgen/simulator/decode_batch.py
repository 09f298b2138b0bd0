"""Continuous batching on modelled time: a decode gang jumps to the next end of a request.

Between two changes of the batch, iteration n of a jump takes `a + b * (C + n * B) + c * B` (batch
B, context C at the start of the jump), so that the end of any iteration is a polynomial in n. All
of it is integers in 2^-48 ns, so a jump ends exactly where iterating would. While requests ride,
pieces of their prompts differ from iteration to iteration, and every one is a jump of its own.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from csps.loadgen.simulator.timeline import Timeline
from csps.protocols.iteration import RowState, fill
from csps.services.scheduling.latency import FRACTION_BITS, DecodeCost, HybridCost


def states(rows: Iterable[Row]) -> list[RowState]:
    """Of rows that take part in an iteration, for `fill`; all that decode are alike."""
    return [
        RowState(next=it.computed, prompt=it.prompt, stop=it.prompt + 1, master=it.master)
        for it in rows
    ]


@dataclass(eq=False, slots=True)
class Row:
    """A request in the batch."""

    sequence: int
    context: int
    """Tokens that its next iteration attends to, on joining."""
    tokens: int
    """Still to be drawn, on joining."""
    joined: int = -1
    """Iterations of the batch before its first one; -1 until it has joined."""
    prompt: int = 0
    """Of a rider: tokens that iterations compute before it draws the first one, which is not among
    `tokens`."""
    computed: int = 0
    """How many of them are."""
    first: int = 0
    """How many of them were when it joined."""
    master: int = 0
    """Who computes what it needs."""
    ranks: tuple[int, ...] = ()
    """Instances that take part in its iterations; none named: all of the gang."""
    ends: list[int] = field(default_factory=list)
    """When iterations that it decoded in have ended, where groups iterate apart."""

    def ends_ns(self, start: int, stop: int) -> list[int]:
        """Of its own iterations [start, stop)."""
        return self.ends[start:stop]

    @property
    def prefills(self) -> bool:
        """It rides, and has not drawn its first token."""
        return self.computed < self.prompt

    @property
    def begins(self) -> bool:
        """It rides, and nothing of its prompt is computed that was not before."""
        return self.computed == self.first


@dataclass(frozen=True, slots=True)
class Jump:
    """Iterations of one batch."""

    start_ns: int
    batch: int
    first: int
    """What the first iteration takes, in 2^-48 ns."""
    growth: int
    """By how much longer each one takes than the one before."""

    def end_ns(self, iterations: int) -> int:
        """When so many iterations are over."""
        total = iterations * self.first + self.growth * (iterations * (iterations - 1) // 2)
        return self.start_ns + (total >> FRACTION_BITS)

    def iterations_until(self, t_ns: int, at_most: int) -> int:
        """The fewest iterations, at least one, that end at `t_ns` or later."""
        low, high = 1, at_most
        while low < high:
            middle = (low + high) // 2
            if self.end_ns(middle) >= t_ns:
                high = middle
            else:
                low = middle + 1
        return low


def filled(
    start_ns: int,
    cost: HybridCost,
    pieces: Iterable[tuple[Row, int]],
    batch: int,
    context: int,
    gap_ns: int,
) -> Jump:
    """One iteration, filled with pieces of prompts.

    Args:
        pieces: of whom, and how many tokens.
        batch: rows that decode, which attend to so much `context` together.
        gap_ns: after it.
    """
    by_master: dict[int, list[tuple[int, int]]] = {}
    for row, length in pieces:
        by_master.setdefault(row.master, []).append((length, row.computed))
    took = cost.predict_fixed(by_master.values(), batch, context)
    return Jump(start_ns=start_ns, batch=batch, first=took + (gap_ns << FRACTION_BITS), growth=0)


class IterationLog:
    """All iterations of a batch that are over, as the jumps that they were part of."""

    def __init__(self) -> None:
        self._jumps: list[Jump] = []
        self._before: list[int] = [0]
        """Iterations before each jump, and of all."""

    @property
    def iterations(self) -> int:
        """How many there were."""
        return self._before[-1]

    def add(self, jump: Jump, iterations: int) -> None:
        """The next jump has ended after so many."""
        self._jumps.append(jump)
        self._before.append(self.iterations + iterations)

    def tokens(self) -> int:
        """Drawn in all iterations."""
        counts = zip(self._jumps, pairwise(self._before), strict=True)
        return sum(jump.batch * (stop - start) for jump, (start, stop) in counts)

    def ends_ns(self, start: int, stop: int) -> list[int]:
        """When the iterations [start, stop) have ended."""
        ends: list[int] = []
        index = bisect.bisect_right(self._before, start) - 1
        while start < stop:
            before, after = self._before[index : index + 2]
            last = min(stop, after)
            jump = self._jumps[index]
            ends.extend(jump.end_ns(it - before + 1) for it in range(start, last))
            start, index = last, index + 1
        return ends


class DecodeBatch:
    """The batch of one decode gang.

    Args:
        timeline: the simulated time.
        cost: of an iteration on this gang.
        gap_ns: between two iterations.
        finished: called with each row whose last token was drawn, at the end of the iteration.
        hybrid: the cost of iterations with pieces of prompts; asked for when somebody rides.
        started: called with each rider of whose prompt the first piece begins.
        prefilled: called with each rider that has drawn its first token.
    """

    def __init__(
        self,
        timeline: Timeline,
        cost: DecodeCost,
        *,
        gap_ns: int = 0,
        finished: Callable[[Row], None],
        hybrid: Callable[[], HybridCost] | None = None,
        started: Callable[[Row], None] = lambda _: None,
        prefilled: Callable[[Row], None] = lambda _: None,
    ) -> None:
        self._timeline, self._cost, self._gap_ns = timeline, cost, gap_ns
        self._finished, self._hybrid = finished, hybrid
        self._started, self._prefilled = started, prefilled
        self.log = IterationLog()
        self._rows: dict[int, Row] = {}
        """Those that decode."""
        self._riders: dict[int, Row] = {}
        """Those that prefill, in order of joining."""
        self._budget = 0
        self._pieces: list[tuple[Row, int]] = []
        """Of prompts, in the jump under way."""
        self._ends: list[tuple[int, int, Row]] = []
        """(last iteration, order of joining, row)."""
        self._joining: list[Row] = []
        self._leaving: list[tuple[int, Callable[[], None]]] = []
        self._joined = 0
        self._context = 0
        self._jump: Jump | None = None
        self._length = 0
        """Iterations of the jump under way."""
        self._plan = 0

    def __len__(self) -> int:
        return len(self._rows) + len(self._riders)

    def join(self, row: Row) -> None:
        """Decode a request from the next iteration on."""
        self._joining.append(row)
        self._stop_soon()

    def ride(self, row: Row, budget: int) -> None:
        """Prefill a request from the next iteration on, and decode it then.

        Args:
            row: the request.
            budget: tokens that an iteration may compute from now on.
        """
        self._budget = budget
        self.join(row)

    def leave(self, sequence: int, left: Callable[[], None]) -> None:
        """Take a request out, if it is here, after the iteration under way; then call `left`."""
        self._leaving.append((sequence, left))
        self._stop_soon()

    def drawn_by(self, row: Row) -> int:
        """Tokens that a row has drawn by now."""
        if row.joined < 0:
            return 0
        return min(row.tokens, self.log.iterations + self._under_way() - row.joined)

    def ends_of(self, row: Row, tokens: int) -> tuple[IterationLog, int, int]:
        """Where in the log of iterations they are."""
        return self.log, row.joined, row.joined + tokens

    def _under_way(self) -> int:
        """Iterations of the present jump that are over."""
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
        self._plan += 1
        plan = self._plan
        self._timeline.at(t_ns, lambda: self._between_iterations() if plan == self._plan else None)

    def _between_iterations(self) -> None:
        if self._jump is not None:
            self._close_jump(self._jump)
        for sequence, left in self._leaving:
            self._drop(self._rows.get(sequence))
            self._riders.pop(sequence, None)
            self._joining = [row for row in self._joining if row.sequence != sequence]
            left()
        self._leaving.clear()
        for row in self._joining:
            if row.prefills:
                self._riders[row.sequence] = row
            else:
                self._add(row)
        self._joining.clear()
        if self._riders:
            self._begin_filled()
        elif self._rows:
            self._begin_jump()

    def _close_jump(self, jump: Jump) -> None:
        self._jump = None
        self._context += self._length * jump.batch
        self.log.add(jump, self._length)
        self._close_pieces()
        while self._ends and self._ends[0][0] <= self.log.iterations:
            row = heapq.heappop(self._ends)[2]
            if self._rows.get(row.sequence) is row:
                self._drop(row)
                self._finished(row)

    def _close_pieces(self) -> None:
        for row, length in self._pieces:
            row.computed += length
            if not row.prefills:
                del self._riders[row.sequence]
                self._prefilled(row)
                if row.tokens:
                    self._add(row)
        self._pieces = []

    def _add(self, row: Row) -> None:
        assert row.tokens > 0, "a request without tokens to draw joins"
        row.joined = self.log.iterations
        self._rows[row.sequence] = row
        self._context += row.context
        heapq.heappush(self._ends, (self.log.iterations + row.tokens, self._joined, row))
        self._joined += 1

    def _drop(self, row: Row | None) -> None:
        if row is not None:
            del self._rows[row.sequence]
            self._context -= row.context + self.log.iterations - row.joined

    def _begin_filled(self) -> None:
        """One iteration, filled with pieces of prompts."""
        batch = len(self._rows)
        riders = list(self._riders.values())
        lengths = fill(states((*self._rows.values(), *riders)), self._budget)[batch:]
        self._pieces = [it for it in zip(riders, lengths, strict=True) if it[1]]
        for row, _ in self._pieces:
            if row.begins:
                self._started(row)
        assert self._hybrid is not None, "nobody rides here"
        now_ns, cost = self._timeline.now_ns, self._hybrid()
        self._jump = filled(now_ns, cost, self._pieces, batch, self._context, self._gap_ns)
        self._length = 1
        self._schedule(self._jump.end_ns(1))

    def _begin_jump(self) -> None:
        while self._rows.get((row := self._ends[0][2]).sequence) is not row:
            heapq.heappop(self._ends)
        batch = len(self._rows)
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

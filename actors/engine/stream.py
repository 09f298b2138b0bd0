"""The stream of rows that a gang iterates: batching over KV that lies anywhere (CSPS §4.2).

The log says who joins and leaves, and how often to iterate. Each instance embeds the tokens of the
rows that it masters, stores their KV or sends it to who keeps it, sends their Q to the instances
that hold other parts of their sequences, computes its own part meanwhile, merges what comes back
and draws. A row that rides computes pieces of its prompt in the same iterations in which others
decode (Sarathi-Serve). All ranks derive the same batches from the same log, so that nothing else
has to be agreed upon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from csps.actors.announce import Notify
from csps.actors.engine.batch import Batch, batch_of
from csps.actors.engine.engine import Engine
from csps.actors.engine.forward import forward
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.reservations import Reservations
from csps.actors.engine.row_draws import draw_rows
from csps.actors.engine.rows import Row, answer_of, instances_of, last_position
from csps.actors.held_rows import RequestSlots
from csps.actors.sampler_request import drawn_before
from csps.actors.strategies.group import shares_of
from csps.actors.strategies.query_exchange import ExchangeTimes
from csps.actors.timeline_export import COMMUNICATION_S, EXCHANGE_S
from csps.protocols.errors import DeadlineExceeded
from csps.protocols.iteration import fill
from csps.protocols.log_entries import Change, Place
from csps.protocols.messages import Reserve
from csps.protocols.span import Span

ITERATION_S = 120.0
"""For one iteration, which takes a second at most: longer means that ranks wait for each other."""

PROMPT_TOKENS, ANSWER_TOKENS = "csps.decode.prompt_tokens", "csps.decode.answer_tokens"
"""Whose KV lies on a rank when a row leaves."""
ANSWER_FROM = "csps.decode.answer_from"
"""The first of the latter, in the answer; only where there are some."""


class Stream:
    """Its rows on one rank. The engine thread changes and iterates; any thread reserves."""

    def __init__(self, engine: Engine, notify: Notify, let_go: Callable[[int], None]) -> None:
        """
        Args:
            let_go: told of each sequence that has left: whoever else has no use for its slots is to
                free them.
        """
        self._engine = engine
        self._notify = notify
        self._let_go = let_go
        self.reservations = Reservations(engine, notify)
        self._rows: list[Row] = []
        self._budget = 0
        self._iterated: list[Row] = []
        """Of the last iteration: those of the rows that it had."""
        self._lengths: list[int] = []
        self._batch = Batch()
        """Of the last iteration."""
        self._same_for = 0
        """Iterations of which it is the batch as well: rows only decode, and none is at its end."""
        self.rides = False
        """The last iteration had prompts to compute, of which nobody hears by tokens."""
        self.iterations = 0
        self.iterating_s = 0.0
        self.exchanges = ExchangeTimes()
        """Of all iterations."""
        self._busy_since: float | None = None

    @property
    def running(self) -> int:
        """Rows."""
        return len(self._rows)

    def check_progress(self) -> None:
        """Raise DeadlineExceeded if an iteration does not end."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > ITERATION_S:
            raise DeadlineExceeded("an iteration of decoding", ITERATION_S)

    # --- the engine thread: who takes part ---------------------------------------------------

    def change(self, change: Change) -> None:
        """Rows leave and join, at all ranks before the same iteration."""
        for rid in change.left:
            self._leave(rid)
        for rid, token in change.joined:
            self._join(rid, token)
        self._budget = change.budget
        self._same_for = 0

    def end_owner(self, owner: int) -> None:
        """All sequences of an owner leave, those that have not joined as well."""
        for rid in self.reservations.end_owner(owner):
            self._leave(rid)
        self._same_for = 0

    def _join(self, rid: int, token: int | None) -> None:
        reservation = self.reservations.joining(rid)
        if reservation is None:
            return
        request, sampler = reservation.request, self.reservations.sampler(rid)
        row = Row(
            reservation=reservation,
            index=drawn_before(request.drawn),
            next=request.reused,
            token=0,
            sampler=sampler,
            instances=instances_of(request),
            exchanges=replace(self.exchanges),
        )
        if token is not None:
            row.next, row.token, row.index = request.prompt_length, token, row.index + 1
            row.slots = self._slots(request, row.next)
            if sampler is not None:
                sampler.observe(token)
        reservation.joined(self._engine.rank)
        self._rows.append(row)

    def row(self, rid: int) -> Row:
        """One of them."""
        return next(row for row in self._rows if row.rid == rid)

    def place(self, place: Place, move: MoveRun | None) -> None:
        """A row goes on elsewhere, at all ranks before the same iteration.

        Args:
            move: of this rank; None if the row does not concern it, before or after.
        """
        self._same_for = 0
        layout = self._engine.layout
        instances = frozenset(map(layout.instance_of, place.ranks))
        at = next(at for at, row in enumerate(self._rows) if row.rid == place.sequence)
        row = self._rows[at] = replace(self._rows[at], instances=instances)
        if move is not None:
            self._go_on(row, move)

    def _go_on(self, row: Row, move: MoveRun) -> None:
        state = move.state
        assert state is not None, "placed before it was moved"
        self.reservations.place(row.rid, move.message.after, move.sampler)
        move.release_sources()
        row.next, row.token, row.index = state.next, state.token, state.index
        row.over, row.sampler = state.over, self.reservations.sampler(row.rid)
        row.slots = self._slots(row.request, row.next)

    def _slots(self, request: Reserve, seen: int) -> RequestSlots | None:
        """Where the KV of a row that decodes lies here: all that it has seen has landed, was moved
        here or computed by the stream."""
        answer = shares_of(answer_of(request), self._engine.instance)
        spans = shares_of(request.shares, self._engine.instance)
        # The master looks at what it has as well when it asks others, even if it has nothing.
        masters = request.master == self._engine.instance
        if not masters and not any(span.length for span in (*answer, *spans)):
            return None
        layers, to_come = range(self._engine.spec.layers), Span(seen, last_position(request))
        # By spans, because slots of what is yet to be moved here may be among those between them.
        held = [*spans, *(span.intersection(Span(0, seen)) for span in answer)]
        growing = [span.intersection(to_come) for span in answer]
        return RequestSlots(self._engine.pool, request.rid, layers, held, growing)

    def _leave(self, rid: int) -> None:
        for row in self._rows:
            if row.rid == rid and row.request.trace:
                row.reservation.note(self._figures(row))
        self._rows = [row for row in self._rows if row.rid != rid]
        self.reservations.leave(rid)
        self._let_go(rid)

    def _figures(self, row: Row) -> dict[str, int | float]:
        """For its trace: what of it lies here, and what exchanges took while it was a row."""
        instance, drawn = self._engine.instance, Span(row.prompt, max(row.prompt, row.next))
        kept = [it.intersection(drawn) for it in shares_of(answer_of(row.request), instance)]
        first = min((it.start for it in kept if it.length), default=None)
        return {
            PROMPT_TOKENS: sum(it.length for it in shares_of(row.request.shares, instance)),
            ANSWER_TOKENS: sum(it.length for it in kept),
            **({} if first is None else {ANSWER_FROM: first - row.prompt}),
            EXCHANGE_S: self.exchanges.under_way_s - row.exchanges.under_way_s,
            COMMUNICATION_S: self.exchanges.waited_s - row.exchanges.waited_s,
        }

    # --- the engine thread: one iteration ------------------------------------------------------

    def iterate(self, group: Sequence[int] = ()) -> list[int]:
        """One token for every row that decodes, and a piece of the prompts of those that ride;
        returns those of this rank's rows that are finished now.

        Args:
            group: ranks; rows that concern others wait for a lease of their own. Empty: all rows.
                It stays the same for a rank until rows join or leave.
        """
        self._busy_since = begin = time.monotonic()
        batch = self._next_batch(group)
        logits_rv = forward(self._engine, batch, self.exchanges)
        for row, length in zip(self._iterated, self._lengths, strict=True):
            self._advance(row, length)
        mine = [row for row, _ in batch.drawing]
        finished = draw_rows(self._engine, self._notify, mine, logits_rv)
        self.iterations += 1
        self.iterating_s += time.monotonic() - begin
        self._busy_since = None
        return finished

    def _next_batch(self, group: Sequence[int]) -> Batch:
        """It stays what it was as long as the same rows decode, and keepers take no turns."""
        if self._same_for > 0:
            self._same_for -= 1
            return self._batch
        rows = self._iterated = self._rows_of(group)
        states = [row.state for row in rows]
        self._lengths = fill(states, self._budget)
        self._batch = batch_of(self._engine, rows, self._lengths)
        self.rides = any(it.next < it.prompt for it in states)
        if not self.rides and all(row.keeps_at_master for row in rows):
            left = (it.stop - it.next for it in states if it.next < it.stop)
            self._same_for = min(left, default=1) - 1
        return self._batch

    def _rows_of(self, group: Sequence[int]) -> list[Row]:
        if not group:
            return self._rows
        instances = {self._engine.layout.instance_of(rank) for rank in group}
        return [row for row in self._rows if row.instances <= instances]

    def _advance(self, row: Row, length: int) -> None:
        """A row has computed so many positions; all ranks count alike."""
        rode = not row.decodes
        row.next += length
        if length and row.decodes:
            row.index += 1
            if rode:
                row.slots = self._slots(row.request, row.next)

"""What one iteration of a stream computes, as one rank sees it: decode rows and pieces of prompts.

Every row has a master, who embeds its tokens and draws the next one. Queries go to whoever holds
KV of the row's sequence from before this iteration, and what a piece computes goes to whoever is
to keep it. All ranks derive their parts from the same rows and lengths, in the same order.

Shape suffixes: r query rows of this master, t tokens, h heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from csps.actors.engine.engine import Engine
from csps.actors.engine.rows import Row
from csps.actors.held_rows import HeldRows, RequestSlots
from csps.actors.strategies.query_exchange import QueryRoutes
from csps.protocols.span import Span


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Positions of a prompt that a master computes in this iteration."""

    row: Row
    span: Span
    rows: slice
    """Of the master's query rows."""

    @property
    def draws(self) -> bool:
        """The prompt ends with it."""
        return self.span.stop == self.row.prompt


@dataclass(frozen=True)
class HeldPiece:
    """What is held here of the sequence that a piece belongs to, from before it."""

    length: int
    """Query rows."""
    runs: Sequence[range]
    """Slots, each of which every query sees."""


@dataclass(eq=False)
class Batch:
    """One rank's part of an iteration."""

    decoding: list[Row] = field(default_factory=list)
    """Own rows that decode; they are the first query rows."""
    pieces: list[Piece] = field(default_factory=list)
    """Own pieces, behind them."""
    routes: QueryRoutes = field(default_factory=lambda: QueryRoutes(rows=0, held_here=()))
    held: dict[int | None, HeldRows] = field(default_factory=dict)
    """By the peer whose decode rows they are; own ones under None."""
    held_pieces: dict[int | None, list[HeldPiece]] = field(default_factory=dict)
    """The same of pieces. Of own ones there is an entry also where nothing is held."""
    growing: list[tuple[RequestSlots, int]] = field(default_factory=list)
    """Own rows that decode and whose KV is kept here: each takes a slot in every iteration. Which
    query row it is."""
    sent: dict[int, list[slice]] = field(default_factory=dict)
    """By peer: query rows whose keys and values it keeps."""
    received: dict[int, list[int]] = field(default_factory=dict)
    """By peer: slots for keys and values that it computes."""
    stored_rows: list[int] = field(default_factory=list)
    stored_slots: list[int] = field(default_factory=list)
    """Query rows of pieces whose keys and values are kept here, and where."""

    _received_at: dict[int, Tensor] = field(default_factory=dict)

    def received_at(self, peer: int, device: torch.device) -> Tensor:
        """(t,) int64: the slots, moved to the device once for all layers."""
        if peer not in self._received_at:
            slots = torch.tensor(self.received[peer], dtype=torch.int64, device=device)
            self._received_at[peer] = slots
        return self._received_at[peer]

    @property
    def rows(self) -> int:
        """Own query rows."""
        return self.routes.rows

    @property
    def drawing(self) -> list[tuple[Row, int]]:
        """Own rows that a token is drawn for, each with its last query row."""
        ends = [(it.row, it.rows.stop - 1) for it in self.pieces if it.draws]
        return [(row, at) for at, row in enumerate(self.decoding)] + ends


def batch_of(engine: Engine, rows: Sequence[Row], lengths: Sequence[int]) -> Batch:
    """This rank's part of an iteration in which each row computes so many positions."""
    return _Builder(engine).batch(rows, lengths)


class _Builder:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._here = engine.instance
        self._batch = Batch()
        self._outgoing: dict[int, list[int]] = {}
        self._incoming: dict[int, int] = {}
        self._held: dict[int | None, list[RequestSlots]] = {}
        self._count = 0

    def batch(self, rows: Sequence[Row], lengths: Sequence[int]) -> Batch:
        active = [(row, length) for row, length in zip(rows, lengths, strict=True) if length]
        for row, _ in active:
            if row.decodes:
                self._decode(row)
        for row, length in active:
            if not row.decodes:
                self._piece(row, length)
        batch = self._batch
        batch.held = {peer: HeldRows(slots) for peer, slots in self._held.items()}
        batch.routes = QueryRoutes(
            rows=self._count,
            held_here=range(self._count),
            outgoing=self._outgoing,
            incoming=self._incoming,
        )
        return batch

    def _decode(self, row: Row) -> None:
        master, keeper, holders = row.request.master, row.keeper, row.holders
        if row.slots is not None and self._here in (master, *holders):
            if keeper == self._here != master:
                received = self._batch.received.setdefault(self._peer(master), [])
                received.append(row.slots.append())
            self._held.setdefault(self._asker(master), []).append(row.slots)
            self._count_incoming(master, 1)
        if master == self._here:
            at = self._ask(holders, 1)
            self._batch.decoding.append(row)
            if keeper != self._here:
                sent = self._batch.sent.setdefault(self._peer(keeper), [])
                sent.append(slice(at, at + 1))
            elif row.slots is not None:
                self._batch.growing.append((row.slots, at))

    def _piece(self, row: Row, length: int) -> None:
        span = Span(start=row.next, stop=row.next + length)
        master, before = row.request.master, row.shares_before(span.start)
        holders = {it.instance for it in before}
        if self._here in holders or master == self._here:
            runs = self._engine.pool.slots.runs(row.rid, Span(start=0, stop=span.start))
            held = self._batch.held_pieces.setdefault(self._asker(master), [])
            held.append(HeldPiece(length, runs))
            self._count_incoming(master, length)
        self._keep(row, span)
        if master == self._here:
            first = self._ask(holders, length)
            at = slice(first, first + length)
            self._batch.pieces.append(Piece(row=row, span=span, rows=at))

    def _ask(self, holders: set[int], rows: int) -> int:
        """Number own query rows, of whose sequence others hold KV; returns the first number."""
        first = self._count
        self._count += rows
        for holder in sorted(holders - {self._here}):
            self._outgoing.setdefault(self._peer(holder), []).extend(range(first, self._count))
        return first

    def _count_incoming(self, master: int, rows: int) -> None:
        if master != self._here:
            peer = self._peer(master)
            self._incoming[peer] = self._incoming.get(peer, 0) + rows

    def _keep(self, row: Row, span: Span) -> None:
        """Where a piece's keys and values go."""
        master = row.request.master
        for share in row.shares_of(span):
            own = range(self._count, self._count + span.length)[span.rows_of(share.span)]
            if share.instance == self._here:
                slots = self._engine.pool.slots.by_position(row.rid, share.span).tolist()
                if master == self._here:
                    self._batch.stored_rows += own
                    self._batch.stored_slots += slots
                else:
                    self._batch.received.setdefault(self._peer(master), []).extend(slots)
            elif master == self._here:
                sent = self._batch.sent.setdefault(self._peer(share.instance), [])
                sent.append(slice(own.start, own.stop, own.step))

    def _asker(self, master: int) -> int | None:
        return None if master == self._here else self._peer(master)

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)

"""The stream of rows that a gang iterates: batching over KV that lies anywhere (CSPS §4.2).

The log says who joins and leaves, and how often to iterate. Each instance embeds the tokens of the
rows that it masters, stores their KV or sends it to who keeps it, sends their Q to the instances
that hold other parts of their sequences, computes its own part meanwhile, merges what comes back
and draws. A row that rides computes pieces of its prompt in the same iterations in which others
decode (Sarathi-Serve). All ranks derive the same batches from the same log, so that nothing else
has to be agreed upon.

Shape suffixes: r query rows, t tokens, h heads, d head dim.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from csps.actors.announce import Notify, request_failed, token_drawn
from csps.actors.engine.batch import Batch, batch_of
from csps.actors.engine.engine import Engine
from csps.actors.engine.held_attention import attend_held
from csps.actors.engine.rows import Row, answer_of, last_position
from csps.actors.held_rows import RequestSlots
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.mesh import PEER_DEADLINE, ControlTag, Tag
from csps.actors.sampler_request import drawn_before, sampler_of
from csps.actors.sampling import Draw, TokenSampler, draw_batch
from csps.actors.strategies.group import shares_of
from csps.actors.strategies.query_exchange import exchange_queries
from csps.protocols.errors import (
    Cancelled,
    CspsError,
    DeadlineExceeded,
    FaultError,
    ProtocolError,
)
from csps.protocols.iteration import fill
from csps.protocols.log_entries import Change
from csps.protocols.messages import Reserve, Span, TokenDrawn, Tokens
from csps.protocols.placement import rest_of

_log = logging.getLogger(__name__)

ITERATION_S = 120.0
"""For one iteration, which takes a second at most: longer means that ranks wait for each other."""
REMEMBERED_LEAVES = 4096
"""A reservation that arrives after its cancellation is refused; this many are remembered."""


class Stream:
    """Its rows on one rank. The engine thread changes and iterates, other threads reserve."""

    def __init__(self, engine: Engine, notify: Notify, let_go: Callable[[int], None]) -> None:
        """
        Args:
            let_go: told of each sequence that has left: whoever else has no use for its slots is to
                free them.
        """
        self._engine = engine
        self._notify = notify
        self._let_go = let_go
        self._reservations: dict[int, Reservation] = {}
        self._samplers: dict[int, TokenSampler] = {}
        self._left: OrderedDict[int, None] = OrderedDict()
        self._ended: set[int] = set()
        """Owners that are gone: attachments of routers, so they are few."""
        self._changing = threading.Lock()
        self._rows: list[Row] = []
        self._budget = 0
        self._lengths: list[int] = []
        self._batch = Batch()
        """Of the last iteration."""
        self._same_for = 0
        """Iterations of which it is the batch as well: rows only decode, and none is at its end."""
        self.rides = False
        """The last iteration had prompts to compute, of which nobody hears by tokens."""
        self.iterations = 0
        self.iterating_s = 0.0
        self._busy_since: float | None = None

    # --- called from other threads ---------------------------------------------------------

    def reserve(self, request: Reserve, owner: int) -> None:
        """Set slots aside: this rank's shares of the prompt and of the answer.

        Args:
            owner: the router's attachment, at whose end the sequence leaves.

        Raises:
            OutOfSlots: the pool is too full; nothing was reserved.
            Cancelled: the sequence has been cancelled already, or its owner is gone.
            InvalidRequest: the sampling parameters do not fit the model.
            ProtocolError: nobody is to keep some of the answer, or it is reserved already.
        """
        answer = Span(request.prompt_length, last_position(request))
        if request.answer and rest_of(answer, (it.span for it in request.answer)):
            raise ProtocolError(
                f"request {request.rid} has positions of its answer without a keeper"
            )
        spans = shares_of(request.shares, self._engine.instance)
        # Made here and not when the row joins: bad parameters are refused now, and what long lists
        # cost does not delay the stream.
        sampler = self._sampler(request) if request.master == self._engine.instance else None
        with self._changing:
            self._refuse_unwanted(request.rid, owner)
            self._engine.pool.allocate(request.rid, [*spans, *self._answer(request)])
            if sampler is not None:
                self._samplers[request.rid] = sampler
            self._reservations[request.rid] = Reservation(
                request=request,
                spans=spans,
                heads=self._engine.kv_heads,
                layers=self._engine.spec.layers,
                owner=owner,
            )

    def _refuse_unwanted(self, rid: int, owner: int) -> None:
        if rid in self._left or owner in self._ended:
            raise Cancelled(f"request {rid} was cancelled before it was reserved")
        if rid in self._reservations:
            raise ProtocolError(f"request {rid} is reserved already")

    def _answer(self, request: Reserve) -> tuple[Span, ...]:
        """Positions of the answer that are kept here; its last token is never embedded."""
        return shares_of(answer_of(request), self._engine.instance)

    def find(self, rid: int) -> Reservation | None:
        """The reservation that arriving KV belongs to."""
        return self._reservations.get(rid)

    def adopt(self, rid: int, span: Span) -> None:
        """A part of a prompt was computed where it is decoded."""
        reservation = self._reservations.get(rid)
        if reservation is not None and span.length and reservation.adopt(span):
            self._notify("landed", reservation.landed(self._engine.rank))

    @property
    def reserved(self) -> int:
        """Sequences that hold slots here or are expected to."""
        return len(self._reservations)

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
        with self._changing:
            self._ended.add(owner)
            theirs = [rid for rid, it in self._reservations.items() if it.owner == owner]
        for rid in theirs:
            self._leave(rid)
        self._same_for = 0

    def _join(self, rid: int, token: int | None) -> None:
        reservation = self._reservations.get(rid)
        if reservation is None:
            # Every rank sees changes in one order, so who has left has left everywhere.
            if rid not in self._left:
                raise FaultError(f"request {rid} joins without a reservation")
            return
        request, sampler = reservation.request, self._samplers.get(rid)
        row = Row(
            reservation=reservation,
            index=drawn_before(request.drawn),
            next=0,
            token=0,
            sampler=sampler,
        )
        if token is not None:
            row.next, row.token, row.index = request.prompt_length, token, row.index + 1
            row.slots = self._slots(request)
            if sampler is not None:
                sampler.observe(token)
        reservation.joined(self._engine.rank)
        self._rows.append(row)

    def _slots(self, request: Reserve, computed: Span | None = None) -> RequestSlots | None:
        """Where the KV of a row that decodes lies here: all of its prompt's has landed, or was
        computed by the stream."""
        answer = self._answer(request)
        spans = shares_of(request.shares, self._engine.instance)
        # The master looks at what it has as well when it asks others, even if it has nothing.
        masters = request.master == self._engine.instance
        if not masters and not any(span.length for span in (*answer, *spans)):
            return None
        layers = range(self._engine.spec.layers)
        return RequestSlots(self._engine.pool, request.rid, layers, answer, computed)

    def _sampler(self, request: Reserve) -> TokenSampler:
        return sampler_of(request, self._engine.spec.vocab)

    def _leave(self, rid: int) -> None:
        self._rows = [row for row in self._rows if row.rid != rid]
        with self._changing:
            self._left[rid] = None
            if len(self._left) > REMEMBERED_LEAVES:
                self._left.popitem(last=False)
            reservation = self._reservations.pop(rid, None)
            self._samplers.pop(rid, None)
        if reservation is not None:
            with reservation.lock:
                reservation.closed = True
            reservation.left()
        self._let_go(rid)

    # --- the engine thread: one iteration ------------------------------------------------------

    def iterate(self) -> list[int]:
        """One token for every row that decodes, and a piece of the prompts of those that ride;
        returns those of this rank's rows that are finished now."""
        self._busy_since = begin = time.monotonic()
        batch = self._next_batch()
        logits_rv = self._forward(batch)
        for row, length in zip(self._rows, self._lengths, strict=True):
            self._advance(row, length)
        finished = self._draw([row for row, _ in batch.drawing], logits_rv)
        self.iterations += 1
        self.iterating_s += time.monotonic() - begin
        self._busy_since = None
        return finished

    def _next_batch(self) -> Batch:
        """It stays what it was as long as the same rows decode, and keepers take no turns."""
        if self._same_for > 0:
            self._same_for -= 1
            return self._batch
        states = [row.state for row in self._rows]
        self._lengths = fill(states, self._budget)
        self._batch = batch_of(self._engine, self._rows, self._lengths)
        self.rides = any(it.next < it.prompt for it in states)
        if not self.rides and all(row.keeps_at_master for row in self._rows):
            left = (it.stop - it.next for it in states if it.next < it.stop)
            self._same_for = min(left, default=1) - 1
        return self._batch

    def _advance(self, row: Row, length: int) -> None:
        """A row has computed so many positions; all ranks count alike."""
        rode = not row.decodes
        row.next += length
        if length and row.decodes:
            row.index += 1
            if rode:
                row.slots = self._slots(row.request, Span(start=0, stop=row.prompt))

    def _forward(self, batch: Batch) -> Tensor:
        """Logits of the own rows that a token is drawn for."""
        network, pool = self._engine.network, self._engine.pool
        device = self._engine.device
        if not batch.rows:
            return self._serve_others(batch)
        x_td = network.embed(_tokens(batch).to(device))
        rotary = network.rotary(_positions(batch).to(device))
        slots = [held.append() for held, _ in batch.growing] + batch.stored_slots
        stored = [row for _, row in batch.growing] + batch.stored_rows
        slots_t = torch.tensor(slots, dtype=torch.int64, device=device)
        stored_t = torch.tensor(stored, dtype=torch.int64, device=device)
        stores_all = stored == list(range(batch.rows))
        if None in batch.held:
            batch.held[None].grown()
        for index, layer in enumerate(network.layers):
            q_rhd, k_rhd, v_rhd = layer.qkv(x_td, rotary)
            if stores_all:
                pool.write_slots(index, slots_t, k_rhd, v_rhd)
            elif stored:
                pool.write_slots(index, slots_t, k_rhd[stored_t], v_rhd[stored_t])
            self._hand_over(batch, index, k_rhd, v_rhd)
            out_rhd = self._attend(batch, index, q_rhd, k_rhd, v_rhd)
            x_td = layer.finish(x_td, out_rhd.to(q_rhd.dtype))
        if batch.pieces:
            x_td = x_td[[at for _, at in batch.drawing]]
        return network.logits(x_td)

    def _serve_others(self, batch: Batch) -> Tensor:
        """An iteration without rows of its own: a look at what is held for others' rows."""
        spec, pool = self._engine.spec, self._engine.pool
        none_rhd = pool.k.new_empty(0, self._engine.heads, spec.head_dim)
        no_kv_rhd = pool.k.new_empty(0, pool.kv_heads, spec.head_dim)
        for index in range(spec.layers):
            self._hand_over(batch, index, no_kv_rhd, no_kv_rhd)
            self._attend(batch, index, none_rhd, no_kv_rhd, no_kv_rhd)
        return none_rhd.new_empty(0, spec.vocab)

    def _hand_over(self, batch: Batch, layer: int, k_rhd: Tensor, v_rhd: Tensor) -> None:
        """Keys and values of pieces to those who keep them."""
        if not batch.sent and not batch.received:
            return
        kv_rhd = torch.stack((k_rhd, v_rhd), 1)
        sends = [
            (peer, torch.cat([kv_rhd[rows] for rows in cuts])) for peer, cuts in batch.sent.items()
        ]
        buffers = {
            peer: kv_rhd.new_empty(len(slots), *kv_rhd.shape[1:])
            for peer, slots in batch.received.items()
        }
        self._engine.mesh.exchange(sends, list(buffers.items()), Tag.KEPT_ROWS).wait()
        for peer, arrived in buffers.items():
            slots_t = batch.received_at(peer, kv_rhd.device)
            self._engine.pool.write_slots(layer, slots_t, arrived[:, 0], arrived[:, 1])

    def _attend(
        self, batch: Batch, layer: int, q_rhd: Tensor, k_rhd: Tensor, v_rhd: Tensor
    ) -> Tensor:
        """Own rows' attention over all that lies before them, wherever it does."""

        def partial(peer: int | None, asked_rhd: Tensor) -> tuple[Tensor, Tensor]:
            own = (k_rhd, v_rhd) if peer is None else None
            return attend_held(self._engine, batch, layer, peer, asked_rhd, own)

        return exchange_queries(
            q_rhd,
            mesh=self._engine.mesh,
            routes=batch.routes,
            partial=partial,
            tags=(Tag.DECODE_QUERY, Tag.DECODE_PARTIAL),
        )

    # --- the engine thread: drawing ------------------------------------------------------------

    def _draw(self, mine: list[Row], logits_rv: Tensor) -> list[int]:
        """Draw on the instance's first rank and tell the others; the rows that are finished."""
        if not mine:
            return []
        words = torch.zeros(len(mine), 2, dtype=torch.int64)
        if self._engine.tp_rank == 0:
            words = self._drawn(mine, logits_rv)
        self._share_tokens(words)
        finished = []
        for row, (token, done) in zip(mine, words.tolist(), strict=True):
            row.token = token
            if done:
                row.over = True
                finished.append(row.rid)
        return finished

    def _drawn(self, mine: list[Row], logits_rv: Tensor) -> Tensor:
        """(rows, 2) int64: each row's token, and whether it is finished by it."""
        words = torch.zeros(len(mine), 2, dtype=torch.int64)
        heard = [(at, row) for at, row in enumerate(mine) if not row.over]
        samplers = [row.sampler for _, row in heard if row.sampler is not None]
        if len(heard) < len(mine):
            logits_rv = logits_rv[[at for at, _ in heard]]
        # Rows have been counted on already.
        draws = draw_batch(samplers, logits_rv, [row.index - 1 for _, row in heard])
        announced = self._announce([row for _, row in heard], draws)
        if announced:
            words[[at for at, _ in heard]] = torch.tensor(announced, dtype=torch.int64)
        return words

    def _announce(
        self, rows: list[Row], draws: Sequence[Draw | CspsError]
    ) -> list[tuple[int, int]]:
        """Tell the router; returns each row's token and whether it is finished."""
        drawn: list[TokenDrawn] = []
        words: list[tuple[int, int]] = []
        for row, draw in zip(rows, draws, strict=True):
            if isinstance(draw, CspsError):
                self._notify("failed", request_failed(row.rid, self._engine.rank, draw))
                words.append((0, 1))
                continue
            drawn.append(token_drawn(row.rid, row.index - 1, draw))
            words.append((draw.token, int(draw.finish_reason is not None)))
        if drawn:
            self._notify("tokens", Tokens.of(drawn))
        return words

    def _share_tokens(self, words: Tensor) -> None:
        engine, first = self._engine, self._peer_at(0)
        if engine.layout.tp == 1:
            return
        if engine.tp_rank:
            engine.mesh.hear(words, first, ControlTag.DECODE_TOKEN).wait(PEER_DEADLINE)
            return
        for tp_rank in range(1, engine.layout.tp):
            engine.mesh.tell(words, self._peer_at(tp_rank), ControlTag.DECODE_TOKEN).wait(
                PEER_DEADLINE
            )

    def _peer_at(self, tp_rank: int) -> int:
        return self._engine.layout.rank_of(self._engine.instance, tp_rank)


def _tokens(batch: Batch) -> Tensor:
    """(r,) int64, of own rows."""
    decoding = torch.tensor([row.token for row in batch.decoding], dtype=torch.int64)
    pieces = [
        torch.from_numpy(it.row.tokens[it.span.start : it.span.stop].astype(np.int64))
        for it in batch.pieces
    ]
    return torch.cat([decoding, *pieces]) if pieces else decoding


def _positions(batch: Batch) -> Tensor:
    """(r,) int64, of own rows."""
    decoding = torch.tensor([row.next for row in batch.decoding], dtype=torch.int64)
    pieces = [torch.arange(it.span.start, it.span.stop) for it in batch.pieces]
    return torch.cat([decoding, *pieces]) if pieces else decoding

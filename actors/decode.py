"""The decode loop of a rank: continuous batching over KV that lies anywhere (CSPS §4.2).

Every iteration the leader (rank 0) tells the gang who joins and leaves. Each instance embeds the
tokens of the requests it masters, stores their KV, sends their Q to the instances that hold other
parts of those requests, computes its own part meanwhile, merges what comes back and draws. All
ranks derive the same routes from the same orders, so that nothing else has to be agreed upon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.announce import Notify, request_failed, token_drawn
from csps.actors.engine.engine import Engine
from csps.actors.held_rows import HeldRows, RequestSlots
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.mesh import PEER_DEADLINE, ControlTag, Tag
from csps.actors.name_digest import name_digest
from csps.actors.orders import Change, Order, OrderChannel
from csps.actors.sampler_request import drawn_before, sampler_of
from csps.actors.sampling import Draw, TokenSampler, draw_batch
from csps.actors.strategies.group import shares_of
from csps.actors.strategies.query_exchange import QueryRoutes, exchange_queries
from csps.protocols.errors import (
    Cancelled,
    CspsError,
    DeadlineExceeded,
    FaultError,
    ProtocolError,
)
from csps.protocols.messages import (
    JoinBatch,
    Reserve,
    SlotsFreed,
    Span,
    TokenDrawn,
    Tokens,
)

_log = logging.getLogger(__name__)

ITERATION_S = 120.0
"""For one iteration, which takes a second at most: longer means that ranks wait for each other."""
REMEMBERED_LEAVES = 4096
"""A reservation that arrives after its cancellation is refused; this many are remembered."""


@dataclass(eq=False)
class _Decoding:
    """A request in the batch."""

    reservation: Reservation
    token: int
    """To be embedded next."""
    sampler: TokenSampler | None
    index: int
    """Number of the answer's token that the next iteration draws."""
    slots: RequestSlots | None = None
    """Of its KV, as far as it lies here."""

    @property
    def rid(self) -> int:
        return self.reservation.request.rid

    @property
    def master(self) -> int:
        return self.reservation.request.master

    @property
    def position(self) -> int:
        """Of the token to be embedded."""
        request = self.reservation.request
        return request.prompt_length - drawn_before(request.drawn) + self.index - 1


class DecodeLoop:
    """Decodes the batch; `run` is the engine thread's body, the rest is called from others."""

    def __init__(self, engine: Engine, notify: Notify) -> None:
        self._engine = engine
        self._notify = notify
        self._channel = OrderChannel(engine.mesh)
        self._is_leader = engine.rank == 0
        self._reservations: dict[int, Reservation] = {}
        self._samplers: dict[int, TokenSampler] = {}
        self._left: OrderedDict[int, None] = OrderedDict()
        self._ended: set[int] = set()
        """Digests of owners that are gone: attachments of routers, so they are few."""
        self._orders: deque[Order] = deque()
        self._changed = threading.Condition()
        self._batch: list[_Decoding] = []
        self._routes = QueryRoutes(rows=0, held_here=())
        self._held: dict[int | None, HeldRows] = {}
        """By the peer whose rows they are; own ones under None."""
        self.iterations = 0
        self.iterating_s = 0.0
        """What they took, orders included, while the batch was not empty."""
        self._busy_since: float | None = None

    # --- called from other threads ---------------------------------------------------------

    def reserve(self, request: Reserve, owner: str) -> None:
        """Set slots aside: this rank's share of the prompt, and the answer at its master.

        Args:
            owner: the router's attachment, at whose end the request leaves.

        Raises:
            OutOfSlots: the pool is too full; nothing was reserved.
            Cancelled: the request has been cancelled already, or its owner is gone.
            InvalidRequest: the sampling parameters do not fit the model.
        """
        spans = shares_of(request.shares, self._engine.instance)
        # Made here and not when the request joins: bad parameters are refused now, and what long
        # lists cost does not delay the batch.
        sampler = self._sampler(request) if request.master == self._engine.instance else None
        with self._changed:
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

    def _refuse_unwanted(self, rid: int, owner: str) -> None:
        if rid in self._left or name_digest(owner) in self._ended:
            raise Cancelled(f"request {rid} was cancelled before it was reserved")
        if rid in self._reservations:
            raise ProtocolError(f"request {rid} is reserved already")

    def _answer(self, request: Reserve) -> list[Span]:
        """Positions of the answer, if it is stored here; its last token is never embedded."""
        if request.master != self._engine.instance:
            return []
        start = request.prompt_length
        to_come = request.sampling.max_tokens - drawn_before(request.drawn)
        return [Span(start=start, stop=start + max(0, to_come - 1))]

    def find(self, rid: int) -> Reservation | None:
        """The reservation that arriving KV belongs to."""
        return self._reservations.get(rid)

    def join(self, request: JoinBatch) -> None:
        """Leader: decode a request from the next iteration on."""
        assert request.first_token is not None, "nothing rides on these ranks"
        self._order(Order(Change.JOIN, request.rid, request.first_token))

    def cancel(self, rid: int) -> None:
        """Make a request leave the gang; only the leader acts, so that all ranks agree when."""
        self._order(Order(Change.LEAVE, rid))

    def cancel_all(self, owner: str) -> None:
        """Make all requests of an owner leave, and refuse its late ones; only the leader acts."""
        self._order(Order(Change.END_OWNER, name_digest(owner)))

    @property
    def reserved(self) -> int:
        """Requests that hold slots here or are expected to."""
        return len(self._reservations)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._batch)

    def check_progress(self) -> None:
        """Raise DeadlineExceeded if an iteration does not end."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > ITERATION_S:
            raise DeadlineExceeded("an iteration of decoding", ITERATION_S)

    def close(self) -> None:
        """End the gang's loops, if this rank leads it."""
        self._order(Order(Change.SHUTDOWN))

    def _order(self, order: Order) -> None:
        if self._is_leader:
            with self._changed:
                self._orders.append(order)
                self._changed.notify()

    # --- the engine thread -----------------------------------------------------------------

    def run(self) -> None:
        """Iterate until shut down. An exception means that the gang is broken."""
        finished: list[int] = []
        with torch.inference_mode():
            while True:
                orders = self._next_orders(finished)
                if any(order.change is Change.SHUTDOWN for order in orders):
                    self._channel.flush()
                    return
                if orders:
                    self._apply(orders)
                finished = self._iterate() if self._batch else []
                self._count_time()

    def _count_time(self) -> None:
        assert self._busy_since is not None, "orders have been waited for"
        if self._batch:
            self.iterating_s += time.monotonic() - self._busy_since
        self._busy_since = None

    def _next_orders(self, finished: list[int]) -> list[Order]:
        if not self._is_leader:
            orders = self._channel.receive()
            self._busy_since = time.monotonic()
            return orders
        leaves = [Order(Change.LEAVE, rid) for rid in finished]
        with self._changed:
            self._changed.wait_for(lambda: leaves or self._orders or self._batch)
            orders = leaves + list(self._orders)
            self._orders.clear()
        self._busy_since = time.monotonic()
        self._channel.broadcast(orders)
        return orders

    def _apply(self, orders: list[Order]) -> None:
        for order in orders:
            if order.change is Change.JOIN:
                self._join(order)
            elif order.change is Change.LEAVE:
                self._leave(order.rid)
            elif order.change is Change.END_OWNER:
                self._end_owner(order.rid)
        self._routes = self._derive_routes()

    def _join(self, order: Order) -> None:
        reservation = self._reservations.get(order.rid)
        if reservation is None:
            # Every rank sees orders in one order, so who has left has left everywhere.
            if order.rid not in self._left:
                raise FaultError(f"request {order.rid} joins without a reservation")
            return
        sampler = self._samplers.get(order.rid)
        if sampler is not None:
            sampler.observe(order.token)
        reservation.joined(self._engine.rank)
        index = drawn_before(reservation.request.drawn) + 1
        self._batch.append(
            _Decoding(reservation, order.token, sampler, index, self._slots(reservation.request))
        )

    def _slots(self, request: Reserve) -> RequestSlots | None:
        """Where its KV lies here; all of the prompt's has landed."""
        answer = self._answer(request)
        spans = shares_of(request.shares, self._engine.instance)
        if not answer and not any(span.length for span in spans):
            return None
        layers = range(self._engine.spec.layers)
        return RequestSlots(self._engine.pool, request.rid, layers, *answer)

    def _end_owner(self, number: int) -> None:
        with self._changed:
            self._ended.add(number)
            reservations = list(self._reservations.items())
        for rid, reservation in reservations:
            if name_digest(reservation.owner) == number:
                self._leave(rid)

    def _sampler(self, request: Reserve) -> TokenSampler:
        return sampler_of(request, self._engine.spec.vocab)

    def _leave(self, rid: int) -> None:
        self._batch = [decoding for decoding in self._batch if decoding.rid != rid]
        with self._changed:
            self._left[rid] = None
            if len(self._left) > REMEMBERED_LEAVES:
                self._left.popitem(last=False)
            reservation = self._reservations.pop(rid, None)
            self._samplers.pop(rid, None)
        if reservation is not None:
            with reservation.lock:
                reservation.closed = True
                self._engine.pool.free_request(rid)
            reservation.left()
        self._notify("freed", SlotsFreed(rid=rid, rank=self._engine.rank))

    # --- one iteration ---------------------------------------------------------------------

    def _iterate(self) -> list[int]:
        """One token for every request; the leader learns which of them are finished."""
        self.iterations += 1
        mine = [decoding for decoding in self._batch if decoding.master == self._engine.instance]
        logits_tv = self._forward(mine)
        finished = self._draw(mine, logits_tv) if mine else []
        for decoding in self._batch:
            decoding.index += 1
        return self._report(finished)

    def _forward(self, mine: list[_Decoding]) -> Tensor:
        """Logits of the own rows."""
        network, pool = self._engine.network, self._engine.pool
        device = self._engine.device
        if not mine:
            return self._serve_others()
        x_td = network.embed(
            torch.tensor([d.token for d in mine], dtype=torch.int64, device=device)
        )
        positions = torch.tensor([d.position for d in mine], dtype=torch.int64, device=device)
        rotary = network.rotary(positions)
        slots = [d.slots.append() for d in mine if d.slots is not None]
        slots_t = torch.tensor(slots, dtype=torch.int64, device=device)
        self._held[None].grown()
        for index, layer in enumerate(network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            pool.write_slots(index, slots_t, k_thd, v_thd)
            out_thd = self._attend(index, q_thd)
            x_td = layer.finish(x_td, out_thd.to(q_thd.dtype))
        return network.logits(x_td)

    def _serve_others(self) -> Tensor:
        """An iteration without rows of its own: a look at what is held for others' rows."""
        spec, pool = self._engine.spec, self._engine.pool
        none_thd = pool.k.new_empty(0, self._engine.heads, spec.head_dim)
        for index in range(spec.layers):
            self._attend(index, none_thd)
        return none_thd.new_empty(0, spec.vocab)

    def _attend(self, layer: int, q_thd: Tensor) -> Tensor:
        return exchange_queries(
            q_thd,
            mesh=self._engine.mesh,
            routes=self._routes,
            partial=lambda peer, q_rhd: self._engine.attend_rows(layer, q_rhd, self._held[peer]),
            tags=(Tag.DECODE_QUERY, Tag.DECODE_PARTIAL),
        )

    def _derive_routes(self) -> QueryRoutes:
        """Rows are numbered by their place in the batch, which all ranks order alike."""
        here = self._engine.instance
        rows = 0
        outgoing: dict[int, list[int]] = {}
        held: dict[int | None, list[RequestSlots]] = {}
        for decoding in self._batch:
            request = decoding.reservation.request
            holders = {share.instance for share in request.shares if share.span.length}
            if decoding.slots is not None:
                owner = None if request.master == here else self._peer(request.master)
                held.setdefault(owner, []).append(decoding.slots)
            if request.master == here:
                for holder in sorted(holders - {here}):
                    outgoing.setdefault(self._peer(holder), []).append(rows)
                rows += 1
        self._held = {owner: HeldRows(requests) for owner, requests in held.items()}
        return QueryRoutes(
            rows=rows,
            held_here=range(rows),
            outgoing=outgoing,
            incoming={peer: len(it) for peer, it in held.items() if peer is not None},
        )

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)

    # --- drawing ---------------------------------------------------------------------------

    def _draw(self, mine: list[_Decoding], logits_tv: Tensor) -> list[int]:
        """Draw on the instance's first rank and tell the others; returns the finished rids."""
        words = torch.zeros(len(mine), 2, dtype=torch.int64)
        if self._engine.tp_rank == 0:
            samplers = [d.sampler for d in mine if d.sampler is not None]
            draws = draw_batch(samplers, logits_tv, [d.index for d in mine])
            words = torch.tensor(self._announce(mine, draws), dtype=torch.int64)
        self._share_tokens(words)
        for decoding, (token, _) in zip(mine, words.tolist(), strict=True):
            decoding.token = token
        return [d.rid for d, (_, done) in zip(mine, words.tolist(), strict=True) if done]

    def _announce(
        self, mine: list[_Decoding], draws: Sequence[Draw | CspsError]
    ) -> list[tuple[int, int]]:
        """Tell the router; returns each request's token and whether it is finished."""
        drawn: list[TokenDrawn] = []
        words: list[tuple[int, int]] = []
        for decoding, draw in zip(mine, draws, strict=True):
            if isinstance(draw, CspsError):
                self._notify("failed", request_failed(decoding.rid, self._engine.rank, draw))
                words.append((0, 1))
                continue
            drawn.append(token_drawn(decoding.rid, decoding.index, draw))
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

    def _report(self, finished: list[int]) -> list[int]:
        """To the leader from every other master: which requests are finished."""
        engine = self._engine
        counts = [sum(d.master == i for d in self._batch) for i in range(engine.layout.instances)]
        if not self._is_leader:
            if engine.tp_rank == 0 and counts[engine.instance]:
                words = torch.zeros(1 + counts[engine.instance], dtype=torch.int64)
                words[: 1 + len(finished)] = torch.tensor([len(finished), *finished])
                engine.mesh.tell(words, 0, ControlTag.DECODE_REPORT).wait(PEER_DEADLINE)
            return []
        for instance in range(1, engine.layout.instances):
            if counts[instance]:
                words = torch.empty(1 + counts[instance], dtype=torch.int64)
                engine.mesh.hear(
                    words, engine.layout.rank_of(instance, 0), ControlTag.DECODE_REPORT
                ).wait(PEER_DEADLINE)
                finished = finished + words[1 : 1 + int(words[0])].tolist()
        return finished

"""A paced gang that decodes: continuous batching, one frame of tokens a master and iteration.

Today's messages around the simulator's model of ranks that a conductor orders. Requests may ride:
iterations are then filled with pieces of their prompts, as real ranks fill them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.conducted_ranks import ConductedRanks
from csps.loadgen.simulator.decode_batch import Row
from csps.loadgen.simulator.slots import Slots
from csps.protocols.messages import CancelRequest, JoinBatch, KvLanded, Reserve, SlotsFreed
from csps.protocols.placement import KvShare
from csps.protocols.rpc_server import Peer
from csps.protocols.schema import unpack
from csps.protocols.tokens import TokenDrawn, Tokens
from paced.clock import PacedTimeline
from paced.ranks import PacedRanks, Words


@dataclass(eq=False, slots=True)
class _Held:
    """A request that holds slots, in the batch or not."""

    request: Reserve
    missing: dict[int, int]
    """KV that has not arrived, by instance."""
    shares: dict[int, int]
    index: int
    """Of the answer's token that iterations draw next."""


class PacedDecode:
    """Iterates at the model's pace, on absolute time."""

    def __init__(
        self, timeline: PacedTimeline, cluster: ClusterModel, words: Words, secret: bytes
    ) -> None:
        self._timeline, self._words = timeline, words
        self._slots = Slots(cluster.decode.kv_slots)
        self._held: dict[int, _Held] = {}
        self._batch = ConductedRanks(
            timeline,
            len(cluster.decode.instances),
            hybrid=cluster.hybrid_of,
            quantum_ns=cluster.quantum_ns,
            gap_ns=cluster.iteration_gap_ns,
            finished=lambda row: self._leave(row.sequence),
            prefilled=self._prefilled,
            drawn=self._drawn,
        )
        self.tokens = 0
        """Drawn so far."""
        self.emitted: list[tuple[int, int, int]] | None = None
        """(rid, index, time in ns) of every token, if asked for."""
        handlers = {"reserve": self._reserve, "join": self._join, "cancel": self._cancel}
        self.ranks = PacedRanks(cluster.roles[-1], cluster, handlers, secret)

    @property
    def held(self) -> int:
        """Requests that hold slots."""
        return len(self._held)

    # --- messages ---

    def _reserve(self, payload: Any, _: Peer) -> None:
        request = unpack(Reserve, payload)
        self._timeline.catch_up()
        shares = _tokens_on(request.shares)
        drawn = len(request.drawn) // 4
        slots = dict(shares)
        answer = {request.master: request.sampling.max_tokens - drawn}
        for keeper, tokens in _tokens_on(request.answer).items() or answer.items():
            slots[keeper] = slots.get(keeper, 0) + tokens
        self._slots.take(request.rid, slots)
        self._held[request.rid] = _Held(
            request=request, missing=dict(shares), shares=shares, index=drawn
        )

    def _join(self, payload: Any, _: Peer) -> None:
        message = unpack(JoinBatch, payload)
        held = self._held.get(message.rid)
        self._timeline.catch_up()
        if held is None:
            return
        request = held.request
        row = Row(
            sequence=request.rid,
            context=request.prompt_length + 1,
            tokens=request.sampling.max_tokens - held.index - 1,
            master=request.master,
            ranks=message.instances,
        )
        if message.first_token is None:
            row.prompt = request.prompt_length
            self._batch.ride(row, message.budget)
        else:
            assert not held.missing, "a request joins before its KV has landed"
            held.index += 1
            self._batch.join(row)

    def _cancel(self, payload: Any, _: Peer) -> None:
        self._timeline.catch_up()
        rid = unpack(CancelRequest, payload).rid
        self._batch.leave(rid, partial(self._leave, rid))

    def arrived(self, rid: int, index: int, tokens: int) -> None:
        """KV of a request has arrived at an instance (`prefill.Landing`)."""
        if (held := self._held.get(rid)) is None:
            return
        held.missing[index] -= tokens
        if not held.missing[index]:
            del held.missing[index]
            landed = KvLanded(rid=rid, rank=index, tokens=held.shares[index], seconds=0.0)
            self.ranks.ranks[index].tell("landed", landed)

    # --- what the model tells ---

    def _drawn(self, rows: list[Row]) -> None:
        drawn: dict[int, list[TokenDrawn]] = {}
        for row in rows:
            if (held := self._held.get(row.sequence)) is None:
                continue
            ends = held.index + 1 == held.request.sampling.max_tokens
            drawn.setdefault(row.master, []).append(
                TokenDrawn(
                    rid=row.sequence,
                    index=held.index,
                    token=self._words.token(held.index),
                    finish_reason="length" if ends else None,
                )
            )
            held.index += 1
        for master, tokens in drawn.items():
            self.tokens += len(tokens)
            if self.emitted is not None:
                at_ns = time.monotonic_ns()
                self.emitted.extend((it.rid, it.index, at_ns) for it in tokens)
            self.ranks.ranks[master].tell("tokens", Tokens.of(tokens))

    def _prefilled(self, row: Row) -> None:
        if not row.tokens:
            self._leave(row.sequence)

    def _leave(self, rid: int) -> None:
        if self._held.pop(rid, None) is not None:
            for index in self._slots.held_by(rid):
                self._slots.give_back(rid, index)
        for index, rank in enumerate(self.ranks.ranks):
            rank.tell("freed", SlotsFreed(rid=rid, rank=index))


def _tokens_on(shares: tuple[KvShare, ...]) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for it in shares:
        tokens[it.instance] = tokens.get(it.instance, 0) + it.span.length
    return tokens

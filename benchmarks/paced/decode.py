"""A paced gang that decodes: continuous batching, one frame of tokens a master and iteration.

Requests may ride: iterations are then filled with pieces of their prompts by the function that real
ranks use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.slots import Slots
from csps.protocols.iteration import RowState, fill
from csps.protocols.messages import (
    CancelRequest,
    JoinBatch,
    KvLanded,
    Reserve,
    SlotsFreed,
    TokenDrawn,
    Tokens,
)
from csps.protocols.rpc_server import Peer
from csps.protocols.schema import unpack
from paced.clock import PacedTimeline
from paced.ranks import PacedRanks, Words


@dataclass(eq=False, slots=True)
class _Row:
    """A request that holds slots, in the batch or not."""

    request: Reserve
    missing: dict[int, int]
    """KV that has not arrived, by instance."""
    shares: dict[int, int]
    index: int
    """Of the answer's token that is drawn next."""
    context: int
    """Tokens that the row's next iteration of decoding attends to."""
    prompt: int = 0
    """Of a rider: tokens that iterations compute."""
    computed: int = 0

    @property
    def prefills(self) -> bool:
        """It rides, and its prompt is not computed."""
        return self.computed < self.prompt

    @property
    def state(self) -> RowState:
        """For `fill`; all rows that decode are alike."""
        return RowState(self.computed, self.prompt, self.prompt + 1, self.request.master)


class PacedDecode:
    """Iterates at the model's pace, on absolute time."""

    def __init__(
        self, timeline: PacedTimeline, cluster: ClusterModel, words: Words, secret: bytes
    ) -> None:
        self._timeline, self._words = timeline, words
        self._cost = cluster.hybrid
        self._budget = 0
        self._pieces: dict[int, int] = {}
        """Tokens of prompts that the iteration under way computes, by rid."""
        self._gap_ns = cluster.iteration_gap_ns
        self._slots = Slots(cluster.decode.kv_slots)
        self._rows: dict[int, _Row] = {}
        self._batch: dict[int, _Row] = {}
        self._joining: list[_Row] = []
        self._leaving: list[int] = []
        self._iterating = False
        self.tokens = 0
        """Drawn so far."""
        self.emitted: list[tuple[int, int, int]] | None = None
        """(rid, index, time in ns) of every token, if asked for."""
        handlers = {"reserve": self._reserve, "join": self._join, "cancel": self._cancel}
        self.ranks = PacedRanks(cluster.roles[-1], cluster, handlers, secret)

    @property
    def held(self) -> int:
        """Requests that hold slots."""
        return len(self._rows)

    # --- messages ---

    def _reserve(self, payload: Any, _: Peer) -> None:
        request = unpack(Reserve, payload)
        self._timeline.catch_up()
        shares: dict[int, int] = {}
        for share in request.shares:
            shares[share.instance] = shares.get(share.instance, 0) + share.span.length
        drawn = len(request.drawn) // 4
        slots = dict(shares)
        answer = request.sampling.max_tokens - drawn
        slots[request.master] = slots.get(request.master, 0) + answer
        self._slots.take(request.rid, slots)
        self._rows[request.rid] = _Row(
            request=request,
            missing=dict(shares),
            shares=shares,
            index=drawn + 1,
            context=request.prompt_length + 1,
        )

    def _join(self, payload: Any, _: Peer) -> None:
        message = unpack(JoinBatch, payload)
        row = self._rows.get(message.rid)
        self._timeline.catch_up()
        if row is None:
            return
        if message.first_token is None:
            self._budget = message.budget
            row.missing.clear()
            row.index -= 1
            row.prompt = row.request.prompt_length
        assert not row.missing, "a request joins before its KV has landed"
        self._joining.append(row)
        self._wake()

    def _cancel(self, payload: Any, _: Peer) -> None:
        self._timeline.catch_up()
        self._leaving.append(unpack(CancelRequest, payload).rid)
        self._wake()

    def arrived(self, rid: int, index: int, tokens: int) -> None:
        """KV of a request has arrived at an instance (`prefill.Landing`)."""
        if (row := self._rows.get(rid)) is None:
            return
        row.missing[index] -= tokens
        if not row.missing[index]:
            del row.missing[index]
            landed = KvLanded(rid=rid, rank=index, tokens=row.shares[index], seconds=0.0)
            self.ranks.ranks[index].tell("landed", landed)

    # --- iterations ---

    def _wake(self) -> None:
        """Begin to iterate, unless the next one looks at who comes and goes anyway."""
        if not self._iterating:
            self._iterating = True
            self._timeline.at(self._timeline.now_ns, self._begin)

    def _begin(self) -> None:
        for rid in self._leaving:
            self._leave(rid)
        self._leaving.clear()
        for row in self._joining:
            if row.request.rid in self._rows:
                self._batch[row.request.rid] = row
        self._joining.clear()
        if not self._batch:
            self._iterating = False
            return
        decoding = [it for it in self._batch.values() if not it.prefills]
        context = sum(row.context for row in decoding)
        took_ns = self._cost.predict_ns(self._fill(), len(decoding), context)
        self._timeline.at(self._timeline.now_ns + took_ns + self._gap_ns, self._end)

    def _fill(self) -> list[list[tuple[int, int]]]:
        """The next iteration's pieces of prompts, by master: (length, tokens before it)."""
        self._pieces = {}
        if not any(it.prefills for it in self._batch.values()):
            return []
        lengths = fill([it.state for it in self._batch.values()], self._budget)
        pieces: dict[int, list[tuple[int, int]]] = {}
        for (rid, row), length in zip(self._batch.items(), lengths, strict=True):
            if row.prefills and length:
                self._pieces[rid] = length
                pieces.setdefault(row.request.master, []).append((length, row.computed))
        return list(pieces.values())

    def _end(self) -> None:
        drawn: dict[int, list[TokenDrawn]] = {}
        for rid, row in self._batch.items():
            if row.prefills:
                row.computed += self._pieces.get(rid, 0)
                if row.prefills:
                    continue
            else:
                row.context += 1
            ends = row.index + 1 == row.request.sampling.max_tokens
            drawn.setdefault(row.request.master, []).append(
                TokenDrawn(
                    rid=rid,
                    index=row.index,
                    token=self._words.token(row.index),
                    finish_reason="length" if ends else None,
                )
            )
            row.index += 1
            if ends:
                self._leaving.append(rid)
        for master, tokens in drawn.items():
            self.tokens += len(tokens)
            if self.emitted is not None:
                at_ns = time.monotonic_ns()
                self.emitted.extend((it.rid, it.index, at_ns) for it in tokens)
            self.ranks.ranks[master].tell("tokens", Tokens.of(tokens))
        self._begin()

    def _leave(self, rid: int) -> None:
        self._batch.pop(rid, None)
        if self._rows.pop(rid, None) is not None:
            for index in self._slots.held_by(rid):
                self._slots.give_back(rid, index)
        for index, rank in enumerate(self.ranks.ranks):
            rank.tell("freed", SlotsFreed(rid=rid, rank=index))

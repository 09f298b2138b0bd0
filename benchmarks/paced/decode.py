"""A paced decode gang: continuous batching, one message of tokens per master and iteration.

It speaks the ranks' messages around the simulator's model of sequenced ranks. Iterations also
compute chunks of piggybacked prompts, like real ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.decode_batch import SimulatedMember
from csps.loadgen.simulator.exchanges import iteration_costs
from csps.loadgen.simulator.kv_slots import Slots
from csps.loadgen.simulator.sequenced_ranks import SequencedRanks
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import (
    CancelSequence,
    JoinBatch,
    RankKvReceived,
    ReserveKv,
    SampledToken,
    SampledTokens,
    SlotsFreed,
)
from csps.protocols.rpc.schema import unpack
from csps.protocols.rpc.server import Peer
from paced.clock import PacedTimeline
from paced.ranks import PacedRanks, Words


@dataclass(eq=False, slots=True)
class _Reserved:
    """A sequence that holds slots, in the batch or not."""

    request: ReserveKv
    missing: dict[int, int]
    """KV tokens that have not arrived, by instance."""
    slices: dict[int, int]
    index: int
    """Index of the answer's next token."""


class PacedDecode:
    """Decodes at the model's pace, on absolute time."""

    def __init__(
        self, timeline: PacedTimeline, cluster: ClusterModel, words: Words, secret: bytes
    ) -> None:
        self._timeline, self._words = timeline, words
        self._slots = Slots(cluster.decode.kv_slots)
        self._sequences: dict[int, _Reserved] = {}
        self._batch = SequencedRanks(
            timeline,
            len(cluster.decode.instances),
            cost=iteration_costs(cluster),
            quantum_ns=cluster.quantum_ns,
            gap_ns=cluster.iteration_gap_ns,
            finished=lambda member: self._leave(member.sequence),
            prefilled=self._prefilled,
            sampled=self._sampled,
        )
        self.tokens = 0
        """Number of tokens sampled so far."""
        self.emitted: list[tuple[int, int, int]] | None = None
        """(sequence id, index, time in ns) of every token, or None if not recorded."""
        handlers = {"reserve": self._reserve, "join": self._join, "cancel": self._cancel}
        self.ranks = PacedRanks(cluster.roles[-1], cluster, handlers, secret)

    @property
    def sequences(self) -> int:
        """Return the number of sequences that hold slots."""
        return len(self._sequences)

    # --- messages ---

    def _reserve(self, payload: Any, _: Peer) -> None:
        request = unpack(ReserveKv, payload)
        self._timeline.catch_up()
        slices = _tokens_on(request.slices)
        slots = dict(slices)
        answer = {request.master: request.output_tokens}
        for holder, tokens in _tokens_on(request.answer).items() or answer.items():
            slots[holder] = slots.get(holder, 0) + tokens
        self._slots.take(request.sequence_id, slots)
        self._sequences[request.sequence_id] = _Reserved(
            request=request, missing=dict(slices), slices=slices, index=request.first_index
        )

    def _join(self, payload: Any, _: Peer) -> None:
        message = unpack(JoinBatch, payload)
        sequence = self._sequences.get(message.sequence_id)
        self._timeline.catch_up()
        if sequence is None:
            return
        request = sequence.request
        member = SimulatedMember(
            sequence=request.sequence_id,
            context=request.prompt_tokens + 1,
            tokens=request.output_tokens - 1,
            master=request.master,
            ranks=message.instances,
        )
        if message.first_token is None:
            member.prompt = request.prompt_tokens
            self._batch.piggyback(member, message.budget)
        else:
            assert not sequence.missing, (
                f"sequence {message.sequence_id} joins before its KV was received"
            )
            sequence.index += 1
            self._batch.join(member)

    def _cancel(self, payload: Any, _: Peer) -> None:
        self._timeline.catch_up()
        sequence_id = unpack(CancelSequence, payload).sequence_id
        self._batch.leave(sequence_id, partial(self._leave, sequence_id))

    def arrived(self, sequence_id: int, index: int, tokens: int) -> None:
        """Take KV of a sequence that has arrived at an instance (`prefill.KvReceiver`)."""
        if (sequence := self._sequences.get(sequence_id)) is None:
            return
        sequence.missing[index] -= tokens
        if not sequence.missing[index]:
            del sequence.missing[index]
            received = RankKvReceived(
                sequence_id=sequence_id, rank=index, tokens=sequence.slices[index], seconds=0.0
            )
            self.ranks.ranks[index].notify("received", received)

    # --- what the model tells ---

    def _sampled(self, batch_members: list[SimulatedMember]) -> None:
        sampled: dict[int, list[SampledToken]] = {}
        for member in batch_members:
            if (sequence := self._sequences.get(member.sequence)) is None:
                continue
            request = sequence.request
            ends = sequence.index + 1 == request.first_index + request.output_tokens
            sampled.setdefault(member.master, []).append(
                SampledToken(
                    sequence_id=member.sequence,
                    index=sequence.index,
                    token=self._words.token(sequence.index),
                    finish_reason="length" if ends else None,
                )
            )
            sequence.index += 1
        for master, tokens in sampled.items():
            self.tokens += len(tokens)
            if self.emitted is not None:
                at_ns = time.monotonic_ns()
                self.emitted.extend((token.sequence_id, token.index, at_ns) for token in tokens)
            self.ranks.ranks[master].notify("tokens", SampledTokens.of(tokens))

    def _prefilled(self, member: SimulatedMember) -> None:
        if not member.tokens:
            self._leave(member.sequence)

    def _leave(self, sequence_id: int) -> None:
        if self._sequences.pop(sequence_id, None) is not None:
            for index in self._slots.instances_of(sequence_id):
                self._slots.release(sequence_id, index)
        for index, rank in enumerate(self.ranks.ranks):
            rank.notify("freed", SlotsFreed(sequence_id=sequence_id, rank=index))


def _tokens_on(slices: tuple[KvSlice, ...]) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for kv_slice in slices:
        tokens[kv_slice.instance] = tokens.get(kv_slice.instance, 0) + kv_slice.span.length
    return tokens

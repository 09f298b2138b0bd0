"""The decode batch of a rank: sequences whose KV lies anywhere in the gang (CSPS §4.2).

The log says which sequences join and leave, and when to iterate. In an iteration each instance
embeds the tokens of the sequences that it masters and stores their KV or sends it to its holders.
It sends queries to instances that hold other slices of these sequences, computes its own part
meanwhile, merges the answers and samples. Piggybacked sequences compute chunks of their prompts in
iterations in which others decode (Sarathi-Serve). All ranks derive the same batches from the same
log and need no further agreement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import spans_on
from csps.actors.attention.query_exchange import QueryExchangeTimes
from csps.actors.comm.mesh import ControlTag
from csps.actors.comm.process_group import PEER_DEADLINE
from csps.actors.engine.iteration import IterationBatch, batch_of, forward
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.reservations import (
    BatchSequence,
    Reservations,
    answer_of,
    instances_of,
    last_position,
)
from csps.actors.kv_cache.kv_pool import SlotsOfSequence
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.sampling.batch_sampler import Sample, sample_batch
from csps.actors.timing.device_pace import wait_for_device
from csps.actors.timing.timeline import COMMUNICATION_S, EXCHANGE_S
from csps.protocols.core.errors import CspsError, DeadlineExceeded
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import (
    Notify,
    RequestFailed,
    SampledToken,
    SampledTokens,
)
from csps.protocols.sequencer.decode_batches import chunk_lengths
from csps.protocols.sequencer.log_entries import Change, PlaceSequence

_log = logging.getLogger(__name__)

ITERATION_S = 120.0
"""Time limit of an iteration, which takes a second at most. A longer one means that ranks wait for
each other."""

PROMPT_TOKENS, ANSWER_TOKENS = "csps.decode.prompt_tokens", "csps.decode.answer_tokens"
"""Tokens whose KV lies on a rank when a sequence leaves."""
ANSWER_FROM = "csps.decode.answer_from"
"""Index in the answer of the first such token; only if there is one."""


class DecodeBatch:
    """The decode batch on one rank. The engine thread changes and iterates it; any thread
    reserves."""

    def __init__(
        self, engine: Engine, notify: Notify, free_sequence: Callable[[int], None]
    ) -> None:
        """Args:
        free_sequence: called with each sequence that has left, to free its slots.
        """
        self._engine = engine
        self._notify = notify
        self._free_sequence = free_sequence
        self.reservations = Reservations(engine, notify)
        self._sequences: list[BatchSequence] = []
        self._budget = 0
        self._iterated: list[BatchSequence] = []
        """Sequences in the last batch."""
        self._lengths: list[int] = []
        self._batch = IterationBatch()
        """Batch of the last iteration."""
        self._same_for = 0
        """Number of further iterations for which the batch stays the same: all sequences decode,
        and none is at its end."""
        self.piggybacked = False
        """Flag that the last iteration computed prompts, of which no token shows progress."""
        self.iterations = 0
        self.iterating_s = 0.0
        self.exchanges = QueryExchangeTimes()
        """Query exchange times of all iterations."""
        self._busy_since: float | None = None

    @property
    def running(self) -> int:
        """Return the number of sequences."""
        return len(self._sequences)

    def check_progress(self) -> None:
        """Raise DeadlineExceeded if an iteration does not end."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > ITERATION_S:
            raise DeadlineExceeded("an iteration of decoding", ITERATION_S)

    # --- the engine thread: sequences join, leave and move -----------------------------------

    def change(self, change: Change) -> None:
        """Let sequences leave and join, at all ranks before the same iteration."""
        for group, iterations in change.iterated:
            if self._engine.rank not in group:
                self._follow(group, iterations)
        for sequence_id in change.left:
            self._leave(sequence_id)
        for sequence_id, token in change.joined:
            self._join(sequence_id, token)
        self._budget = change.budget
        self._same_for = 0

    def _follow(self, group: Sequence[int], iterations: int) -> None:
        """Count what the sequences of other ranks have computed in so many iterations."""
        sequences = self._sequences_of(group)
        for _ in range(iterations):
            lengths = chunk_lengths([sequence.state for sequence in sequences], self._budget)
            if not any(lengths):
                return
            for sequence, length in zip(sequences, lengths, strict=True):
                self._advance(sequence, length)

    def end_owner(self, owner: int) -> None:
        """Let all sequences of an owner leave, those that have not joined included."""
        for sequence_id in self.reservations.end_owner(owner):
            self._leave(sequence_id)
        self._same_for = 0

    def _join(self, sequence_id: int, token: int | None) -> None:
        reservation = self.reservations.joining(sequence_id)
        if reservation is None:
            _log.debug("sequence %d left before it joined the decode batch", sequence_id)
            return
        request, sampler = reservation.request, self.reservations.sampler(sequence_id)
        sequence = BatchSequence(
            reservation=reservation,
            index=request.first_index,
            next=request.reused,
            token=0,
            sampler=sampler,
            instances=instances_of(request),
            exchanges=replace(self.exchanges),
        )
        if token is not None:
            sequence.next, sequence.token, sequence.index = (
                request.prompt_tokens,
                token,
                sequence.index + 1,
            )
            sequence.slots = self._slots(reservation, sequence.next)
            if sampler is not None:
                sampler.observe(token)
        reservation.joined(self._engine.rank)
        self._sequences.append(sequence)

    def sequence(self, sequence_id: int) -> BatchSequence:
        """Return a sequence of the batch by its id."""
        return next(sequence for sequence in self._sequences if sequence.sequence_id == sequence_id)

    def place(self, place: PlaceSequence, move: MoveRun | None) -> None:
        """Let a sequence continue elsewhere, at all ranks before the same iteration.

        Args:
            move: move of this rank; None if the sequence concerns it neither before nor after.
        """
        self._same_for = 0
        layout = self._engine.layout
        instances = frozenset(map(layout.instance_of, place.ranks))
        at = next(
            at
            for at, sequence in enumerate(self._sequences)
            if sequence.sequence_id == place.sequence
        )
        sequence = self._sequences[at] = replace(self._sequences[at], instances=instances)
        if move is not None:
            self._go_on(sequence, move)
        else:
            self.reservations.pass_on(place.sequence, place.master)

    def _go_on(self, sequence: BatchSequence, move: MoveRun) -> None:
        state = move.state
        assert state is not None, f"sequence {sequence.sequence_id} is placed before its move ended"
        self.reservations.place(sequence.sequence_id, move.message.after, move.sampler)
        move.release_sources()
        sequence.next, sequence.token, sequence.index = state.next, state.token, state.index
        sequence.over, sequence.sampler = (
            state.over,
            self.reservations.sampler(sequence.sequence_id),
        )
        sequence.slots = self._slots(sequence.reservation, sequence.next)

    def _slots(self, reservation: Reservation, seen: int) -> SlotsOfSequence | None:
        """Return the slots of a decoding sequence's KV here. All its KV so far was received, moved
        here or computed by the batch."""
        request, pool = reservation.request, self._engine.pool
        answer = spans_on(answer_of(request), self._engine.instance)
        spans = spans_on(request.slices, self._engine.instance)
        # The master attends to its own slots as well when it asks others, even if it has none.
        masters = request.master == self._engine.instance
        if not masters and not any(span.length for span in (*answer, *spans)):
            return None
        layers, to_come = range(self._engine.spec.layers), Span(seen, last_position(request))
        # By spans: between them there may be slots for KV that is yet to be moved here.
        resident = [*spans, *(span.intersection(Span(0, seen)) for span in answer)]
        growing = [span.intersection(to_come) for span in answer]
        ring, window = None, self._engine.spec.window
        if pool.windowed and masters and window is not None:
            ring = pool.ring(request.sequence_id, reservation.ring, window)
        return SlotsOfSequence(pool, request.sequence_id, layers, resident, growing, ring)

    def _leave(self, sequence_id: int) -> None:
        for sequence in self._sequences:
            if sequence.sequence_id == sequence_id and sequence.request.trace:
                sequence.reservation.note(self._figures(sequence))
        self._sequences = [
            sequence for sequence in self._sequences if sequence.sequence_id != sequence_id
        ]
        self.reservations.leave(sequence_id)
        self._free_sequence(sequence_id)

    def _figures(self, sequence: BatchSequence) -> dict[str, int | float]:
        """Return trace attributes of a sequence: its KV here, and what exchanges took while it was
        in the batch."""
        instance, generated_tokens = (
            self._engine.instance,
            Span(sequence.prompt, max(sequence.prompt, sequence.next)),
        )
        prompt = spans_on(sequence.request.slices, instance)
        answer = [
            span.intersection(generated_tokens)
            for span in spans_on(answer_of(sequence.request), instance)
        ]
        first = min((span.start for span in answer if span.length), default=None)
        return {
            PROMPT_TOKENS: sum(span.length for span in prompt),
            ANSWER_TOKENS: sum(span.length for span in answer),
            **({} if first is None else {ANSWER_FROM: first - sequence.prompt}),
            EXCHANGE_S: self.exchanges.under_way_s - sequence.exchanges.under_way_s,
            COMMUNICATION_S: self.exchanges.waited_s - sequence.exchanges.waited_s,
        }

    # --- the engine thread: one iteration ------------------------------------------------------

    def iterate(self, group: Sequence[int] = ()) -> list[int]:
        """Compute a token for every decoding sequence and a chunk for each piggybacked one; return
        the sequences mastered here that are finished now.

        Args:
            group: ranks; sequences that concern other ranks wait for a grant of their own. Empty:
                all sequences. The group of a rank stays the same until sequences join or leave.
        """
        self._busy_since = begin = time.monotonic()
        batch = self._next_batch(group)
        logits_rv = forward(self._engine, batch, self.exchanges)
        for sequence, length in zip(self._iterated, self._lengths, strict=True):
            self._advance(sequence, length)
        mine = [sequence for sequence, _ in batch.sampling]
        finished = sample_tokens(self._engine, self._notify, mine, logits_rv)
        if finished:
            self._same_for = 0
        # Whoever samples has waited for the tokens. The others' times would be those of launching.
        wait_for_device(self._engine.device)
        self.iterations += 1
        self.iterating_s += time.monotonic() - begin
        self._busy_since = None
        return finished

    def _next_batch(self, group: Sequence[int]) -> IterationBatch:
        """Return the next batch. It stays the same while the same sequences decode and their KV
        holders do not change."""
        if self._same_for > 0:
            self._same_for -= 1
            self._batch.advance()
            return self._batch
        sequences = self._iterated = self._sequences_of(group)
        states = [sequence.state for sequence in sequences]
        self._lengths = chunk_lengths(states, self._budget)
        computed = [
            0 if self._ended_here(sequence) else length
            for sequence, length in zip(sequences, self._lengths, strict=True)
        ]
        self._batch = batch_of(self._engine, sequences, computed)
        self.piggybacked = any(state.next < state.prompt for state in states)
        if not self.piggybacked and all(sequence.stores_at_master for sequence in sequences):
            left = (state.stop - state.next for state in states if state.next < state.stop)
            self._same_for = min(left, default=1) - 1
            window = self._engine.spec.window
            if window is not None and not self._engine.pool.windowed:
                # A window moves on with every token, away from instances that were asked.
                asked = (sequence.same_holders_in(window) for sequence in sequences)
                self._same_for = min([self._same_for, *asked])
        return self._batch

    def _ended_here(self, sequence: BatchSequence) -> bool:
        """Return whether a sequence is finished, and no other instance takes part in it. Others
        learn of its end by the log, several iterations later."""
        return sequence.over and sequence.instances == {self._engine.instance}

    def _sequences_of(self, group: Sequence[int]) -> list[BatchSequence]:
        if not group:
            return self._sequences
        instances = {self._engine.layout.instance_of(rank) for rank in group}
        return [sequence for sequence in self._sequences if sequence.instances <= instances]

    def _advance(self, sequence: BatchSequence, length: int) -> None:
        """Count the positions that a sequence has computed; all ranks count alike."""
        was_prefilling = not sequence.decodes
        sequence.next += length
        if length and sequence.decodes:
            sequence.index += 1
            if was_prefilling:
                sequence.slots = self._slots(sequence.reservation, sequence.next)


def sample_tokens(
    engine: Engine, notify: Notify, mine: Sequence[BatchSequence], logits_rv: Tensor
) -> list[int]:
    """Sample on the instance's first rank and send the tokens to the others; return the finished
    sequences."""
    if not mine:
        return []
    words = torch.zeros(len(mine), 2, dtype=torch.int64)
    if engine.tp_rank == 0:
        words = _sampled(engine, notify, mine, logits_rv)
    _share_tokens(engine, words)
    finished = []
    for sequence, (token, done) in zip(mine, words.tolist(), strict=True):
        sequence.token = token
        if done:
            sequence.over = True
            finished.append(sequence.sequence_id)
    return finished


def _sampled(
    engine: Engine, notify: Notify, mine: Sequence[BatchSequence], logits_rv: Tensor
) -> Tensor:
    """Return (sequences, 2) int64: each sequence's token, and whether the sequence is finished."""
    words = torch.zeros(len(mine), 2, dtype=torch.int64)
    unfinished = [(at, sequence) for at, sequence in enumerate(mine) if not sequence.over]
    samplers = [sequence.sampler for _, sequence in unfinished if sequence.sampler is not None]
    if len(unfinished) < len(mine):
        logits_rv = logits_rv[[at for at, _ in unfinished]]
    # The sequences have advanced already, so the sampled tokens are one before their index.
    samples = sample_batch(samplers, logits_rv, [sequence.index - 1 for _, sequence in unfinished])
    announced = _announce(engine, notify, [sequence for _, sequence in unfinished], samples)
    if announced:
        words[[at for at, _ in unfinished]] = torch.tensor(announced, dtype=torch.int64)
    return words


def _announce(
    engine: Engine,
    notify: Notify,
    sequences: list[BatchSequence],
    samples: Sequence[Sample | CspsError],
) -> list[tuple[int, int]]:
    """Notify the router; return each sequence's token and whether the sequence is finished."""
    sampled: list[SampledToken] = []
    words: list[tuple[int, int]] = []
    for sequence, sample in zip(sequences, samples, strict=True):
        if isinstance(sample, CspsError):
            notify("failed", RequestFailed.of(sequence.sequence_id, engine.rank, sample))
            words.append((0, 1))
            continue
        sampled.append(sample.message(sequence.sequence_id, sequence.index - 1))
        words.append((sample.token, int(sample.finish_reason is not None)))
    if sampled:
        notify("tokens", SampledTokens.of(sampled))
    return words


def _share_tokens(engine: Engine, words: Tensor) -> None:
    if engine.layout.tp == 1:
        return
    if engine.tp_rank:
        engine.mesh.recv(words, _peer_at(engine, 0), ControlTag.DECODE_TOKEN).wait(PEER_DEADLINE)
        return
    for tp_rank in range(1, engine.layout.tp):
        engine.mesh.send(words, _peer_at(engine, tp_rank), ControlTag.DECODE_TOKEN).wait(
            PEER_DEADLINE
        )


def _peer_at(engine: Engine, tp_rank: int) -> int:
    return engine.layout.rank_of(engine.instance, tp_rank)

"""Reads the notifications of ranks: tokens go to their requests, all else becomes events.

Tokens bypass the scheduler: a frame of them costs a look-up and an append per token. Of an answer
the scheduler learns the first token, because its KV must be received soon after, and the end.
`RunningSteps` and `RetainAcks` collect reports until all ranks of an instance have sent theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from csps.protocols.attention.plan import parse_option
from csps.protocols.core.errors import CspsError, FaultError, ProtocolError
from csps.protocols.core.errors import from_wire as error_from_wire
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    KvRetained,
    PrefillDone,
    PrefillProgress,
    RankKvReceived,
    RequestFailed,
    SampledToken,
    SampledTokens,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import PrefillStep, SequenceMoved
from csps.protocols.rpc.schema import unpack
from csps.services.router.live_requests import LiveRequests
from csps.services.router.live_sequences import (
    ElasticEventRecorder,
    InstanceRanks,
    LiveMove,
    LiveSequence,
    LiveSequences,
    end_move,
)
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import (
    AnyEvent,
    Failed,
    Finished,
    FirstToken,
    Freed,
    GangId,
    Heartbeat,
    InstanceId,
    KvReceived,
    Moved,
    Retained,
    SequenceId,
    StepDone,
    StepId,
    WireError,
    instance_id,
)
from csps.services.scheduling.state.state import wire_error
from csps.services.telemetry.observer import RequestObserver, StepFigures

_log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0
"""Notifications of an instance within this time count as one heartbeat."""
PostEvent = Callable[[AnyEvent], None]


class RankNotifications:
    """Reads the notifications of all ranks.

    Args:
        post_event: takes events for the scheduler.
        on_received: called when all of a prompt's KV was received.
        on_moved: called when a sequence was moved to other instances.
    """

    def __init__(
        self,
        requests: LiveRequests,
        sequences: LiveSequences,
        steps: RunningSteps,
        post_event: PostEvent,
        *,
        on_received: Callable[[Sequence[RankKvReceived]], None],
        on_moved: Callable[[LiveSequence, LiveMove], None],
    ) -> None:
        self._requests, self._sequences, self._steps = requests, sequences, steps
        self._post_event, self._on_received, self._on_moved = post_event, on_received, on_moved
        self.retain_acks = RetainAcks(post_event)
        self._last_heartbeat: dict[tuple[GangId, int], float] = {}
        self._readers: dict[str, Callable[[GangId, GangClient, int, Any], None]] = {
            "prefill_progress": self._prefill_progress,
            "prefill_done": self._prefill_done,
            "received": self._kv_received,
            "freed": self._freed,
            "retained": self._retained,
            "moved": self._moved,
            "failed": self._failed,
        }

    def read(
        self, gang_number: GangId, gang: GangClient, rank: int, method: str, payload: Any
    ) -> None:
        """Handle a notification from a rank of an attached gang.

        Raises:
            ProtocolError: the router knows no such notification.
        """
        self._note_heartbeat(gang_number, gang.instance_of(rank))
        if method == "tokens":  # thousands a second: checked first
            for token in unpack(SampledTokens, payload).each():
                self._token(token)
        elif (reader := self._readers.get(method)) is not None:
            reader(gang_number, gang, rank, payload)
        else:
            raise ProtocolError(f"rank {rank} sent the unknown notification {method!r}")

    def discard(self, gang_number: GangId) -> None:
        """Forget a lost gang."""
        self.retain_acks.discard(gang_number)
        self._last_heartbeat = {
            key: at for key, at in self._last_heartbeat.items() if key[0] != gang_number
        }

    def _note_heartbeat(self, gang_number: GangId, instance: int) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat.get((gang_number, instance), 0.0) >= HEARTBEAT_PERIOD_S:
            self._last_heartbeat[gang_number, instance] = now
            self._post_event(Heartbeat(instances=(instance_id(gang_number, instance),)))

    # --- tokens --------------------------------------------------------------------------------

    def _token(self, token: SampledToken) -> None:
        sequence = self._sequences.serving(token.sequence_id)
        if sequence is None or sequence.handle.ended:
            return
        if sequence.move is not None and token.index > sequence.next_index:
            sequence.move.early[token.index] = token
            return
        if token.index != sequence.next_index:
            error = f"token {token.index} arrived, expected token {sequence.next_index}"
            self.fail(sequence, ProtocolError(error))
            return
        first = sequence.next_index == sequence.first_index
        sequence.next_index += 1
        sequence.last_token = token.token
        self._requests.deliver(sequence.handle, token)
        if token.finish_reason is not None:
            hashes = sequence.handle.answer_hashes if sequence.command.retain else ()
            self._post_event(
                Finished(
                    sequence_id=sequence.id, generated_tokens=sequence.next_index, hashes=hashes
                )
            )
            self._sequences.end(sequence)
            return
        if first:
            self._post_event(FirstToken(sequence_id=sequence.id))
            if sequence.command.piggybacked:
                self._requests.handed_over(sequence.handle)
        if sequence.move is not None and sequence.next_index in sequence.move.early:
            self._token(sequence.move.early.pop(sequence.next_index))

    def fail(self, sequence: LiveSequence, error: Exception) -> None:
        """End a sequence with an error; the scheduler retries or fails its request."""
        _log.debug("sequence_id %d failed: %s", sequence.id, error)
        self._post_event(
            Failed(
                sequence_id=sequence.id,
                generated_tokens=sequence.next_index,
                error=wire_error(error),
                retryable=isinstance(error, FaultError),
            )
        )
        self._sequences.end(sequence)

    # --- everything else -----------------------------------------------------------------------

    def _prefill_progress(
        self, gang_number: GangId, gang: GangClient, rank: int, payload: Any
    ) -> None:
        unpack(PrefillProgress, payload)

    def _prefill_done(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        done = unpack(PrefillDone, payload)
        instance = instance_id(gang_number, gang.instance_of(rank))
        took_s = self._steps.rank_done(done, instance)
        if took_s is not None:
            self._post_event(
                StepDone(step_id=done.step_id, instance=instance, took_ns=int(took_s * 1e9))
            )

    def _kv_received(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        received = unpack(RankKvReceived, payload)
        sequence = self._sequences.serving(received.sequence_id)
        instance = instance_id(gang_number, gang.instance_of(rank))
        if sequence is None:
            return
        sequence.kv_received.append(received)
        sequence.handle.kv_received_after(received.waited)
        if sequence.pending_kv.reported(instance, rank):
            _log.debug("KV of sequence_id %d received by instance %d", sequence.id, instance)
            self._post_event(
                KvReceived(sequence_id=sequence.id, instance=instance, tokens=received.tokens)
            )
            if not sequence.pending_kv:
                self._on_received(sequence.kv_received)

    def _freed(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        freed = unpack(SlotsFreed, payload)
        if self.retain_acks.record_ack(gang_number, gang, rank, freed.sequence_id, 0):
            return
        if (sequence := self._sequences.by_id.get(freed.sequence_id)) is not None:
            self.free(sequence, gang_number, rank)

    def _retained(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        retained = unpack(KvRetained, payload)
        self.retain_acks.record_ack(gang_number, gang, rank, retained.sequence_id, retained.tokens)

    def _moved(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        moved = unpack(SequenceMoved, payload)
        sequence = self._sequences.serving(moved.sequence_id)
        if sequence is None or (move := sequence.move) is None:
            return
        move.acks.append(moved)
        move.pending_acks.reported(instance_id(gang_number, gang.instance_of(rank)), rank)
        if not move.pending_acks:
            _log.debug("sequence_id %d moved: %d tokens", sequence.id, move.tokens)
            end_move(sequence, move)
            self._on_moved(sequence, move)
            self._post_event(Moved(sequence_id=sequence.id))

    def free(self, sequence: LiveSequence, gang_number: GangId, rank: int) -> None:
        """Record that a decode rank freed its slots of the sequence."""
        sequence.decode_ended = True
        instance = instance_id(gang_number, sequence.decode.instance_of(rank))
        if sequence.pending_free.reported(instance, rank):
            self._post_event(Freed(sequence_id=sequence.id, instance=instance))
        self._sequences.finalize(sequence)

    def _failed(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        failed = unpack(RequestFailed, payload)
        if (sequence := self._sequences.serving(failed.sequence_id)) is not None:
            self.fail(sequence, _rank_error(failed))


@dataclass(eq=False, slots=True)
class _PendingAcks:
    times: int = 0
    """Retain and Evict messages that the gang was sent for the sequence."""
    answers: dict[int, int] = field(default_factory=dict)
    """Answers by rank."""
    passed_on: dict[int, int] = field(default_factory=dict)
    """Answers that the scheduler was told of, by instance."""


class RetainAcks:
    """Counts the ranks' answers to Retain and Evict.

    Every rank of a gang answers every message, in order. The scheduler is told of an instance once
    all its ranks have answered.

    Args:
        post_event: takes events for the scheduler.
    """

    def __init__(self, post_event: Callable[[Retained], None]) -> None:
        self._post_event = post_event
        self._pending: dict[tuple[GangId, SequenceId], _PendingAcks] = {}

    def expect_ack(self, gang_number: GangId, sequence_id: SequenceId) -> None:
        """Expect an answer from every rank of a gang, which was sent a message about a sequence."""
        self._pending.setdefault((gang_number, sequence_id), _PendingAcks()).times += 1

    def record_ack(
        self, gang_number: GangId, gang: GangClient, rank: int, sequence_id: SequenceId, tokens: int
    ) -> bool:
        """Record that a rank retains `tokens` tokens of a sequence.

        Returns:
            Whether an answer was expected.
        """
        pending = self._pending.get((gang_number, sequence_id))
        if pending is None:
            return False
        pending.answers[rank] = pending.answers.get(rank, 0) + 1
        index = gang.instance_of(rank)
        complete = min(pending.answers.get(member, 0) for member in gang.ranks_of(index))
        if complete > pending.passed_on.get(index, 0):
            pending.passed_on[index] = complete
            instance = instance_id(gang_number, index)
            self._post_event(Retained(sequence_id=sequence_id, instance=instance, tokens=tokens))
        answers = [pending.answers.get(member, 0) for member in range(gang.world_size)]
        if min(answers) >= pending.times:
            del self._pending[gang_number, sequence_id]
        return True

    def discard(self, gang_number: GangId) -> None:
        """Expect no answers from a lost gang."""
        self._pending = {
            key: pending for key, pending in self._pending.items() if key[0] != gang_number
        }


@dataclass(eq=False, slots=True)
class _RunningStep:
    command: RunStep
    shape: GroupShape
    sequences: list[LiveSequence]
    unreported: InstanceRanks
    preempting: bool
    """Some of its instances decoded when it was launched."""
    figures: list[PrefillDone] = field(default_factory=list)
    took_s: dict[InstanceId, float] = field(default_factory=dict)


class RunningSteps:
    """Steps that were sent to ranks, until the last rank has reported.

    Args:
        measured: takes how long a whole step took, and on which group.
        observer: takes the figures of a step.
        elastic: takes the steps of elastic gangs.
    """

    def __init__(
        self,
        measured: Callable[[RunStep, GroupShape, float], None],
        observer: RequestObserver,
        elastic: ElasticEventRecorder,
    ) -> None:
        self._measured, self._observer, self._elastic = measured, observer, elastic
        self._running: dict[StepId, _RunningStep] = {}

    def launched(
        self,
        command: RunStep,
        gang: GangClient,
        sequences: list[LiveSequence],
        shape: GroupShape,
    ) -> None:
        """Record that the step was sent to every rank of the gang; `shape` is its group's."""
        if command.step.high_priority:
            self._observer.preempted(self._paused_requests(command.step))
        unreported = InstanceRanks(gang, command.step.group)
        preempting = gang.role == "elastic" and self._elastic.decoded_on(gang, command.step.group)
        self._running[command.step.step_id] = _RunningStep(
            command, shape, sequences, unreported, preempting
        )

    def _paused_requests(self, high_priority: PrefillStep) -> int:
        """Return how many requests of low-priority steps a high-priority step pauses."""
        return sum(
            len(step.sequences)
            for step in self._running.values()
            if not step.command.step.high_priority
            and any(member in step.unreported for member in high_priority.group)
        )

    def rank_done(self, done: PrefillDone, instance: InstanceId) -> float | None:
        """Record a rank's report of a step.

        Returns:
            Seconds that its instance computed and exchanged, without queueing and preemption; None
            if
            the step is unknown or other ranks of the instance have not reported.
        """
        step = self._running.get(done.step_id)
        if step is None:
            return None
        step.figures.append(done)
        took_s = max(step.took_s.get(instance, 0.0), done.compute_s + done.communication_s)
        step.took_s[instance] = took_s
        if not step.unreported.reported(instance, done.rank):
            return None
        if not step.unreported:
            del self._running[done.step_id]
            for sequence in step.sequences:
                sequence.handle.timings.add_figures(step.figures)
            self._observer.step_done(_figures(step))
            if not any(figure.cancelled for figure in step.figures):
                self._completed(step)
        return took_s

    def _completed(self, step: _RunningStep) -> None:
        took_s = max(step.took_s.values())
        self._measured(step.command, step.shape, took_s)
        if step.unreported.gang.role == "elastic":
            self._elastic.step_done(
                step.command,
                step.sequences,
                step.figures,
                took_s=took_s,
                preempting=step.preempting,
            )

    def discard(self, gang: GangClient) -> None:
        """Forget the steps of a lost gang."""
        self._running = {
            step_id: step
            for step_id, step in self._running.items()
            if step.unreported.gang is not gang
        }


def _figures(step: _RunningStep) -> StepFigures:
    gang = step.unreported.gang
    places = [Location.parse(location) for location in gang.locations]
    return StepFigures(
        strategy=parse_option(step.command.step.strategy).strategy,
        sp=len(step.command.step.group),
        tokens=sum(chunk.length for chunk in step.command.step.chunks),
        ranks=step.figures,
        places=[places[gang.instance_of(rank)] for rank in range(gang.world_size)],
    )


def error_of(wire: WireError) -> CspsError:
    """Return the exception that the scheduler's error describes."""
    return error_from_wire({"code": wire.code, "message": wire.message, "data": wire.data})


def _rank_error(failed: RequestFailed) -> CspsError:
    wire: dict[str, Any] = {"code": failed.code, "message": failed.message}
    if failed.param is not None:
        wire["data"] = {"message": failed.message, "param": failed.param}
    return error_from_wire(wire)

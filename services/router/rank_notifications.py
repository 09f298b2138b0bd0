"""Reads the notifications of ranks: tokens go to their requests, the rest becomes events.

Tokens bypass the scheduler: a frame of them costs a look-up and an append per token. Of an answer
the scheduler learns the first token, because its KV must be received soon after, and the end.
`RunningSteps` collects the figures of a step until all of its ranks have reported.
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
from csps.protocols.core.placement import tokens_on
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    KvRestored,
    KvRetained,
    KvSaved,
    LinkBroken,
    PrefillDone,
    PrefillProgress,
    PromptLogprobs,
    RankKvReceived,
    RequestFailed,
    SampledTokens,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import PrefillStep, SequenceMoved
from csps.protocols.rpc.schema import unpack
from csps.services.requests.request_handle import RequestHandle
from csps.services.router.live_requests import LiveRequests
from csps.services.router.live_sequences import (
    LiveMove,
    LiveSequence,
    PendingRanks,
    move_events,
    step_events,
)
from csps.services.router.scheduler_driver import AttachedGangs
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import (
    AnyEvent,
    GangId,
    Heartbeat,
    InstanceId,
    KvReceived,
    Moved,
    Restored,
    Retained,
    Saved,
    SequenceId,
    StepDone,
    StepId,
    WireError,
    gang_of,
    instance_id,
)
from csps.services.telemetry.observer import RequestObserver, StepFigures, guarded

_log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0
"""Tokens of an instance within this time count as one heartbeat."""
PostEvent = Callable[[AnyEvent], None]


class RankNotifications:
    """Reads the notifications of all ranks.

    Args:
        gangs: the attached gangs; others' notifications are dropped.
        post_event: takes events for the scheduler.
        observer: takes what is written to files, and read from them.
        on_received: called when all of a prompt's KV was received.
        on_link_broken: called when a rank lost its connection to another gang.
        on_bug: called with an error of ours, after which books may be wrong.
    """

    def __init__(
        self,
        gangs: AttachedGangs,
        requests: LiveRequests,
        steps: RunningSteps,
        post_event: PostEvent,
        observer: RequestObserver,
        *,
        on_received: Callable[[Sequence[RankKvReceived]], None],
        on_link_broken: Callable[[GangClient, LinkBroken], None],
        on_bug: Callable[[Exception], None],
    ) -> None:
        self._gangs, self._requests, self._steps = gangs, requests, steps
        self._post_event, self._on_received = post_event, on_received
        self._observer = observer
        self._on_link_broken, self._on_bug = on_link_broken, on_bug
        self._pending_acks: dict[tuple[GangId, SequenceId], list[PendingRanks]] = {}
        """Answers to Retain and Evict: one record for each message, in their order."""
        self._saving: dict[tuple[InstanceId, str], PendingRanks] = {}
        """Ranks that have not reported their part of a run, of instances of which some rank has;
        for a run without a name, those that have not listed all that they have."""
        self._restoring: dict[tuple[GangId, SequenceId], _Restoring] = {}
        self._last_heartbeat: dict[tuple[GangId, int], float] = {}
        self._readers: dict[str, Callable[[GangId, GangClient, int, Any], None]] = {
            "prefill_progress": self._prefill_progress,
            "prefill_done": self._prefill_done,
            "prompt_logprobs": self._prompt_logprobs,
            "received": self._kv_received,
            "freed": self._freed,
            "retained": self._retained,
            "saved": self._saved,
            "restored": self._restored,
            "moved": self._moved,
            "failed": self._failed,
            "link_broken": self._link_broken,
        }

    def read(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        """Handle a notification from a rank; disconnect its gang if it is not understood."""
        if (gang_number := self._gangs.number_of(gang)) is None:
            return
        try:
            if method == "tokens":  # thousands a second: checked first
                self._note_heartbeat(gang_number, gang.instance_of(rank))
                for token in unpack(SampledTokens, payload).each():
                    self._requests.deliver(token)
            elif (reader := self._readers.get(method)) is not None:
                reader(gang_number, gang, rank, payload)
            else:
                raise ProtocolError("there is no such notification")
        except FaultError as error:
            gang.disconnect(f"rank {rank} sent a {method!r} that is not understood: {error}")
        except Exception as error:
            _log.exception("a %r of rank %d could not be handled", method, rank)
            self._on_bug(error)

    def discard(self, gang_number: GangId) -> None:
        """Forget a lost gang."""
        self._pending_acks = {
            key: pending for key, pending in self._pending_acks.items() if key[0] != gang_number
        }
        self._saving = {
            key: ranks for key, ranks in self._saving.items() if gang_of(key[0]) != gang_number
        }
        self._restoring = {
            key: found for key, found in self._restoring.items() if key[0] != gang_number
        }
        self._last_heartbeat = {
            key: at for key, at in self._last_heartbeat.items() if key[0] != gang_number
        }

    def _note_heartbeat(self, gang_number: GangId, instance: int) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat.get((gang_number, instance), 0.0) >= HEARTBEAT_PERIOD_S:
            self._last_heartbeat[gang_number, instance] = now
            self._post_event(Heartbeat(instances=(instance_id(gang_number, instance),)))

    def _prefill_progress(
        self, gang_number: GangId, gang: GangClient, rank: int, payload: Any
    ) -> None:
        progress = unpack(PrefillProgress, payload)
        if progress.step_id is None:
            self._note_heartbeat(gang_number, gang.instance_of(rank))
        else:
            self._post_event(Heartbeat(steps=(progress.step_id,)))
            self._steps.advanced(progress.step_id, progress.computed)

    def _prefill_done(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        done = unpack(PrefillDone, payload)
        instance = instance_id(gang_number, gang.instance_of(rank))
        self._steps.rank_done(done, instance)

    def _prompt_logprobs(
        self, gang_number: GangId, gang: GangClient, rank: int, payload: Any
    ) -> None:
        self._requests.deliver_prompt_logprobs(unpack(PromptLogprobs, payload))

    def _kv_received(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        received = unpack(RankKvReceived, payload)
        sequence = self._requests.serving(received.sequence_id)
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
        if self._acknowledged(gang_number, gang, rank, freed.sequence_id, 0):
            return
        if (sequence := self._requests.sequences.get(freed.sequence_id)) is not None:
            instance = instance_id(gang_number, gang.instance_of(rank))
            self._requests.free(sequence, instance, rank)

    def _retained(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        retained = unpack(KvRetained, payload)
        self._acknowledged(gang_number, gang, rank, retained.sequence_id, retained.tokens)

    def expect_acks(self, gang_number: GangId, gang: GangClient, sequence_id: SequenceId) -> None:
        """Expect every rank of a gang to answer a Retain or Evict that it is sent."""
        instances = (instance_id(gang_number, index) for index in range(gang.instances))
        pending = self._pending_acks.setdefault((gang_number, sequence_id), [])
        pending.append(PendingRanks(gang, instances))

    def _acknowledged(
        self, gang_number: GangId, gang: GangClient, rank: int, sequence_id: SequenceId, tokens: int
    ) -> bool:
        """Record that a rank retains `tokens` tokens of a sequence.

        The scheduler is told of an instance once all its ranks have answered.

        Returns:
            Whether an answer was expected.
        """
        pending = self._pending_acks.get((gang_number, sequence_id))
        if pending is None:
            return False
        instance = instance_id(gang_number, gang.instance_of(rank))
        # A rank answers all messages, in their order.
        answered = next((ranks for ranks in pending if ranks.awaits(instance, rank)), None)
        if answered is not None:
            if answered.reported(instance, rank):
                self._post_event(
                    Retained(sequence_id=sequence_id, instance=instance, tokens=tokens)
                )
            if not any(pending):
                del self._pending_acks[gang_number, sequence_id]
        return True

    def _saved(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        saved = unpack(KvSaved, payload)
        instance = instance_id(gang_number, gang.instance_of(rank))
        whole = []
        for run in saved.runs:
            key = instance, run.name
            pending = self._saving.setdefault(key, PendingRanks(gang, [instance]))
            if pending.awaits(instance, rank) and pending.reported(instance, rank):
                del self._saving[key]
                whole.append(run)
        listed = saved.listed and self._saving.setdefault(
            (instance, ""), PendingRanks(gang, [instance])
        ).reported(instance, rank)
        if whole or listed:
            if saved.written:
                slices = (kv_slice for run in whole for kv_slice in run.slices)
                self._observer.kv_saved(tokens_on(slices).get(gang.instance_of(rank), 0))
            self._post_event(
                Saved(
                    instance=instance,
                    runs=tuple(whole),
                    bytes_per_s=saved.bytes_per_s,
                    listed=listed,
                )
            )

    def expect_restored(self, gang_number: GangId, gang: GangClient, sequence_id: int) -> None:
        """Expect every rank of a gang to answer a Restore that it is sent."""
        instances = (instance_id(gang_number, index) for index in range(gang.instances))
        self._restoring[gang_number, sequence_id] = _Restoring(PendingRanks(gang, instances))

    def _restored(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        restored = unpack(KvRestored, payload)
        key = gang_number, restored.sequence_id
        instance = instance_id(gang_number, gang.instance_of(rank))
        found = self._restoring.get(key)
        if found is None or not found.pending.awaits(instance, rank):
            return
        tokens = min(restored.tokens, found.tokens.get(instance, restored.tokens))
        found.tokens[instance] = tokens
        found.seconds = max(found.seconds, restored.seconds)
        if found.pending.reported(instance, rank):
            self._post_event(
                Restored(sequence_id=restored.sequence_id, instance=instance, tokens=tokens)
            )
            if not found.pending:
                del self._restoring[key]
                read = min(found.tokens.values()) >= 0
                total = sum(found.tokens.values()) if read else None
                self._observer.kv_restored(total, found.seconds)

    def _moved(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        moved = unpack(SequenceMoved, payload)
        sequence = self._requests.serving(moved.sequence_id)
        if sequence is None or (move := sequence.move) is None:
            return
        move.acks.append(moved)
        move.pending_acks.reported(instance_id(gang_number, gang.instance_of(rank)), rank)
        if not move.pending_acks:
            _log.debug("sequence_id %d moved: %d tokens", sequence.id, move.tokens)
            sequence.end_move(move)
            self._post_event(Moved(sequence_id=sequence.id))
            guarded(self._note_move)(gang, sequence, move)

    def _note_move(self, gang: GangClient, sequence: LiveSequence, move: LiveMove) -> None:
        others = self._requests.decoded_on(gang, beside=sequence)
        self._requests.note(sequence, move_events(move, others))

    def _failed(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        failed = unpack(RequestFailed, payload)
        if (sequence := self._requests.serving(failed.sequence_id)) is not None:
            self._requests.fail_sequence(sequence, failed.error)

    def _link_broken(self, gang_number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        self._on_link_broken(gang, unpack(LinkBroken, payload))


@dataclass(eq=False, slots=True)
class _Restoring:
    """KV that a gang reads from files."""

    pending: PendingRanks
    tokens: dict[InstanceId, int] = field(default_factory=dict)
    """Fewest tokens that a rank of each instance has read; -1 if one could not."""
    seconds: float = 0.0
    """Time of the slowest rank."""


@dataclass(eq=False, slots=True)
class _RunningStep:
    command: RunStep
    shape: GroupShape
    sequences: list[LiveSequence]
    unreported: PendingRanks
    preempting: bool
    """Some of its instances decoded when it was launched."""
    figures: list[PrefillDone] = field(default_factory=list)
    took_s: dict[InstanceId, float] = field(default_factory=dict)


class RunningSteps:
    """Steps that were sent to ranks, until the last rank has reported.

    Args:
        measured: takes how long a whole step took, and on which group.
        prefilled: takes a request whose whole prompt the step computed; the first token was sent
            before its end.
        observer: takes the figures of a step.
        requests: takes the elastic events of steps.
        post_event: takes events for the scheduler.
    """

    def __init__(
        self,
        measured: Callable[[RunStep, GroupShape, float], None],
        prefilled: Callable[[RequestHandle], None],
        observer: RequestObserver,
        requests: LiveRequests,
        post_event: PostEvent,
    ) -> None:
        self._measured, self._prefilled = measured, prefilled
        self._observer, self._requests, self._post_event = observer, requests, post_event
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
        unreported = PendingRanks(gang, command.step.group)
        preempting = gang.role == "elastic" and not all(
            members.isdisjoint(command.step.group) for members in self._requests.decoded_on(gang)
        )
        self._running[command.step.step_id] = _RunningStep(
            command, shape, sequences, unreported, preempting
        )

    def command_of(self, step_id: StepId) -> RunStep | None:
        """Return the command of a step that runs."""
        step = self._running.get(step_id)
        return None if step is None else step.command

    def _paused_requests(self, high_priority: PrefillStep) -> int:
        """Return how many requests of low-priority steps a high-priority step pauses."""
        return sum(
            len(step.sequences)
            for step in self._running.values()
            if not step.command.step.high_priority
            and any(member in step.unreported for member in high_priority.group)
        )

    def advanced(self, step_id: StepId, computed: float) -> None:
        """Record that a rank has computed a fraction of a step: tell its requests."""
        if (step := self._running.get(step_id)) is None:
            return
        spans = {chunk.sequence_id: chunk for chunk in step.command.step.chunks}
        for sequence in step.sequences:
            if (chunk := spans.get(sequence.id)) is not None:
                sequence.handle.prefilled_up_to(chunk.start + computed * chunk.length)

    def rank_done(self, done: PrefillDone, instance: InstanceId) -> None:
        """Record a rank's report of a step: first for the scheduler, which waits for it."""
        step = self._running.get(done.step_id)
        if step is None:
            return
        step.figures.append(done)
        took_s = max(step.took_s.get(instance, 0.0), done.compute_s + done.communication_s)
        step.took_s[instance] = took_s
        if not step.unreported.reported(instance, done.rank):
            return
        # Without queueing and preemption.
        took_ns = int(took_s * 1e9)
        self._post_event(StepDone(step_id=done.step_id, instance=instance, took_ns=took_ns))
        if not step.unreported:
            self.advanced(done.step_id, 1.0)
            del self._running[done.step_id]
            last = {chunk.sequence_id for chunk in step.command.step.chunks if chunk.last}
            for sequence in step.sequences:
                if sequence.id in last:
                    sequence.handle.prefill_over.set()
            guarded(self._observe)(step)
            for sequence in step.sequences:
                if sequence.id in last:
                    sequence.handle.prefill_reported.set()

    def _observe(self, step: _RunningStep) -> None:
        for sequence in step.sequences:
            if not sequence.front:
                sequence.handle.timings.add_figures(step.figures)
        _add_dropped_mass(step)
        self._observer.step_done(_figures(step))
        if not any(figure.cancelled for figure in step.figures):
            self._completed(step)

    def _completed(self, step: _RunningStep) -> None:
        took_s = max(step.took_s.values())
        for chunk, sequence in zip(step.command.step.chunks, step.sequences, strict=True):
            if chunk.last and chunk.start == sequence.command.cached:
                sequence.handle.marks.in_step_s = max(map(_in_step_s, step.figures))
                self._prefilled(sequence.handle)
        # A step that computes the logits of whole prompts says nothing of one that does not.
        if all(sequence.handle.prompt_logprobs is None for sequence in step.sequences):
            self._measured(step.command, step.shape, took_s)
        if step.unreported.gang.role == "elastic":
            events = step_events(
                step.command.step,
                step.sequences,
                step.figures,
                took_s=took_s,
                preempting=step.preempting,
            )
            self._requests.note(step.sequences[0], events)

    def discard(self, gang: GangClient) -> None:
        """Forget the steps of a lost gang."""
        self._running = {
            step_id: step
            for step_id, step in self._running.items()
            if step.unreported.gang is not gang
        }


def _add_dropped_mass(step: _RunningStep) -> None:
    tokens = {chunk.sequence_id: chunk.length for chunk in step.command.step.chunks}
    masses = [mass for figure in step.figures for mass in figure.dropped_mass]
    for sequence in step.sequences:
        own = [mass for mass in masses if mass.sequence_id == sequence.id]
        if sequence.id in tokens and sequence.handle.sequence_id == sequence.id:
            sequence.handle.dropped_mass.add_chunk(tokens[sequence.id], own)


def _in_step_s(done: PrefillDone) -> float:
    return done.queue_s + done.compute_s + done.communication_s + done.yielded_s


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

"""Steps on their way to the ranks.

Carries the scheduler's commands out on the ranks. It decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from csps.configurator.costs.cost_table import Bucket, bucket_of
from csps.protocols.core.errors import BoundNotMet, ConfigError, ConnectionLost, DeadlineExceeded
from csps.protocols.core.placement import Span
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import CancelSequence, EvictKv, JoinBatch, RetainKv
from csps.protocols.rpc.schema import pack
from csps.services.requests.request_handle import AttemptPlacement
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.live_requests import LiveRequests
from csps.services.router.live_sequences import (
    ElasticEventRecorder,
    LiveSequence,
    LiveSequences,
    decode_members,
    live_sequence,
)
from csps.services.router.lowering import (
    begin_move,
    explained_plan,
    kv_slices,
    lower_csa,
    piggyback_plan,
    prefill_messages,
    reserve_messages,
    without_cancelled,
)
from csps.services.router.rank_notifications import RankNotifications, RunningSteps, error_of
from csps.services.router.scheduler_driver import AttachedGangs
from csps.services.scheduling.events import commands
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import (
    AnyEvent,
    Freed,
    SequenceId,
    StepDone,
    gang_of,
    index_of,
)
from csps.services.scheduling.state.ledger import decode_slots

_log = logging.getLogger(__name__)


class StepLauncher:
    """One sequencer: `_send` sends a step to every rank of the gang without giving the event loop
    away in between, so all ranks see all steps in one order. That is what keeps steps on
    overlapping groups from waiting for each other.

    Args:
        gangs: those that are attached now.
        costs: why a step runs by its strategy.
        tell: takes events for the scheduler.
    """

    def __init__(
        self,
        *,
        gangs: AttachedGangs,
        costs: CostTableService,
        requests: LiveRequests,
        steps: RunningSteps,
        notifications: RankNotifications,
        post_event: Callable[[AnyEvent], None],
    ) -> None:
        self._gangs, self._costs = gangs, costs
        self._requests, self._steps = requests, steps
        self._notifications, self._post_event = notifications, post_event

    def launch(self, command: RunStep, sequences: list[LiveSequence]) -> None:
        """Send a step, without what nobody wants any more; nothing if its gang is lost."""
        gang = self._gangs.get(gang_of(command.group[0]))
        if gang is None:
            return
        self._refuse_unmet(command, gang, sequences)
        in_place = {
            sequence.id: sequence.command.slices
            for sequence in sequences
            if sequence.decode is gang
        }
        rest, idle = without_cancelled(
            command, {sequence.id for sequence in sequences if sequence.over}, placements=in_place
        )
        for instance in idle:
            self._post_event(StepDone(step_id=command.step_id, instance=instance, took_ns=0))
        if rest.chunks:
            self._send_or_fail(
                rest, gang, [sequence for sequence in sequences if not sequence.over]
            )

    def _refuse_unmet(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]
    ) -> None:
        """End requests whose bounds this step would break, if they want that."""
        strict = [it for it in sequences if it.handle.spec.refuse_unmet and not it.over]
        if not strict:
            return
        loss = self._costs.loss(_bucket(command, gang), command.strategy)
        ends_s = (command.ends_ns + self._costs.overhead_ns) / 1e9
        for sequence in strict:
            ttft_ms = (ends_s - sequence.handle.marks.submitted) * 1e3
            if sequence.handle.spec.objective.met(ttft_ms, loss) is False:
                self._notifications.fail(sequence, BoundNotMet(ttft_ms=ttft_ms, loss=loss))

    def _send_or_fail(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]
    ) -> None:
        """What no group can run ends these requests, and not the router with all the others."""
        try:
            self._send(command, gang, sequences)
        except ConfigError as error:
            _log.exception("step %d cannot be run", command.step_id)
            for sequence in sequences:
                self._notifications.fail(sequence, error)
            for instance in command.group:
                self._post_event(StepDone(step_id=command.step_id, instance=instance, took_ns=0))

    def _send(self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]) -> None:
        """Nothing in here may await."""
        csa = lower_csa(command, sequences[0].handle.spec, gang)
        for rank, message in enumerate(prefill_messages(command, sequences, gang, csa)):
            gang.notify(rank, "prefill", message)
        bucket = _bucket(command, gang)
        self._steps.launched(command, gang, sequences, bucket.shape)
        for chunk, sequence in zip(command.chunks, sequences, strict=True):
            handle = sequence.handle
            if chunk.start == sequence.command.cached:
                handle.placement = _attempt_placement(command, sequence)
                why = self._costs.why(bucket, command.strategy)
                loss = self._costs.loss(bucket, command.strategy)
                handle.plan = explained_plan(command, handle.spec, csa, why, loss)
                self._requests.launched(handle)
            handle.expect_first_token(command.ends_ns, self._costs.overhead_ns)


def _attempt_placement(command: RunStep, sequence: LiveSequence) -> AttemptPlacement:
    reserved = sequence.command
    return AttemptPlacement(
        group=tuple(map(index_of, command.group)),
        bounds=command.bounds,
        slices=kv_slices(reserved.slices),
        master=index_of(reserved.master),
        batched_with=len(command.chunks) - 1,
    )


def _bucket(command: RunStep, gang: GangClient) -> Bucket:
    """Of the cost table, that the step's strategy was looked up in."""
    places = [Location.parse(gang.locations[index_of(instance)]) for instance in command.group]
    history = max(chunk.start for chunk in command.chunks)
    return bucket_of(command.cls, GroupShape.of(places, gang.tp), history, command.bounds[-1])


class Executor:
    """One of its methods for each kind of command.

    Args:
        gangs: those that are attached now.
        launcher: of steps.
        costs: looks, after each turn, what the commands ask of it.
        tell: takes events for the scheduler.
    """

    def __init__(
        self,
        *,
        gangs: AttachedGangs,
        launcher: StepLauncher,
        costs: CostTableService,
        requests: LiveRequests,
        sequences: LiveSequences,
        notifications: RankNotifications,
        elastic: ElasticEventRecorder,
        post_event: Callable[[AnyEvent], None],
    ) -> None:
        self._gangs, self._launcher, self._costs = gangs, launcher, costs
        self._requests, self._sequences = requests, sequences
        self._notifications, self._elastic, self._post_event = notifications, elastic, post_event
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None
        """A mistake of ours in the background, for health checks."""
        self._actions: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.Reserve: self._reserve,
            commands.RunStep: self._run_step,
            commands.SetGroup: self._set_group,
            commands.Piggyback: self._piggyback,
            commands.Retain: self._retain,
            commands.Evict: self._evict,
            commands.MoveKv: self._move,
            commands.Cancel: self._cancel,
            commands.Restart: self._restart,
            commands.Refuse: self._refuse,
            commands.Fail: self._fail,
            commands.ResetGang: self._reset_gang,
        }

    def execute(self, decided: Sequence[commands.Command]) -> None:
        """In the order given."""
        for command in decided:
            self._actions[type(command)](command)
        self._costs.request_misses()

    async def close(self) -> None:
        """Stop what goes on in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("carrying out a command failed", exc_info=error)
            self.fault = error

    # --- reserving -----------------------------------------------------------------------------

    def _reserve(self, command: commands.Reserve) -> None:
        handle = self._requests.get(command.request_id)
        decode = self._gangs.get(gang_of(command.master))
        assert handle is not None, "a place for a request whose end the scheduler was told of"
        assert decode is not None, "a place on a gang whose end the scheduler was told of"
        known = handle.spec.prompt.size + handle.generated_tokens.size
        assert command.prompt_tokens == known, "the scheduler counts other tokens"
        sequence = live_sequence(command, handle, decode)
        self._sequences.add(sequence)
        handle.sequence_id, handle.cached_tokens = sequence.id, command.cached
        self._requests.placed(handle)
        if command.slices:
            sequence.reserving = self._in_background(self._ask_for_slots(sequence))

    async def _ask_for_slots(self, sequence: LiveSequence) -> None:
        """Ask every decode rank; a rank that refuses holds nothing."""
        decode, command = sequence.decode, sequence.command
        messages = reserve_messages(sequence, epoch=self._gangs.epoch_of(decode))
        deadline_s = max(0.0, (command.deadline_ns - time.monotonic_ns()) / 1e9)
        answers = await asyncio.gather(
            *(
                decode.call(rank, "reserve", message, deadline_s=deadline_s)
                for rank, message in enumerate(messages)
            ),
            return_exceptions=True,
        )
        errors = {rank: it for rank, it in enumerate(answers) if isinstance(it, Exception)}
        for rank, error in errors.items():
            if not isinstance(error, DeadlineExceeded | ConnectionLost):
                self._notifications.free(sequence, gang_of(command.master), rank)
        if errors and not sequence.over:
            self._notifications.fail(sequence, next(iter(errors.values())))
        if sequence.cancel_when_reserved:
            _notify_cancel(decode, sequence.id)

    # --- steps ---------------------------------------------------------------------------------

    def _run_step(self, command: commands.RunStep) -> None:
        sequences = [self._sequences.by_id[chunk.sequence_id] for chunk in command.chunks]
        reserving = [sequence.reserving for sequence in sequences if sequence.reserving is not None]
        if reserving:
            self._in_background(self._launch_when_reserved(command, sequences, reserving))
        else:
            self._launcher.launch(command, sequences)

    async def _launch_when_reserved(
        self,
        command: commands.RunStep,
        sequences: list[LiveSequence],
        reserving: list[asyncio.Task[None]],
    ) -> None:
        """KV of a request that no decode rank has heard of yet would be thrown away."""
        await asyncio.gather(*reserving)
        self._launcher.launch(command, sequences)

    # --- decoding ------------------------------------------------------------------------------

    def _set_group(self, command: commands.SetGroup) -> None:
        if (gang := self._gangs.get(command.gang)) is None:
            return
        for sequence_id in command.joined:
            if (sequence := self._sequences.serving(sequence_id)) is not None:
                if gang.role == "elastic":
                    self._elastic.joins(sequence)
                self._sequences.join(sequence)
                message = JoinBatch(
                    sequence_id=sequence_id,
                    first_token=sequence.last_token,
                    instances=_decode_instances(sequence),
                )
                gang.notify(0, "join", pack(message))
                self._requests.handed_over(sequence.handle)

    def _piggyback(self, command: commands.Piggyback) -> None:
        sequence = self._sequences.by_id[command.sequence_id]
        self._in_background(self._piggyback_when_reserved(command, sequence))

    async def _piggyback_when_reserved(
        self, command: commands.Piggyback, sequence: LiveSequence
    ) -> None:
        """A leader that was told at once could let the row in before another rank expects it."""
        assert sequence.reserving is not None, "rides without a reservation"
        await asyncio.gather(sequence.reserving)
        if sequence.over:
            return
        message = JoinBatch(sequence_id=sequence.id, first_token=None, budget=command.budget)
        sequence.decode.notify(0, "join", pack(message))
        handle, reserved = sequence.handle, sequence.command
        handle.placement = AttemptPlacement(
            group=(index_of(reserved.master),),
            bounds=(0, reserved.prompt_tokens),
            slices=kv_slices(reserved.slices),
            master=index_of(reserved.master),
        )
        handle.plan = piggyback_plan(handle.spec, command.budget)
        self._requests.launched(handle)

    def _move(self, command: commands.MoveKv) -> None:
        sequence, gang = self._sequences.serving(command.sequence_id), self._gangs.get(command.gang)
        if sequence is None or gang is None:
            return
        if not sequence.decode_ended:
            gang.notify_all("move", pack(begin_move(command, sequence, gang)))
            return
        for instance in decode_slots(command, 0):  # its last token is on its way: nothing moves
            if instance not in sequence.pending_free:
                self._post_event(Freed(sequence_id=sequence.id, instance=instance))

    # --- keeping -------------------------------------------------------------------------------

    def _retain(self, command: commands.Retain) -> None:
        self._notify_leader(command, "retain", RetainKv)
        if (sequence := self._sequences.by_id.get(command.sequence_id)) is not None:
            sequence.pending_free.clear()  # the ranks answer what they have left
            self._end_sequence(command.sequence_id)

    def _evict(self, command: commands.Evict) -> None:
        self._notify_leader(command, "evict", EvictKv)

    def _notify_leader(
        self,
        command: commands.Retain | commands.Evict,
        method: str,
        message: type[RetainKv | EvictKv],
    ) -> None:
        if (gang := self._gangs.get(command.gang)) is None:
            return
        spans = (Span(command.start, command.stop),) if command.start < command.stop else ()
        self._notifications.retain_acks.expect_ack(command.gang, command.sequence_id)
        gang.notify(0, method, pack(message(sequence_id=command.sequence_id, spans=spans)))

    # --- ending --------------------------------------------------------------------------------

    def _cancel(self, command: commands.Cancel) -> None:
        sequence = self._sequences.by_id.get(command.sequence_id)
        for sequence_id in command.gangs:
            if (gang := self._gangs.get(sequence_id)) is None:
                continue
            if sequence is not None and gang is sequence.decode and sequence.reservation_pending:
                sequence.cancel_when_reserved = True
            else:
                _notify_cancel(gang, command.sequence_id)
        self._end_sequence(command.sequence_id)

    def _end_sequence(self, sequence_id: SequenceId) -> None:
        """Unless it is forgotten already: its decode gang is gone, or holds nothing of it."""
        if (sequence := self._sequences.by_id.get(sequence_id)) is not None:
            self._sequences.end(sequence)

    def _restart(self, command: commands.Restart) -> None:
        self._end_sequence(command.sequence_id)
        if (handle := self._requests.get(command.request_id)) is not None:
            error = error_of(command.error)
            _log.info("request %s starts over: %s", handle.spec.client_request_id, error)
            self._requests.restart(handle, error)

    def _refuse(self, command: commands.Refuse) -> None:
        if (handle := self._requests.get(command.request_id)) is not None:
            self._requests.refuse(handle, error_of(command.error))

    def _fail(self, command: commands.Fail) -> None:
        if (handle := self._requests.get(command.request_id)) is not None:
            self._requests.fail(handle, error_of(command.error))

    def _reset_gang(self, command: commands.ResetGang) -> None:
        if (gang := self._gangs.get(command.gang)) is not None:
            gang.disconnect(command.reason)


def _decode_instances(sequence: LiveSequence) -> tuple[int, ...]:
    """Whom a row concerns where a gang decodes what it prefills: the others can go on with that. A
    gang that only decodes iterates all rows together."""
    if sequence.decode.role != "elastic":
        return ()
    return tuple(sorted(map(index_of, decode_members(sequence.placement))))


def _notify_cancel(gang: GangClient, sequence: SequenceId) -> None:
    gang.notify_all("cancel", pack(CancelSequence(sequence_id=sequence)))

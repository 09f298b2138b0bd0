"""Executes the scheduler's commands on the ranks.

`Executor` turns each command into messages to the ranks and changes of the router's records. It
decides nothing. `StepLauncher` sends prefill steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from csps.configurator.costs.cost_table import Bucket, bucket_of
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.errors import (
    BoundNotMet,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
)
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import CancelSequence, EvictKv, JoinBatch, RetainKv, SaveKv
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.protocols.rpc.schema import pack
from csps.services.requests.request_handle import AttemptPlacement
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.live_requests import LiveRequests
from csps.services.router.live_sequences import LiveSequence, decode_members
from csps.services.router.lowering import (
    explained_plan,
    first_token_samplers,
    in_gang,
    lower_csa,
    move_messages,
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
    GangId,
    InstanceId,
    SequenceId,
    StepDone,
    gang_of,
    index_of,
    instance_id,
)
from csps.services.scheduling.state.ledger import decode_slots

_log = logging.getLogger(__name__)


class Executor:
    """Executes scheduler commands, one method per command type.

    Args:
        gangs: the attached gangs.
        launcher: sends steps.
        costs: asks for the cost-table buckets that a round missed.
        post_event: takes events for the scheduler.
    """

    def __init__(
        self,
        *,
        gangs: AttachedGangs,
        launcher: StepLauncher,
        costs: CostTableService,
        requests: LiveRequests,
        notifications: RankNotifications,
        post_event: Callable[[AnyEvent], None],
    ) -> None:
        self._gangs, self._launcher, self._costs = gangs, launcher, costs
        self._requests, self._notifications = requests, notifications
        self._post_event = post_event
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None
        """Error of a background command: a bug, for health checks."""
        self._actions: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.Reserve: self._reserve,
            commands.RunStep: self._run_step,
            commands.SetGroup: self._set_group,
            commands.ToGang: self._to_gang,
            commands.ToFiles: self._to_files,
            commands.Cancel: self._cancel,
            commands.Restart: self._restart,
            commands.Refuse: self._refuse,
            commands.Fail: self._fail,
            commands.ResetGang: self._reset_gang,
        }

    def execute(self, decided: Sequence[commands.Command]) -> None:
        """Execute one round's commands in the order given."""
        for command in decided:
            self._actions[type(command)](command)
        self._costs.request_misses()

    async def close(self) -> None:
        """Cancel background commands."""
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
            _log.error("a background command failed", exc_info=error)
            self.fault = error

    # --- reserving -----------------------------------------------------------------------------

    def _reserve(self, command: commands.Reserve) -> None:
        gang = gang_of(command.message.master)
        decode = self._gangs.get(gang)
        assert decode is not None, f"Reserve on the lost gang {gang}"
        sequence = self._requests.reserve(command, decode)
        if command.message.slices:
            sequence.reserving = self._in_background(self._ask_for_slots(sequence))

    async def _ask_for_slots(self, sequence: LiveSequence) -> None:
        """Ask every decode rank for slots; fail the sequence if one refuses."""
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
        errors = {
            rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Exception)
        }
        for rank, error in errors.items():
            if not isinstance(error, DeadlineExceeded | ConnectionLost):
                instance = instance_id(gang_of(command.message.master), decode.instance_of(rank))
                self._requests.free(sequence, instance, rank)
        if errors and not sequence.over:
            rank, error = next(iter(errors.items()))
            _log.debug("sequence_id %d: rank %d did not reserve: %s", sequence.id, rank, error)
            self._requests.fail_sequence(sequence, error)
        if sequence.cancel_when_reserved:
            _notify_cancel(decode, sequence.id)

    # --- steps ---------------------------------------------------------------------------------

    def _run_step(self, command: commands.RunStep) -> None:
        sequences = [self._requests.sequences[chunk.sequence_id] for chunk in command.step.chunks]
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
        """Launch a step once all its sequences have their decode slots."""
        # Decode ranks discard KV of sequences that they have no reservation for.
        await asyncio.gather(*reserving)
        self._launcher.launch(command, sequences)

    # --- decoding ------------------------------------------------------------------------------

    def _set_group(self, command: commands.SetGroup) -> None:
        if (gang := self._gangs.get(command.gang)) is None:
            return
        for sequence_id in command.joined:
            if (sequence := self._requests.serving(sequence_id)) is not None:
                self._requests.join(sequence)
                message = JoinBatch(
                    sequence_id=sequence_id,
                    first_token=sequence.last_token,
                    instances=_decode_instances(sequence),
                )
                gang.notify(0, "join", pack(message))

    def _to_gang(self, command: commands.ToGang) -> None:
        message, gang = command.message, self._gangs.get(command.gang)
        if isinstance(message, JoinBatch):
            sequence = self._requests.sequences[message.sequence_id]
            self._in_background(self._piggyback_when_reserved(message, sequence))
        elif gang is None:
            return
        elif isinstance(message, MoveSequence):
            self._move(gang, message)
        else:
            self._retain_or_evict(command.gang, gang, message)

    async def _piggyback_when_reserved(self, message: JoinBatch, sequence: LiveSequence) -> None:
        """Notify the leader of a piggybacked prefill once all ranks have reserved."""
        assert sequence.reserving is not None, (
            f"piggybacked sequence {sequence.id} has no reservation"
        )
        # A leader notified earlier could start the sequence before another rank expects it.
        await asyncio.gather(sequence.reserving)
        if sequence.over:
            return
        message = msgspec.structs.replace(message, instances=_decode_instances(sequence))
        if sequence.handle.prompt_logprobs is not None:
            error = "not supported by this server, which computes prompts beside decoding"
            self._requests.fail_sequence(
                sequence, InvalidRequest(f"prompt_logprobs: {error}", param="prompt_logprobs")
            )
            return
        sequence.decode.notify(0, "join", pack(message))
        handle, reserved = sequence.handle, sequence.command.message
        handle.placement = AttemptPlacement(
            group=(index_of(reserved.master),),
            bounds=(0, reserved.prompt_tokens),
            slices=in_gang(reserved.slices),
            master=index_of(reserved.master),
        )
        handle.plan = piggyback_plan(handle.spec, message.budget)
        self._requests.launched(handle)

    def _move(self, gang: GangClient, move: MoveSequence) -> None:
        sequence = self._requests.serving(move.sequence_id)
        if sequence is None:
            return
        _log.debug("move sequence_id %d within gang %s", move.sequence_id, gang.gang_id)
        if not sequence.decode_ended:
            for rank, message in enumerate(move_messages(move, sequence, gang)):
                gang.notify(rank, "move", message)
            return
        for instance in decode_slots(move.after, 0):  # its last token was sampled: nothing moves
            if instance not in sequence.pending_free:
                self._post_event(Freed(sequence_id=sequence.id, instance=instance))

    # --- prefix cache --------------------------------------------------------------------------

    def _retain_or_evict(
        self, gang_number: GangId, gang: GangClient, message: RetainKv | EvictKv
    ) -> None:
        self._notifications.expect_acks(gang_number, gang, message.sequence_id)
        retain = isinstance(message, RetainKv)
        gang.notify(0, "retain" if retain else "evict", pack(message))
        sequence = self._requests.sequences.get(message.sequence_id)
        if retain and sequence is not None:
            sequence.pending_free.clear()  # retain acks replace `freed` from here on
            self._requests.end(sequence)

    def _to_files(self, command: commands.ToFiles) -> None:
        message, gang = command.message, self._gangs.get(command.gang)
        if gang is None:
            return
        if isinstance(message, SaveKv):
            owner = self._requests.owners.get(message.tenant, "")
            gang.notify_all("save", pack(msgspec.structs.replace(message, owner=owner)))
        else:
            self._notifications.expect_restored(command.gang, gang, message.sequence_id)
            gang.notify_all("restore", pack(message))

    # --- ending --------------------------------------------------------------------------------

    def _cancel(self, command: commands.Cancel) -> None:
        sequence = self._requests.sequences.get(command.sequence_id)
        for gang_number in command.gangs:
            if (gang := self._gangs.get(gang_number)) is None:
                continue
            if sequence is not None and gang is sequence.decode and sequence.reservation_pending:
                sequence.cancel_when_reserved = True
            else:
                _notify_cancel(gang, command.sequence_id)
        self._end_sequence(command.sequence_id)

    def _end_sequence(self, sequence_id: SequenceId) -> None:
        """End a sequence, unless its decode gang is gone or nothing of it is left."""
        if (sequence := self._requests.sequences.get(sequence_id)) is not None:
            self._requests.end(sequence)

    def _restart(self, command: commands.Restart) -> None:
        self._end_sequence(command.sequence_id)
        if (handle := self._requests.get(command.request_id)) is not None:
            error = error_of(command.error)
            _log.info(
                "request %s: attempt %d (sequence_id %d) was lost, queued again: %s",
                handle.spec.client_request_id, handle.timings.attempts, command.sequence_id, error,
            )  # fmt: skip
            self._requests.restart(handle, error)

    def _refuse(self, command: commands.Refuse) -> None:
        if (handle := self._requests.get(command.request_id)) is not None:
            self._requests.refuse(handle, error_of(command.error))

    def _fail(self, command: commands.Fail) -> None:
        if (handle := self._requests.get(command.request_id)) is not None:
            self._requests.fail(handle, error_of(command.error))

    def _reset_gang(self, command: commands.ResetGang) -> None:
        if (gang := self._gangs.get(command.gang)) is not None:
            gang.give_up(command.reason)


def _decode_instances(sequence: LiveSequence) -> tuple[int, ...]:
    """Return the instances that iterate a sequence; the others do not wait for its iterations."""
    return tuple(sorted(map(index_of, decode_members(sequence.placement))))


def _notify_cancel(gang: GangClient, sequence_id: SequenceId) -> None:
    _log.debug("cancel sequence_id %d on %s gang %s", sequence_id, gang.role, gang.gang_id)
    gang.notify_all("cancel", pack(CancelSequence(sequence_id=sequence_id)))


class StepLauncher:
    """Sends prefill steps to the ranks, every step to all ranks of its gang.

    Steps on overlapping groups would wait for each other if two ranks saw them in different orders.
    `_send_or_fail` therefore notifies all ranks without yielding to the event loop.

    Args:
        gangs: the attached gangs.
        costs: explains why a step runs by its strategy.
        post_event: takes events for the scheduler.
    """

    def __init__(
        self,
        *,
        gangs: AttachedGangs,
        costs: CostTableService,
        requests: LiveRequests,
        steps: RunningSteps,
        post_event: Callable[[AnyEvent], None],
    ) -> None:
        self._gangs, self._costs = gangs, costs
        self._requests, self._steps, self._post_event = requests, steps, post_event

    def launch(self, command: RunStep, sequences: list[LiveSequence]) -> None:
        """Send a step without its cancelled sequences; send nothing if its gang is lost."""
        gang = self._gangs.get(gang_of(command.step.group[0]))
        if gang is None:
            return  # `GangDown` ends its sequences
        self._refuse_unmet(command, gang, sequences)
        in_place = {
            sequence.id: sequence.command.message.slices
            for sequence in sequences
            if sequence.decode is gang
        }
        rest, idle = without_cancelled(
            command.step,
            {sequence.id for sequence in sequences if sequence.over},
            placements=in_place,
        )
        self._report_done(command.step, idle)
        if rest.chunks:
            self._send_or_fail(
                msgspec.structs.replace(command, step=rest),
                gang,
                [sequence for sequence in sequences if not sequence.over],
            )

    def _report_done(self, step: PrefillStep, instances: Iterable[InstanceId]) -> None:
        """Report a step as done by instances that it was not sent to."""
        for instance in instances:
            self._post_event(StepDone(step_id=step.step_id, instance=instance, took_ns=0))

    def _refuse_unmet(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]
    ) -> None:
        """Fail the requests with `refuse_unmet` whose bounds this step is predicted to miss."""
        strict = [
            sequence
            for sequence in sequences
            if sequence.handle.spec.refuse_unmet and not (sequence.over or sequence.front)
        ]
        if not strict:
            return
        loss, costs = self._costs.loss(_bucket(command, gang), command.step.strategy), self._costs
        for sequence in strict:
            handle, ends_ns = sequence.handle, command.ends_ns
            if handle.met(ends_ns, loss, costs.overhead_ns, costs.error) is False:
                ttft_ms = (ends_ns + costs.overhead_ns) / 1e6 - handle.marks.submitted * 1e3
                self._requests.fail_sequence(sequence, BoundNotMet(ttft_ms=ttft_ms, loss=loss))

    def _send_or_fail(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]
    ) -> None:
        """Send a step; if that is not possible, fail its requests and not the router.

        No group may be able to run the step, or a client may have found a request that makes a
        message too long. The clients of all other requests must not pay for that.
        """
        step = command.step
        try:
            csa = lower_csa(step, sequences[0].handle.spec, gang)
            messages = prefill_messages(step, sequences, gang, csa)
            for rank, message in first_token_samplers(step, sequences, gang):
                gang.notify(rank, "sampler", message)
            # No `await` until every rank is notified: all ranks must see all steps in one order.
            for rank, message in enumerate(messages):
                gang.notify(rank, "prefill", message)
        except Exception as error:
            _log.exception("step_id %d cannot be sent; failing its requests", step.step_id)
            for sequence in sequences:
                self._requests.fail_sequence(sequence, error)
            self._report_done(step, step.group)
            return
        self._sent(command, gang, sequences, csa)

    def _sent(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence], csa: CsaPlan | None
    ) -> None:
        """Record that a step was sent."""
        step, bucket = command.step, _bucket(command, gang)
        _log.debug(
            "step_id %d sent to instances %s of gang %s by %s: sequence_ids %s",
            step.step_id, step.group, gang.gang_id, step.strategy,
            [sequence.id for sequence in sequences],
        )  # fmt: skip
        self._steps.launched(command, gang, sequences, bucket.shape)
        for chunk, sequence in zip(step.chunks, sequences, strict=True):
            handle = sequence.handle
            if sequence.front:
                continue
            if chunk.start == sequence.command.cached:
                handle.placement = _attempt_placement(step, sequence)
                why = self._costs.why(bucket, step.strategy)
                loss = self._costs.loss(bucket, step.strategy)
                handle.plan = explained_plan(step, handle.spec, csa, why, loss)
                self._requests.launched(handle)
            handle.expect_first_token(command.ends_ns, self._costs.overhead_ns, self._costs.error)


def _attempt_placement(step: PrefillStep, sequence: LiveSequence) -> AttemptPlacement:
    reserved = sequence.command.message
    return AttemptPlacement(
        group=tuple(map(index_of, step.group)),
        bounds=step.bounds,
        slices=in_gang(reserved.slices),
        master=index_of(reserved.master),
        batched_with=len(step.chunks) - 1,
    )


def _bucket(command: RunStep, gang: GangClient) -> Bucket:
    """Return the cost table's bucket in which the step's strategy was looked up."""
    step = command.step
    places = [Location.parse(gang.locations[index_of(instance)]) for instance in step.group]
    history = max(chunk.start for chunk in step.chunks)
    return bucket_of(command.cls, GroupShape.of(places, gang.tp), history, step.bounds[-1])

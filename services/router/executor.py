"""Carries the scheduler's commands out on the ranks. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from csps.protocols.errors import ConnectionLost, DeadlineExceeded
from csps.protocols.gang_client import GangClient
from csps.protocols.messages import CancelRequest, JoinBatch, Keep, Release
from csps.protocols.schema import pack
from csps.protocols.span import Span
from csps.services.router.attached import AttachedGangs
from csps.services.router.cost_book import CostBook
from csps.services.router.decode_groups import concerned
from csps.services.router.elaborate import ride_plan
from csps.services.router.elastic_events import ElasticEvents
from csps.services.router.moves import begin_move
from csps.services.router.reports import Reports, error_of
from csps.services.router.requests import Requests
from csps.services.router.running import Placement
from csps.services.router.sequences import LiveSequence, Sequences, live_sequence
from csps.services.router.step_launch import StepLauncher
from csps.services.router.step_messages import kv_shares, reserve_messages
from csps.services.scheduling import commands
from csps.services.scheduling.decode_slots import decode_slots
from csps.services.scheduling.events import AnyEvent, Freed
from csps.services.scheduling.ids import SequenceId, gang_of, index_of

_log = logging.getLogger(__name__)


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
        costs: CostBook,
        requests: Requests,
        sequences: Sequences,
        reports: Reports,
        elastic: ElasticEvents,
        tell: Callable[[AnyEvent], None],
    ) -> None:
        self._gangs, self._launcher, self._costs = gangs, launcher, costs
        self._requests, self._sequences = requests, sequences
        self._reports, self._elastic, self._tell = reports, elastic, tell
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None
        """A mistake of ours in the background, for health checks."""
        self._actions: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.Reserve: self._reserve,
            commands.RunStep: self._run_step,
            commands.SetGroup: self._set_group,
            commands.Ride: self._ride,
            commands.Keep: self._keep,
            commands.Release: self._release,
            commands.MoveKv: self._move,
            commands.Cancel: self._cancel,
            commands.Restart: self._restart,
            commands.Refuse: self._refuse,
            commands.Fail: self._fail,
            commands.ResetGang: self._reset_gang,
        }

    def carry_out(self, decided: Sequence[commands.Command]) -> None:
        """In the order given."""
        for command in decided:
            self._actions[type(command)](command)
        self._costs.look()

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
        running = self._requests.get(command.request)
        decode = self._gangs.get(gang_of(command.master))
        assert running is not None, "a place for a request whose end the scheduler was told of"
        assert decode is not None, "a place on a gang whose end the scheduler was told of"
        known = running.generation.prompt.size + running.drawn_tokens.size
        assert command.prompt_tokens == known, "the scheduler counts other tokens"
        sequence = live_sequence(command, running, decode)
        self._sequences.add(sequence)
        running.sequence, running.cached_tokens = sequence.id, command.cached
        self._requests.placed(running)
        if command.shares:
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
                self._reports.free(sequence, gang_of(command.master), rank)
        if errors and not sequence.over:
            self._reports.fail(sequence, next(iter(errors.values())))
        if sequence.withdrawn:
            _tell_to_cancel(decode, sequence.id)

    # --- steps ---------------------------------------------------------------------------------

    def _run_step(self, command: commands.RunStep) -> None:
        sequences = [self._sequences.by_id[piece.sequence] for piece in command.pieces]
        reserving = [it.reserving for it in sequences if it.reserving is not None]
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
        for number in command.joined:
            if (sequence := self._sequences.serving(number)) is not None:
                if gang.role == "elastic":
                    self._elastic.joins(sequence)
                self._sequences.join(sequence)
                message = JoinBatch(
                    rid=number, first_token=sequence.last_token, instances=_concerned(sequence)
                )
                gang.notify(0, "join", pack(message))
                self._requests.handed_over(sequence.running)

    def _ride(self, command: commands.Ride) -> None:
        sequence = self._sequences.by_id[command.sequence]
        self._in_background(self._ride_when_reserved(command, sequence))

    async def _ride_when_reserved(self, command: commands.Ride, sequence: LiveSequence) -> None:
        """A leader that was told at once could let the row in before another rank expects it."""
        assert sequence.reserving is not None, "rides without a reservation"
        await asyncio.gather(sequence.reserving)
        if sequence.over:
            return
        message = JoinBatch(rid=sequence.id, first_token=None, budget=command.budget)
        sequence.decode.notify(0, "join", pack(message))
        running, reserved = sequence.running, sequence.command
        running.placement = Placement(
            group=(index_of(reserved.master),),
            bounds=(0, reserved.prompt_tokens),
            shares=kv_shares(reserved.shares),
            master=index_of(reserved.master),
        )
        running.plan = ride_plan(running.generation, command.budget)
        self._requests.launched(running)

    def _move(self, command: commands.MoveKv) -> None:
        sequence, gang = self._sequences.serving(command.sequence), self._gangs.get(command.gang)
        if sequence is None or gang is None:
            return
        if not sequence.leaving:
            gang.notify_all("move", pack(begin_move(command, sequence, gang)))
            return
        for instance in decode_slots(command, 0):  # its last token is on its way: nothing moves
            if instance not in sequence.unfreed:
                self._tell(Freed(sequence=sequence.id, instance=instance))

    # --- keeping -------------------------------------------------------------------------------

    def _keep(self, command: commands.Keep) -> None:
        self._tell_leader(command, "keep", Keep)
        if (sequence := self._sequences.by_id.get(command.sequence)) is not None:
            sequence.unfreed.clear()  # the ranks answer what they have left
            self._over(command.sequence)

    def _release(self, command: commands.Release) -> None:
        self._tell_leader(command, "release", Release)

    def _tell_leader(
        self,
        command: commands.Keep | commands.Release,
        method: str,
        message: type[Keep | Release],
    ) -> None:
        if (gang := self._gangs.get(command.gang)) is None:
            return
        spans = (Span(command.start, command.stop),) if command.start < command.stop else ()
        self._reports.kept.told(command.gang, command.sequence)
        gang.notify(0, method, pack(message(rid=command.sequence, spans=spans)))

    # --- ending --------------------------------------------------------------------------------

    def _cancel(self, command: commands.Cancel) -> None:
        sequence = self._sequences.by_id.get(command.sequence)
        for number in command.gangs:
            if (gang := self._gangs.get(number)) is None:
                continue
            if sequence is not None and gang is sequence.decode and sequence.reserved_not_yet:
                sequence.withdrawn = True
            else:
                _tell_to_cancel(gang, command.sequence)
        self._over(command.sequence)

    def _over(self, number: SequenceId) -> None:
        """Unless it is forgotten already: its decode gang is gone, or holds nothing of it."""
        if (sequence := self._sequences.by_id.get(number)) is not None:
            self._sequences.end(sequence)

    def _restart(self, command: commands.Restart) -> None:
        self._over(command.sequence)
        if (running := self._requests.get(command.request)) is not None:
            error = error_of(command.error)
            _log.info("request %s starts over: %s", running.generation.request_id, error)
            self._requests.restart(running, error)

    def _refuse(self, command: commands.Refuse) -> None:
        if (running := self._requests.get(command.request)) is not None:
            self._requests.refuse(running, error_of(command.error))

    def _fail(self, command: commands.Fail) -> None:
        if (running := self._requests.get(command.request)) is not None:
            self._requests.fail(running, error_of(command.error))

    def _reset_gang(self, command: commands.ResetGang) -> None:
        if (gang := self._gangs.get(command.gang)) is not None:
            gang.hang_up(command.reason)


def _concerned(sequence: LiveSequence) -> tuple[int, ...]:
    """Whom a row concerns where a gang decodes what it prefills: the others can go on with that. A
    gang that only decodes iterates all rows together."""
    if sequence.decode.role != "elastic":
        return ()
    return tuple(sorted(map(index_of, concerned(sequence.placed))))


def _tell_to_cancel(gang: GangClient, sequence: SequenceId) -> None:
    gang.notify_all("cancel", pack(CancelRequest(rid=sequence)))

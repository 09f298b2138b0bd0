"""Rows of a simulated elastic gang that go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from csps.loadgen.simulator.conducted_ranks import ConductedRanks
from csps.loadgen.simulator.gang_listener import GangListener
from csps.loadgen.simulator.held_sequences import HeldSequences, coming
from csps.loadgen.simulator.requests import Sequence
from csps.loadgen.simulator.step_order import Task
from csps.protocols.span import Span
from csps.services.scheduling.commands import MoveKv
from csps.services.scheduling.decode_slots import decode_slots
from csps.services.scheduling.events import Moved
from csps.services.scheduling.ids import SequenceId, index_of
from csps.services.scheduling.shares import tokens_on, within


class RowMoves:
    """Those of one incarnation of a gang.

    Args:
        held: the sequences that it decodes.
        ranks: that it has.
        move_ns: what KV of so many tokens takes.
        listener: is told of the end.
    """

    def __init__(
        self,
        held: HeldSequences,
        ranks: ConductedRanks,
        move_ns: Callable[[int], int],
        listener: GangListener,
    ) -> None:
        self._held, self._ranks = held, ranks
        self._move_ns, self._listener = move_ns, listener
        self._under_way: dict[SequenceId, None] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def clear(self) -> None:
        """The gang is gone."""
        self._under_way.clear()

    def begin(self, command: MoveKv) -> None:
        """Move KV of a sequence, inside of whatever its instances compute; then go on there."""
        sequence = self._held.get(command.sequence)
        if sequence is None or sequence.row is None:  # over, of which the scheduler had not heard
            self._not_moved(command)
            return
        self._under_way[command.sequence] = None
        self._take_slots(command)
        places = _members(command)
        task = Task(
            members=tuple(sorted({*sequence.instances, *places})),
            work_ns=max(1, self._move_ns(self._moving_tokens(sequence, command))),
            urgent=True,
            started=lambda: None,
            ended=lambda: self._ended(sequence, command, task),
            sequences=(command.sequence,),
            places=places,
        )
        self._ranks.submit(task)

    def _take_slots(self, command: MoveKv) -> None:
        held = self._held.slots.counts(command.sequence)
        there = _slots_there(command)
        more = {it: n - held.get(it, 0) for it, n in there.items() if n > held.get(it, 0)}
        self._held.slots.hold(coming(command.sequence), more)

    def _moving_tokens(self, sequence: Sequence, command: MoveKv) -> int:
        """KV that has to travel."""
        assert sequence.row is not None, "checked before"
        drawn = Span(0, sequence.prompt_tokens + self._ranks.drawn_by(sequence.row))
        now = tokens_on(within((*sequence.shares, *sequence.answer), drawn))
        then = tokens_on(within((*command.shares, *command.answer), drawn))
        return sum(max(0, n - now.get(it, 0)) for it, n in then.items())

    def _ended(self, sequence: Sequence, command: MoveKv, task: Task) -> None:
        number, slots = command.sequence, self._held.slots
        if number not in self._under_way:  # nor is the gang
            return
        del self._under_way[number]
        for index in slots.held_by(coming(number)):
            slots.give_back(coming(number), index)
        if task.done_ns < task.work_ns or self._held.get(number) is not sequence:
            self._not_moved(command)
            return
        there = _slots_there(command)
        left = [it for it in slots.held_by(number) if it not in there]
        slots.change(number, there)
        sequence.shares, sequence.answer = command.shares, command.answer
        sequence.master = command.master
        assert sequence.row is not None, "moved, and no row"
        sequence.row.master = index_of(command.master)
        if sequence.over:
            self._held.tell_freed(number, left)
        else:
            self._listener.tell_later(Moved(sequence=number))

    def _not_moved(self, command: MoveKv) -> None:
        """Those that hold nothing of the sequence have nothing to free."""
        held = self._held.slots.held_by(command.sequence)
        named = map(index_of, decode_slots(command, 0))
        self._held.tell_freed(command.sequence, [it for it in named if it not in held])


def _slots_there(command: MoveKv) -> dict[int, int]:
    """By index of the instance, once it has moved."""
    return {index_of(it): n for it, n in decode_slots(command, 0).items()}


def _members(command: MoveKv) -> tuple[int, ...]:
    """Indices of the instances that take part in decoding then."""
    named = {command.master, *(it.instance for it in (*command.shares, *command.answer))}
    return tuple(sorted(map(index_of, named)))

"""Steps that ranks have been told to run, until the last of their ranks has reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from csps.protocols.gang_client import GangClient
from csps.protocols.group_shape import GroupShape
from csps.protocols.messages import PrefillDone
from csps.protocols.options import parse_option
from csps.protocols.topology import Location
from csps.services.router.elastic_events import ElasticEvents
from csps.services.router.sequences import InstanceRanks, LiveSequence
from csps.services.scheduling.commands import RunStep
from csps.services.scheduling.ids import InstanceId, StepId
from csps.services.telemetry.observer import Observer
from csps.services.telemetry.step_metrics import StepFigures


@dataclass(eq=False, slots=True)
class _RunningStep:
    command: RunStep
    shape: GroupShape
    sequences: list[LiveSequence]
    undone: InstanceRanks
    preempting: bool
    """Some of its instances decoded when it was launched."""
    figures: list[PrefillDone] = field(default_factory=list)
    took_s: dict[InstanceId, float] = field(default_factory=dict)


class Steps:
    """All of them; also what their ranks have measured, which goes to the requests' timings.

    Args:
        measured: is told how long a whole step took, and on what.
        observer: is told what it was made of.
        elastic: is told of those of elastic gangs.
    """

    def __init__(
        self,
        measured: Callable[[RunStep, GroupShape, float], None],
        observer: Observer,
        elastic: ElasticEvents,
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
        """The step was sent to every rank of the gang.

        Args:
            shape: of its group.
        """
        if command.urgent:
            self._observer.preempted(self._standing_still(command))
        undone = InstanceRanks(gang, command.group)
        preempting = gang.role == "elastic" and self._elastic.decoded_on(gang, command.group)
        self._running[command.step] = _RunningStep(command, shape, sequences, undone, preempting)

    def _standing_still(self, urgent: RunStep) -> int:
        """Requests of long steps on instances of an urgent one."""
        return sum(
            len(it.sequences)
            for it in self._running.values()
            if not it.command.urgent and any(member in it.undone for member in urgent.group)
        )

    def rank_done(self, done: PrefillDone, instance: InstanceId) -> float | None:
        """A rank has reported; returns the seconds that its instance took if it was the last one
        of it: computing and exchanging, without the line and without what overtook it."""
        step = self._running.get(done.job_id)
        if step is None:
            return None
        step.figures.append(done)
        took_s = max(step.took_s.get(instance, 0.0), done.compute_s + done.communication_s)
        step.took_s[instance] = took_s
        if not step.undone.reported(instance, done.rank):
            return None
        if not step.undone:
            del self._running[done.job_id]
            for sequence in step.sequences:
                sequence.running.timings.add_figures(step.figures)
            self._observer.step_done(_figures(step))
            if not any(it.cancelled for it in step.figures):
                self._whole(step)
        return took_s

    def _whole(self, step: _RunningStep) -> None:
        took_s = max(step.took_s.values())
        self._measured(step.command, step.shape, took_s)
        if step.undone.gang.role == "elastic":
            self._elastic.step_done(
                step.command,
                step.sequences,
                step.figures,
                took_s=took_s,
                preempting=step.preempting,
            )

    def forget(self, gang: GangClient) -> None:
        """The gang is gone, and its steps with it."""
        self._running = {
            number: step for number, step in self._running.items() if step.undone.gang is not gang
        }


def _figures(step: _RunningStep) -> StepFigures:
    gang = step.undone.gang
    places = [Location.parse(it) for it in gang.locations]
    return StepFigures(
        strategy=parse_option(step.command.strategy).strategy,
        sp=len(step.command.group),
        tokens=sum(piece.length for piece in step.command.pieces),
        ranks=step.figures,
        places=[places[gang.instance_of(rank)] for rank in range(gang.world_size)],
    )

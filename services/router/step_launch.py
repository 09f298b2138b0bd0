"""Steps on their way to the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from csps.protocols.errors import BoundNotMet, ConfigError
from csps.protocols.gang_client import GangClient
from csps.protocols.group_shape import GroupShape
from csps.protocols.topology import Location
from csps.services.router.attached import AttachedGangs
from csps.services.router.cost_book import CostBook
from csps.services.router.elaborate import csa_plan, shown_plan
from csps.services.router.reports import Reports
from csps.services.router.requests import Requests
from csps.services.router.running import Placement
from csps.services.router.sequences import LiveSequence
from csps.services.router.step_messages import kv_shares, prefill_messages
from csps.services.router.steps import Steps
from csps.services.router.trim import trimmed
from csps.services.scheduling.commands import RunStep
from csps.services.scheduling.cost import Bucket, bucket_of
from csps.services.scheduling.events import AnyEvent, StepDone
from csps.services.scheduling.ids import gang_of, index_of

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
        costs: CostBook,
        requests: Requests,
        steps: Steps,
        reports: Reports,
        tell: Callable[[AnyEvent], None],
    ) -> None:
        self._gangs, self._costs = gangs, costs
        self._requests, self._steps = requests, steps
        self._reports, self._tell = reports, tell

    def launch(self, command: RunStep, sequences: list[LiveSequence]) -> None:
        """Send a step, without what nobody wants any more; nothing if its gang is lost."""
        gang = self._gangs.get(gang_of(command.group[0]))
        if gang is None:
            return
        self._refuse_unmet(command, gang, sequences)
        in_place = {it.id: it.command.shares for it in sequences if it.decode is gang}
        rest, idle = trimmed(command, {it.id for it in sequences if it.over}, placed=in_place)
        for instance in idle:
            self._tell(StepDone(step=command.step, instance=instance, took_ns=0))
        if rest.pieces:
            self._send_or_fail(rest, gang, [it for it in sequences if not it.over])

    def _refuse_unmet(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]
    ) -> None:
        """End requests whose bounds this step would break, if they want that."""
        strict = [it for it in sequences if it.running.generation.refuses and not it.over]
        if not strict:
            return
        loss = self._costs.loss(_bucket(command, gang), command.strategy)
        ends_s = (command.ends_ns + self._costs.overhead_ns) / 1e9
        for sequence in strict:
            ttft_ms = (ends_s - sequence.running.marks.submitted) * 1e3
            if sequence.running.generation.objective.met(ttft_ms, loss) is False:
                self._reports.fail(sequence, BoundNotMet(ttft_ms=ttft_ms, loss=loss))

    def _send_or_fail(
        self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]
    ) -> None:
        """What no group can run ends these requests, and not the router with all the others."""
        try:
            self._send(command, gang, sequences)
        except ConfigError as error:
            _log.exception("step %d cannot be run", command.step)
            for sequence in sequences:
                self._reports.fail(sequence, error)
            for instance in command.group:
                self._tell(StepDone(step=command.step, instance=instance, took_ns=0))

    def _send(self, command: RunStep, gang: GangClient, sequences: list[LiveSequence]) -> None:
        """Nothing in here may await."""
        csa = csa_plan(command, sequences[0].running.generation, gang)
        for rank, message in enumerate(prefill_messages(command, sequences, gang, csa)):
            gang.notify(rank, "prefill", message)
        bucket = _bucket(command, gang)
        self._steps.launched(command, gang, sequences, bucket.shape)
        for piece, sequence in zip(command.pieces, sequences, strict=True):
            running = sequence.running
            if piece.start == sequence.command.cached:
                running.placement = _shown(command, sequence)
                why = self._costs.why(bucket, command.strategy)
                loss = self._costs.loss(bucket, command.strategy)
                running.plan = shown_plan(command, running.generation, csa, why, loss)
                self._requests.launched(running)
            running.expect_first_token(command.ends_ns, self._costs.overhead_ns)


def _shown(command: RunStep, sequence: LiveSequence) -> Placement:
    reserved = sequence.command
    return Placement(
        group=tuple(map(index_of, command.group)),
        bounds=command.bounds,
        shares=kv_shares(reserved.shares),
        master=index_of(reserved.master),
        batched_with=len(command.pieces) - 1,
    )


def _bucket(command: RunStep, gang: GangClient) -> Bucket:
    """Of the cost table, that the step's strategy was looked up in."""
    places = [Location.parse(gang.locations[index_of(it)]) for it in command.group]
    history = max(it.start for it in command.pieces)
    return bucket_of(command.cls, GroupShape.of(places, gang.tp), history, command.bounds[-1])

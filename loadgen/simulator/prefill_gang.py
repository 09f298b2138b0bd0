"""Transfers of KV that take turns at the instances that receive it, as on the ranks.

A prefill gang on modelled time: steps in order, and the KV that leaves while they compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from csps.loadgen.simulator.kv_slots import SimulatedPrefixCache, Slots
from csps.loadgen.simulator.step_order import SimulatedStep
from csps.loadgen.simulator.timeline import Link
from csps.protocols.core.placement import Span
from csps.protocols.gang.receiving_backends import ChunkTransfer, ReceivingBackends
from csps.services.scheduling.deciding.step_layout import rows_of, slots_of, span_of
from csps.services.scheduling.events.commands import PlacedSlice, RunStep
from csps.services.scheduling.events.events import InstanceId, SequenceId, StepId, index_of
from csps.services.scheduling.events.slices import own


class ReceivingSlots:
    """The backends of all instances that receive from one gang.

    Args:
        backends: of each instance; None: as many as there are transfers.
    """

    def __init__(self, backends: int | None) -> None:
        self._backends = backends
        self._instances: dict[InstanceId, ReceivingBackends] = {}
        self._waiting: dict[tuple[InstanceId, ChunkTransfer], Callable[[], None]] = {}

    @property
    def limited(self) -> bool:
        """Transfers may have to wait."""
        return self._backends is not None

    def request(
        self, instance: InstanceId, transfer: ChunkTransfer, begin: Callable[[], None]
    ) -> None:
        """Begin when its turn comes."""
        if self._backends is None:
            return begin()
        if instance not in self._instances:
            self._instances[instance] = ReceivingBackends(self._backends)
        self._waiting[instance, transfer] = begin
        return self._begin(instance, self._instances[instance].handshake(transfer))

    def end(self, instance: InstanceId, transfer: ChunkTransfer) -> None:
        """It is over, or nobody wants it any more."""
        if (backends := self._instances.get(instance)) is not None:
            self._waiting.pop((instance, transfer), None)
            self._begin(instance, backends.received(transfer))

    def release(self, sequence: SequenceId, instance: InstanceId) -> None:
        """All KV of a sequence has landed there, or nobody wants it any more."""
        if (backends := self._instances.get(instance)) is None:
            return
        # Nobody would say that these may begin: whoever receives does not want them.
        unblocked = [self._waiting.pop((instance, it)) for it in backends.waiting_of(sequence)]
        self._begin(instance, backends.release(sequence))
        for begin in unblocked:
            begin()

    def discard(self, sequence: SequenceId) -> None:
        """Nobody wants it, wherever it was to go."""
        for instance in list(self._instances):
            self.release(sequence, instance)

    def check_idle(self) -> None:
        """Assert that every backend has come back."""
        assert not self._waiting, "transfers that never begin"
        for backends in self._instances.values():
            backends.check_integrity()
            assert backends.free == backends.total, "a backend was lost"

    def _begin(self, instance: InstanceId, granted: Iterable[ChunkTransfer]) -> None:
        for transfer in granted:
            self._waiting.pop((instance, transfer))()


class PrefillListener(Protocol):
    """Callbacks at simulated times."""

    def started(self, step: RunStep) -> None:
        """A step has begun to compute."""

    def computed(self, step: RunStep) -> None:
        """All of a step is computed: tokens can be drawn."""

    def arrived(self, sequence: SequenceId, instance: InstanceId, tokens: int) -> None:
        """KV of a sequence has arrived at a decode instance."""

    def step_done(self, step: StepId, instance: InstanceId, took_ns: int) -> None:
        """An instance has computed its part, sent its KV and freed it."""


class Order(Protocol):
    """Who computes what next (`StepOrder`)."""

    def submit(self, task: SimulatedStep) -> None:
        """Put a step in line."""

    def cancel_step(self, task: SimulatedStep) -> None:
        """End a step that nobody wants any more."""


Route = Callable[[InstanceId, InstanceId], "Link | None"]
"""The link from a prefill to a decode instance; None takes no time."""


@dataclass(eq=False, slots=True)
class _Flow:
    """KV of a step that takes one link to one decode instance."""

    link: Link | None
    destination: InstanceId
    tokens: dict[SequenceId, int] = field(default_factory=dict)
    sources: dict[InstanceId, None] = field(default_factory=dict)
    missing: int = 0
    """Parts that have not arrived: all layers but the last, and the last."""
    due: list[int] = field(default_factory=list)
    """Parts in bytes that are computed, and wait for the flow's turn."""
    transfer: ChunkTransfer | None = None
    """What the flow is to the instance that receives it, where it has to wait for its turn."""
    begun: bool = False


@dataclass(eq=False, slots=True)
class _StepRun:
    """A step from the command until all its instances are done."""

    step: RunStep
    flows: list[_Flow]
    unsent: dict[InstanceId, int]
    """Flows that an instance takes part in and that have not arrived."""
    wanted: set[SequenceId]
    task: SimulatedStep | None = None
    computed: bool = False
    ending: bool = False
    """Its end is being dealt with."""


class PrefillGang:
    """One incarnation of a gang.

    Args:
        order: of its steps.
        slots: of its instances.
        work_ns: what a step takes.
        route: links to the decode gang.
        kv_bytes_per_token: of all layers.
        layers: KV of all but the last leaves while a step computes.
        in_place: what is computed has slots where it is decoded, and no others.
        receiving_backends: transfers that a decode instance takes at a time; None: all.
        listener: is told what happens.
    """

    def __init__(
        self,
        *,
        order: Order,
        slots: Slots,
        work_ns: Callable[[RunStep], int],
        route: Route,
        kv_bytes_per_token: int,
        layers: int,
        in_place: bool = False,
        receiving_backends: int | None = None,
        listener: PrefillListener,
    ) -> None:
        self._order, self.slots = order, slots
        self._work_ns, self._route = work_ns, route
        self._kv_bytes_per_token, self._layers = kv_bytes_per_token, layers
        self._in_place, self._listener = in_place, listener
        self._runs: dict[StepId, _StepRun] = {}
        self.receiving_slots = ReceivingSlots(receiving_backends)
        self.prefix_cache = SimulatedPrefixCache(slots)

    @property
    def steps(self) -> int:
        """Not done yet."""
        return len(self._runs)

    def run(
        self, step: RunStep, destinations: Mapping[SequenceId, tuple[PlacedSlice, ...]]
    ) -> None:
        """Put a step in line.

        Args:
            step: the scheduler's command.
            destinations: where the KV of each sequence goes.
        """
        if not self._in_place:
            assert all(map(self.prefix_cache.has, step.history)), "reuses what is not kept"
            slots = dict.fromkeys(step.group, 0) | slots_of(step, step.history)
            self.slots.take(("step", step.step_id), {index_of(it): n for it, n in slots.items()})
        flows = list(_flows(step, destinations, self._route, single=self.receiving_slots.limited))
        taking_part = Counter(source for flow in flows for source in flow.sources)
        run = _StepRun(
            step=step,
            flows=flows,
            unsent={instance: taking_part[instance] for instance in step.group},
            wanted={chunk.sequence_id for chunk in step.chunks},
        )
        self._runs[step.step_id] = run
        run.task = SimulatedStep(
            members=tuple(map(index_of, step.group)),
            work_ns=self._work_ns(step),
            high_priority=step.high_priority,
            started=lambda: self._started(run),
            ended=lambda: self._ended(run),
            sequences=tuple(dict.fromkeys(chunk.sequence_id for chunk in step.chunks)),
        )
        self._order.submit(run.task)

    def cancel(self, sequence: SequenceId) -> None:
        """A step ends when none of its sequences is wanted any more. Until then the rows of the
        others stay where they are, so that it takes as long as ever."""
        self.receiving_slots.discard(sequence)
        for run in list(self._runs.values()):
            run.wanted.discard(sequence)
            if not run.wanted and not run.computed and run.task is not None:
                self._order.cancel_step(run.task)

    def _started(self, run: _StepRun) -> None:
        self._listener.started(run.step)
        for flow in list(run.flows):
            if self._layers > 1:
                flow.due.append(self._size(flow) * (self._layers - 1) // self._layers)
            self._request_slot(run, flow)

    def _request_slot(self, run: _StepRun, flow: _Flow) -> None:
        """Let the flow begin when its turn comes."""

        def begin() -> None:
            flow.begun = True
            self._send(run, flow)

        if flow.transfer is None:
            begin()
        else:
            self.receiving_slots.request(flow.destination, flow.transfer, begin)

    def _ended(self, run: _StepRun) -> None:
        run.computed = True
        if not run.wanted:
            for flow in run.flows:
                self._end(flow)
            run.flows.clear()
            run.unsent = dict.fromkeys(run.step.group, 0)
        else:
            self._listener.computed(run.step)
        run.ending = True
        for flow in run.flows:
            size = self._size(flow)
            flow.due.append(size - size * (self._layers - 1) // self._layers)
        for flow in list(run.flows):
            self._send(run, flow)
        run.ending = False
        for instance, flows in list(run.unsent.items()):
            if not flows:
                self._instance_done(run, instance)

    def _size(self, flow: _Flow) -> int:
        return sum(flow.tokens.values()) * self._kv_bytes_per_token

    def _send(self, run: _StepRun, flow: _Flow) -> None:
        """What is computed and not sent, if it is the flow's turn."""
        if not (flow.begun and flow.due):
            return
        size = sum(flow.due)
        flow.due.clear()
        flow.missing += 1
        if flow.link is None:
            self._arrived(run, flow)
        else:
            flow.link.send(size, lambda: self._arrived(run, flow))

    def _arrived(self, run: _StepRun, flow: _Flow) -> None:
        flow.missing -= 1
        if flow.missing or flow.due or not run.computed or flow not in run.flows:
            return
        self._end(flow)
        for sequence, tokens in flow.tokens.items():
            self._listener.arrived(sequence, flow.destination, tokens)
        for instance in flow.sources:
            run.unsent[instance] -= 1
            # While the step's end is dealt with, `_ended` looks for those that have nothing left.
            if not run.unsent[instance] and not run.ending:
                self._instance_done(run, instance)

    def _end(self, flow: _Flow) -> None:
        if flow.transfer is not None:
            self.receiving_slots.end(flow.destination, flow.transfer)

    def _instance_done(self, run: _StepRun, instance: InstanceId) -> None:
        del run.unsent[instance]
        step = run.step.step_id
        if not self._in_place:
            self.slots.release(("step", step), index_of(instance))
        if not run.unsent:
            self._retain(run)
        assert run.task is not None
        took_ns = run.task.work_ns + run.task.slowdown_ns
        self._listener.step_done(step, instance, took_ns if run.wanted else 0)
        if not run.unsent:
            del self._runs[step]

    def _retain(self, run: _StepRun) -> None:
        for chunk, rows in zip(run.step.chunks, rows_of(run.step), strict=True):
            if chunk.retain and chunk.sequence_id in run.wanted:
                self.prefix_cache.add(chunk.sequence_id, chunk.placement or rows)


def _flows(
    step: RunStep,
    destinations: Mapping[SequenceId, tuple[PlacedSlice, ...]],
    route: Route,
    *,
    single: bool,
) -> Iterator[_Flow]:
    """The step's KV by link and decode instance, in order of pieces, shares and group.

    Args:
        single: each sequence and each instance that sends it apart, because they take turns.
    """
    flows: dict[tuple[object, ...], _Flow] = {}
    for chunk, rows, history in zip(step.chunks, rows_of(step), step.history, strict=True):
        begins = all(kv_slice.source for kv_slice in history)
        rows = (*rows, *history) if begins else rows  # what others have computed is sent as well
        for share in own(destinations.get(chunk.sequence_id, ())):  # the rest is there already
            span = span_of(chunk)
            wanted = share.span.intersection(Span(0, span.stop) if begins else span)
            for row in rows:
                tokens = row.span.intersection(wanted).length
                if not tokens:
                    continue
                link = route(row.instance, share.instance)
                key: tuple[object, ...] = (link, share.instance)
                flow = _Flow(link, share.instance)
                if single:
                    key = (*key, chunk.sequence_id, row.instance)
                    flow.transfer = ChunkTransfer(chunk.sequence_id, step.step_id, row.instance)
                flow = flows.setdefault(key, flow)
                flow.tokens[chunk.sequence_id] = flow.tokens.get(chunk.sequence_id, 0) + tokens
                flow.sources[row.instance] = None
    yield from flows.values()

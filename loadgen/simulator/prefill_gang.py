"""A prefill gang on modeled time: steps in order, and the KV that is sent while they compute.

Decode instances limit the transfers that they receive at a time, as on real ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from csps.loadgen.simulator.exchanges import StepPricer
from csps.loadgen.simulator.kv_slots import SimulatedPrefixCache, Slots
from csps.loadgen.simulator.step_order import SimulatedStep
from csps.loadgen.simulator.timeline import Link
from csps.protocols.attention.plan import RINGS, parse_option
from csps.protocols.core.placement import KvSlice, Span, own
from csps.protocols.gang.receiving_backends import ChunkTransfer, ReceivingBackends
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.deciding.step_layout import rows_of, slots_of
from csps.services.scheduling.events.events import InstanceId, SequenceId, StepId, index_of


class ReceivingSlots:
    """Transfer slots of all instances that receive from one gang.

    Args:
        backends: transfer slots of each instance. None: no limit.
    """

    def __init__(self, backends: int | None) -> None:
        self._backends = backends
        self._instances: dict[InstanceId, ReceivingBackends] = {}
        self._waiting: dict[tuple[InstanceId, ChunkTransfer], Callable[[], None]] = {}

    @property
    def limited(self) -> bool:
        """Return whether transfers may have to wait."""
        return self._backends is not None

    def request(
        self, instance: InstanceId, transfer: ChunkTransfer, begin: Callable[[], None]
    ) -> None:
        """Call `begin` when the transfer has a slot."""
        if self._backends is None:
            return begin()
        if instance not in self._instances:
            self._instances[instance] = ReceivingBackends(self._backends)
        self._waiting[instance, transfer] = begin
        return self._begin(instance, self._instances[instance].handshake(transfer))

    def end(self, instance: InstanceId, transfer: ChunkTransfer) -> None:
        """End a transfer that is over or cancelled."""
        if (backends := self._instances.get(instance)) is not None:
            self._waiting.pop((instance, transfer), None)
            self._begin(instance, backends.received(transfer))

    def release(self, sequence: SequenceId, instance: InstanceId) -> None:
        """Free the slot of a sequence whose KV was received or is no longer needed."""
        if (backends := self._instances.get(instance)) is None:
            return
        # The receiver grants no slot for a sequence that it has dropped, so these begin at once.
        unblocked = [
            self._waiting.pop((instance, source)) for source in backends.waiting_of(sequence)
        ]
        self._begin(instance, backends.release(sequence))
        for begin in unblocked:
            begin()

    def discard(self, sequence: SequenceId) -> None:
        """Free the slots of a cancelled sequence on all instances."""
        for instance in list(self._instances):
            self.release(sequence, instance)

    def check_idle(self) -> None:
        """Assert that every transfer slot is free."""
        assert not self._waiting, "transfers are still waiting for a slot"
        for backends in self._instances.values():
            backends.check_integrity()
            assert backends.free == backends.total, (
                f"{backends.total - backends.free} transfer slots were not freed"
            )

    def _begin(self, instance: InstanceId, granted: Iterable[ChunkTransfer]) -> None:
        for transfer in granted:
            self._waiting.pop((instance, transfer))()


class PrefillListener(Protocol):
    """Callbacks at simulated times."""

    def started(self, step: PrefillStep) -> None:
        """Report that a step began to compute."""

    def computed(self, step: PrefillStep) -> None:
        """Report that a step is computed: tokens can be sampled."""

    def arrived(self, sequence: SequenceId, instance: InstanceId, tokens: int) -> None:
        """Report that KV of a sequence has arrived at a decode instance."""

    def step_done(self, step: StepId, instance: InstanceId, took_ns: int) -> None:
        """Report that an instance has computed its part, sent its KV and freed it."""


class Order(Protocol):
    """The order in which steps are computed: `StepOrder` or `SequencedRanks`."""

    def submit(self, task: SimulatedStep) -> None:
        """Queue a step."""

    def cancel_step(self, task: SimulatedStep) -> None:
        """End a cancelled step."""


Route = Callable[[InstanceId, InstanceId], "Link | None"]
"""Function that returns the link from a prefill to a decode instance. None: no transfer time."""


@dataclass(eq=False, slots=True)
class _Flow:
    """KV of a step that takes one link to one decode instance."""

    link: Link | None
    destination: InstanceId
    tokens: dict[SequenceId, int] = field(default_factory=dict)
    sources: dict[InstanceId, None] = field(default_factory=dict)
    missing: int = 0
    """Sends that have not arrived."""
    due: list[int] = field(default_factory=list)
    """Sizes in bytes that are computed and wait for the flow to begin."""
    transfer: ChunkTransfer | None = None
    """The transfer that the receiving instance grants a slot to, if slots are limited."""
    begun: bool = False


@dataclass(eq=False, slots=True)
class _StepRun:
    """A step from its command until all its instances are done."""

    step: PrefillStep
    flows: list[_Flow]
    unsent: dict[InstanceId, int]
    """Flows that an instance takes part in and that have not arrived."""
    wanted: set[SequenceId]
    task: SimulatedStep | None = None
    computed: bool = False
    ending: bool = False
    """True if `_ended` is running for this step."""


class PrefillGang:
    """One incarnation of a prefill gang.

    Args:
        order: the order of its steps.
        slots: slots of its instances.
        times: prices steps.
        route: returns the link to a decode instance.
        kv_bytes_per_token: size in all layers.
        layers: layers; KV of all but the last one is sent while a step computes.
        in_place: whether KV is computed in the slots where it is decoded.
        receiving_backends: transfers that a decode instance receives at a time; None: no limit.
        listener: is notified of what happens.
    """

    def __init__(
        self,
        *,
        order: Order,
        slots: Slots,
        times: StepPricer,
        route: Route,
        kv_bytes_per_token: int,
        layers: int,
        in_place: bool = False,
        receiving_backends: int | None = None,
        listener: PrefillListener,
    ) -> None:
        self._order, self.slots = order, slots
        self._times, self._route = times, route
        self._kv_bytes_per_token, self._layers = kv_bytes_per_token, layers
        self._in_place, self._listener = in_place, listener
        self._runs: dict[StepId, _StepRun] = {}
        self.receiving_slots = ReceivingSlots(receiving_backends)
        self.prefix_cache = SimulatedPrefixCache(slots)

    @property
    def steps(self) -> tuple[StepId, ...]:
        """Return the steps that are not done."""
        return tuple(self._runs)

    def run(
        self, step: PrefillStep, destinations: Mapping[SequenceId, tuple[KvSlice, ...]]
    ) -> None:
        """Queue a step.

        Args:
            step: step of the scheduler.
            destinations: where the KV of each sequence goes.
        """
        if not self._in_place:
            assert all(self.prefix_cache.has(chunk.history) for chunk in step.chunks), (
                f"step {step.step_id} reuses KV that is not in the prefix cache"
            )
            slots = dict.fromkeys(step.group, 0) | slots_of(
                step, [chunk.history for chunk in step.chunks]
            )
            self.slots.take(
                ("step", step.step_id), {index_of(instance): n for instance, n in slots.items()}
            )
        flows = list(_flows(step, destinations, self._route, single=self.receiving_slots.limited))
        taking_part = Counter(source for flow in flows for source in flow.sources)
        run = _StepRun(
            step=step,
            flows=flows,
            unsent={instance: taking_part[instance] for instance in step.group},
            wanted={chunk.sequence_id for chunk in step.chunks},
        )
        self._runs[step.step_id] = run
        time = self._times.of(step)
        run.task = SimulatedStep(
            members=tuple(map(index_of, step.group)),
            work_ns=time.work_ns,
            beside=time.beside,
            after=time.after,
            high_priority=step.high_priority,
            started=lambda: self._started(run),
            ended=lambda: self._ended(run),
            sequences=tuple(dict.fromkeys(chunk.sequence_id for chunk in step.chunks)),
        )
        self._order.submit(run.task)

    def cancel(self, sequence: SequenceId) -> None:
        """Cancel a sequence; a step ends early when all its sequences are cancelled."""
        self.receiving_slots.discard(sequence)
        # Other sequences keep their place in the step, so its time does not change.
        for run in list(self._runs.values()):
            run.wanted.discard(sequence)
            if not run.wanted and not run.computed and run.task is not None:
                self._order.cancel_step(run.task)

    def _started(self, run: _StepRun) -> None:
        self._listener.started(run.step)
        for flow in list(run.flows):
            if self._layers > 1 and not self._circulates(run.step):
                flow.due.append(self._size(flow) * (self._layers - 1) // self._layers)
            self._request_slot(run, flow)

    def _circulates(self, step: PrefillStep) -> bool:
        """Return whether KV passes its keepers anyway: round a ring, in all layers but the last."""
        return self._in_place and parse_option(step.strategy).strategy in RINGS

    def _request_slot(self, run: _StepRun, flow: _Flow) -> None:
        """Let the flow begin when it has a transfer slot."""

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
        """Send what is computed and unsent, if the flow has begun."""
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
            # `_ended` itself finishes instances without flows left.
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
                self.prefix_cache.share(chunk.sequence_id, chunk.history)


def _flows(
    step: PrefillStep,
    destinations: Mapping[SequenceId, tuple[KvSlice, ...]],
    route: Route,
    *,
    single: bool,
) -> Iterator[_Flow]:
    """Yield the step's KV by link and decode instance, in order of chunks, slices and group.

    Args:
        single: separate flows for each sequence and sending instance, because they take slots.
    """
    flows: dict[tuple[object, ...], _Flow] = {}
    for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
        begins = chunk.begins
        rows = (*rows, *chunk.history) if begins else rows  # reused KV is sent as well
        for kv_slice in own(
            destinations.get(chunk.sequence_id, ())
        ):  # reused slices are there already
            span = chunk.span
            wanted = kv_slice.span.intersection(Span(0, span.stop) if begins else span)
            for row in rows:
                tokens = row.span.intersection(wanted).length
                if not tokens:
                    continue
                link = route(row.instance, kv_slice.instance)
                key: tuple[object, ...] = (link, kv_slice.instance)
                flow = _Flow(link, kv_slice.instance)
                if single:
                    key = (*key, chunk.sequence_id, row.instance)
                    flow.transfer = ChunkTransfer(chunk.sequence_id, step.step_id, row.instance)
                flow = flows.setdefault(key, flow)
                flow.tokens[chunk.sequence_id] = flow.tokens.get(chunk.sequence_id, 0) + tokens
                flow.sources[row.instance] = None
    yield from flows.values()

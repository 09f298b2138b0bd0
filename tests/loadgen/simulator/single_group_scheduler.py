"""A scheduler so simple that the simulator can be judged without the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from csps.configurator.costs.latency import (
    DecodeCost,
    LatencyKey,
    LatencyTable,
    LinearDecodeCost,
    StepCost,
)
from csps.loadgen.simulator.cluster import ClusterModel, GangModel, InstanceModel
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import ReserveKv
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.scheduling.events.commands import (
    AnyCommand,
    Cancel,
    Reserve,
    Restart,
    RunStep,
    SetGroup,
)
from csps.services.scheduling.events.events import (
    AnyEvent,
    Finished,
    FirstToken,
    GangDown,
    GangUp,
    KvReceived,
    LinkUp,
    RequestCancelled,
    Submitted,
    WireError,
    instance_id,
)


def cluster(
    *,
    instances: int = 4,
    decode: int = 1,
    step: StepCost | None = None,
    regime: LinearDecodeCost | None = None,
    kv_slots: int = 1 << 40,
    **options: Any,
) -> ClusterModel:
    """Prefill on one server, decode on another; one nanosecond a token unless said otherwise."""
    cost = step or StepCost.of_seconds(0.0, 1e-9, 0.0, 0.0)
    regime = regime or LinearDecodeCost.of_seconds(1e-6, 0.0, 0.0)
    decode_cost = DecodeCost(small=regime, large=regime, tipping_batch=1)
    return ClusterModel(
        name="test",
        prefill=_gang(instances, "0-0", kv_slots),
        decode=_gang(decode, "0-1", kv_slots),
        table=LatencyTable(
            name="test",
            exact="ring_kv",
            # The same for all sizes: what is between two sizes is interpolated.
            steps=tuple(
                (LatencyKey(strategy="ring_kv", sp=sp), cost) for sp in range(1, instances + 1)
            ),
            decode=tuple(
                (LatencyKey(strategy="decode", sp=sp), decode_cost) for sp in range(1, decode + 1)
            ),
        ),
        **options,
    )


def _gang(instances: int, server: str, kv_slots: int) -> GangModel:
    return GangModel(
        instances=tuple(
            InstanceModel(location=f"{server}-{gpu}", kv_slots=kv_slots) for gpu in range(instances)
        ),
        tp=1,
    )


class SingleGroupScheduler:
    """Sends every request at once to one group of instances, which keep the order.

    Args:
        sp: instances of the group, the first ones.
        choose: another group for a request: its first instance and its size.
        high_priority: returns whether a request's step has high priority.
    """

    def __init__(
        self,
        sp: int = 1,
        *,
        choose: Callable[[Submitted], tuple[int, int]] | None = None,
        high_priority: Callable[[Submitted], bool] = lambda _: False,
    ) -> None:
        self._choose = choose or (lambda _: (0, sp))
        self._high_priority = high_priority
        self._prefill = self._decode = self._decoders = 0
        self._open: dict[int, Submitted] = {}
        self._sequence_of: dict[int, int] = {}
        self._missing: dict[int, set[int]] = {}
        self._first: set[int] = set()
        self._joined: set[int] = set()
        self._numbers = 0

    def handle(
        self, events: Sequence[AnyEvent], now_ns: int
    ) -> tuple[Sequence[AnyCommand], int | None]:
        """Start what can start, join sequences whose KV was received, and restart those of a dead
        gang.
        """
        commands: list[AnyCommand] = []
        for event in events:
            if isinstance(event, GangUp):
                self._gang_up(event)
                commands += self._start_waiting() if event.may_prefill is event.may_decode else []
            elif isinstance(event, LinkUp):
                commands += self._start_waiting()
            elif isinstance(event, Submitted):
                self._open[event.request_id] = event
                commands += self._start(event.request_id) if self._prefill and self._decode else []
            elif isinstance(event, FirstToken):
                self._first.add(event.sequence_id)
                commands += self._join(event.sequence_id)
            elif isinstance(event, KvReceived):
                self._missing[event.sequence_id].discard(event.instance)
                commands += self._join(event.sequence_id)
            elif isinstance(event, Finished):
                commands += self._finished(event.sequence_id)
            elif isinstance(event, RequestCancelled):
                commands.append(self._cancel(event.request_id))
                del self._open[event.request_id]
            elif isinstance(event, GangDown):
                commands += self._lost(event.gang)
        return commands, None

    def _gang_up(self, event: GangUp) -> None:
        if event.may_prefill:
            self._prefill = event.gang
        if event.may_decode:
            self._decode, self._decoders = event.gang, len(event.instances)

    def _start_waiting(self) -> list[AnyCommand]:
        waiting = [request for request in self._open if request not in self._sequence_of]
        return [command for request in waiting for command in self._start(request)]

    def _cancel(self, request: int) -> Cancel:
        gangs = tuple(dict.fromkeys(gang for gang in (self._prefill, self._decode) if gang))
        return Cancel(sequence_id=self._sequence_of.pop(request), gangs=gangs)

    def _finished(self, sequence: int) -> list[AnyCommand]:
        request = next(request for request, of in self._sequence_of.items() if of == sequence)
        del self._open[request]
        cancel = self._cancel(request)
        return [] if sequence in self._joined else [cancel]

    def _lost(self, gang: int) -> list[AnyCommand]:
        prefill = gang == self._prefill != self._decode
        if gang == self._prefill:
            self._prefill = 0
        if gang == self._decode:
            self._decode = 0
        commands: list[AnyCommand] = []
        for request, sequence in list(self._sequence_of.items()):
            if not prefill or sequence not in self._joined:
                error = WireError("GangLost", "for tests")
                commands.append(Restart(request_id=request, sequence_id=sequence, error=error))
                commands.append(self._cancel(request))
        return commands

    def _start(self, request: int) -> list[AnyCommand]:
        submitted = self._open[request]
        first, size = self._choose(submitted)
        tokens = submitted.prompt_tokens
        self._numbers += 1
        number = self._sequence_of[request] = self._numbers
        cuts = enumerate(pairwise(_cut(tokens, self._decoders)))
        slices = tuple(
            KvSlice(instance_id(self._decode, index), start, stop)
            for index, (start, stop) in cuts
            if stop > start
        )
        self._missing[number] = {kv_slice.instance for kv_slice in slices}
        return [
            Reserve(
                request_id=request,
                message=ReserveKv(
                    sequence_id=number,
                    prompt_tokens=tokens,
                    output_tokens=submitted.output_tokens,
                    slices=slices,
                    master=instance_id(self._decode, 0),
                ),
                deadline_ns=1 << 60,
            ),
            RunStep(
                step=PrefillStep(
                    step_id=number,
                    group=tuple(instance_id(self._prefill, first + index) for index in range(size)),
                    bounds=tuple(_cut(tokens, size)),
                    chunks=(PrefillChunk(number, 0, tokens),),
                    strategy="ring_kv",
                    high_priority=self._high_priority(submitted),
                ),
                cls=submitted.cls,
                ends_ns=0,
            ),
        ]

    def _join(self, sequence: int) -> list[AnyCommand]:
        if sequence not in self._first or self._missing[sequence]:
            return []
        self._joined.add(sequence)
        return [SetGroup(gang=self._decode, joined=(sequence,))]


def _cut(tokens: int, parts: int) -> list[int]:
    return [tokens * part // parts for part in range(parts + 1)]

"""What a server does now, as data for people: `/v1/csps/state`, `/ui` and `csps top`.

A snapshot is made at most once in `PERIOD_S`, however many look, and is bounded: of many requests
it has the first ones and the number of the others. It has sizes, times and client ids, and neither
text nor tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from csps.protocols.core.placement import KvSlice, tokens_on
from csps.services.requests.request_handle import ElasticEvent, RequestHandle
from csps.services.router.live_requests import LiveRequests
from csps.services.router.rank_notifications import RunningSteps
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.state.state import Gang, Instance, Request, Sequence, Step

PERIOD_S = 0.5
MOST_RUNNING = 256
MOST_WAITING = 64
MOST_STEPS = 8
"""Limit of an instance's steps in a snapshot."""
MOST_CHUNKS = 8
MOST_SLICES = 64
"""Limit of the instances that are named for one request."""
MS = 1e6


class StateSnapshots:
    """Makes snapshots.

    Args:
        slo: function that returns how often each objective was met and missed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: LiveRequests,
        steps: RunningSteps,
        slo: Callable[[], Mapping[str, tuple[int, int]]],
    ) -> None:
        self._scheduler, self._requests, self._steps = scheduler, requests, steps
        self._slo = slo
        self._made_s = float("-inf")
        self._encoded = b""

    def encoded(self) -> bytes:
        """Return the latest snapshot as JSON; a new one if that is old."""
        now_s = time.monotonic()
        if now_s - self._made_s >= PERIOD_S:
            self._encoded = msgspec.json.encode(self.snapshot())
            self._made_s = now_s
        return self._encoded

    def expire(self) -> None:
        """Make a new snapshot for whoever looks next."""
        self._made_s = float("-inf")

    def snapshot(self) -> dict[str, Any]:
        """Return the state now."""
        now_ns = time.monotonic_ns()
        look = self._scheduler.look(MOST_WAITING)
        names = _names(look.gangs)
        view = _View(now_ns, names, self._requests, self._steps)
        return {
            "time_s": time.time(),
            "policy": self._scheduler.policy_name,
            "running": look.running,
            "waiting": look.waiting,
            "instances": [
                view.instance(gang, instance) for gang in look.gangs for instance in gang.instances
            ],
            "requests": [
                view.running(sequence) for sequence in islice(look.sequences, MOST_RUNNING)
            ],
            "queue": [view.queued(request, wait_ns) for request, wait_ns in look.queue],
            "events": [view.event(handle, event) for handle, event in self._requests.elastic],
            "slo": {
                name: {"met": met, "missed": missed} for name, (met, missed) in self._slo().items()
            },
        }


@dataclass(frozen=True)
class _View:
    """What turns the scheduler's objects into data."""

    now_ns: int
    names: Mapping[InstanceId, str]
    requests: LiveRequests
    steps: RunningSteps

    def instance(self, gang: Gang, instance: Instance) -> dict[str, Any]:
        return {
            "name": self.names[instance.id],
            "role": gang.role,
            "gang": gang.id,
            "ranks": gang.tp,
            "kv_slots": instance.capacity,
            "kv_used": instance.used - instance.reclaimable,
            "kv_cached": instance.reclaimable,
            "window_slots": instance.window_slots,
            "window_used": instance.window_used,
            "decoding": instance.mastered,
            "free_in_ms": max(0.0, (instance.free_at_ns - self.now_ns) / MS),
            "steps": [self.step(step) for step in islice(instance.steps.values(), MOST_STEPS)],
        }

    def step(self, step: Step) -> dict[str, Any]:
        command = step.command or self.steps.command_of(step.id)
        return {
            "id": step.id,
            "strategy": None if command is None else command.step.strategy,
            "high_priority": step.high_priority,
            "sent": not step.unsent,
            "predicted_ms": step.predicted_ns / MS,
            "age_ms": max(0.0, (self.now_ns - step.launched_ns) / MS),
            "chunks": self._chunks(step, command),
        }

    def _chunks(self, step: Step, command: RunStep | None) -> list[dict[str, Any]]:
        ids = {sequence.id: self.id_of(sequence.request.id) for sequence in step.sequences}
        if command is None:
            return [{"request": name} for name in islice(ids.values(), MOST_CHUNKS)]
        return [
            {
                "request": ids.get(chunk.sequence_id, "?"),
                "start": chunk.start,
                "length": chunk.length,
            }
            for chunk in command.step.chunks[:MOST_CHUNKS]
        ]

    def running(self, sequence: Sequence) -> dict[str, Any]:
        handle = self.requests.get(sequence.request.id)
        return {
            "id": self.id_of(sequence.request.id),
            "state": "prefill" if handle is None else handle.state,
            "prompt": sum(kv_slice.span.length for kv_slice in sequence.slices)
            if handle is None
            else int(handle.spec.prompt.size),
            "cached": sequence.cached,
            "computed": 0 if handle is None else handle.computed_tokens,
            "generated": sequence.request.generated_tokens
            if handle is None
            else handle.timings.tokens,
            "age_ms": (self.now_ns - sequence.request.submitted_ns) / MS,
            "master": self.names.get(sequence.master.id, "?"),
            "kv": self.kv(sequence.slices),
            "receiving": {
                self.names.get(instance, "?"): tokens
                for instance, tokens in islice(sequence.unreceived.items(), MOST_SLICES)
            },
            "moving": sequence.is_moving,
        }

    def kv(self, slices: Iterable[KvSlice]) -> dict[str, int]:
        return {
            self.names.get(instance, "?"): tokens
            for instance, tokens in islice(tokens_on(slices).items(), MOST_SLICES)
        }

    def queued(self, request: Request, wait_ns: int) -> dict[str, Any]:
        latest_ns = request.latest_start_ns
        return {
            "id": self.id_of(request.id),
            "prompt": request.prompt_tokens,
            "class": "short" if request.priority == "high" else "long",
            "priority": request.client_priority,
            "waited_ms": (self.now_ns - request.submitted_ns) / MS,
            "slack_ms": None if latest_ns is None else (latest_ns - self.now_ns) / MS,
            "first_token_in_ms": (wait_ns + request.predicted_ns) / MS,
        }

    def event(self, handle: RequestHandle, event: ElasticEvent) -> dict[str, Any]:
        return {
            "kind": event.kind,
            "request": handle.spec.client_request_id,
            "age_ms": max(0.0, self.now_ns / MS - event.ended * 1e3),
            "ms": event.seconds * 1e3,
            "tokens": event.tokens,
        }

    def id_of(self, request_id: int) -> str:
        """Return the client's id, under which its trace is found."""
        handle = self.requests.get(request_id)
        return "?" if handle is None else handle.spec.client_request_id


def _names(gangs: Iterable[Gang]) -> dict[InstanceId, str]:
    """Name instances by role and index, and by gang where a role has several."""
    by_role: dict[str, list[Gang]] = {}
    for gang in gangs:
        by_role.setdefault(gang.role, []).append(gang)
    return {
        instance.id: f"{role} {index}" if len(of_role) == 1 else f"{role} {number}.{index}"
        for role, of_role in by_role.items()
        for number, gang in enumerate(of_role)
        for index, instance in enumerate(gang.instances)
    }

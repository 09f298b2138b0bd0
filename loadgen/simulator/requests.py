"""Requests as the simulator sees them, and what becomes of them.

Simulated requests as the records that load tests write.

What simulated gangs tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from csps.loadgen.results.record import RequestRecord, Status
from csps.loadgen.simulator.decode_batch import IterationLog, SimulatedMember
from csps.loadgen.workloads.request import HASH_BLOCK_TOKENS, WorkloadRequest
from csps.services.scheduling.events.commands import Evict, PlacedSlice
from csps.services.scheduling.events.events import (
    AnyEvent,
    InstanceId,
    RequestId,
    SequenceId,
    index_of,
)
from csps.services.scheduling.events.slices import own, tokens_on


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request that will come."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    """Tokens that it will draw: nobody knows before it has."""
    max_tokens: int | None = None
    """What it asks for, and all that the scheduler is told; None is `output_tokens`."""
    cls: str = "exact"
    hashes: tuple[bytes, ...] = ()
    """Of the prompt's blocks; none if it begins like no other one."""

    @property
    def asked_tokens(self) -> int:
        """Tokens that the scheduler has to expect."""
        return self.output_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True, slots=True)
class IterationEnds:
    """Times of tokens: the ends of iterations [start, stop) of a batch, or of a row's own."""

    log: IterationLog | SimulatedMember
    start: int
    stop: int


@dataclass(slots=True)
class RequestOutcome:
    """What has become of a request. Times are in nanoseconds, -1 is never."""

    request: RequestId
    arrival: Arrival
    started_ns: int = -1
    """Its first step began to compute."""
    first_token_ns: int = -1
    ended_ns: int = -1
    generated_tokens: int = 0
    cached: int = 0
    """Tokens of the prompt that the last attempt found computed."""
    sequences: int = 0
    """Attempts."""
    error: str = ""
    """Name of the error that it ended with; empty if it has its whole answer."""

    stamps: list[int | IterationEnds] = field(default_factory=list)
    """When tokens were drawn: by a prefill, or by iterations."""

    @property
    def token_ns(self) -> list[int]:
        """When each token was drawn."""
        times: list[int] = []
        for stamp in self.stamps:
            times += (
                [stamp] if isinstance(stamp, int) else stamp.log.ends_ns(stamp.start, stamp.stop)
            )
        return times

    @property
    def ttft_ns(self) -> int:
        """Time to the first token."""
        return self.first_token_ns - self.arrival.at_ns


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """One attempt at a request on the ranks."""

    sequence: SequenceId
    request: RequestId
    prompt_tokens: int
    slices: tuple[PlacedSlice, ...]
    master: InstanceId
    answer: tuple[PlacedSlice, ...]
    """Who keeps the KV of its tokens to come, if not the master."""
    before: int
    """Tokens that earlier sequences have drawn."""
    tokens: int
    """To be drawn by this one."""
    cached: int = 0
    """Tokens of the prompt that nothing computes."""
    retain: bool = False
    """Nothing is freed at its end until the gang is told what to keep."""
    releases: list[Evict] = field(default_factory=list)
    """Of what is kept, told before that was."""
    missing: dict[InstanceId, int] = field(default_factory=dict)
    """KV that has not arrived, by decode instance."""
    member: SimulatedMember | None = None
    """In the decode batch."""
    over: bool = False
    """Serves its request no more."""

    @property
    def instances(self) -> tuple[int, ...]:
        """Numbers of those that take part in decoding it."""
        named = {self.master, *(kv_slice.instance for kv_slice in (*self.slices, *self.answer))}
        return tuple(sorted(map(index_of, named)))

    @property
    def slots(self) -> dict[InstanceId, int]:
        """Of the prompt, by decode instance; what is reused has its own."""
        return tokens_on(own(self.slices))


QUEUE_PERCENTILES = (50, 99)


def arrivals_of(requests: Sequence[WorkloadRequest]) -> list[Arrival]:
    """Requests of a workload as the simulator takes them: answers of exactly their length."""
    return [
        Arrival(
            at_ns=request.arrival_ns,
            prompt_tokens=request.input_length,
            output_tokens=request.output_length,
            hashes=chained(request.hash_ids[: request.input_length // HASH_BLOCK_TOKENS]),
        )
        for request in requests
    ]


def chained(ids: Sequence[int]) -> tuple[bytes, ...]:
    """Names of whole blocks that name all before them, too."""
    last, found = b"", []
    for identifier in ids:
        last = blake2b(
            last + identifier.to_bytes(16, "little", signed=True), digest_size=16
        ).digest()
        found.append(last)
    return tuple(found)


def records_of(outcomes: Sequence[RequestOutcome]) -> list[RequestRecord]:
    """One record for each request; a chunk is a token, as a server streams them."""
    return [
        RequestRecord(
            scheduled_ns=outcome.arrival.at_ns,
            sent_ns=outcome.arrival.at_ns,
            chunk_ns=tuple(outcome.token_ns),
            finished_ns=outcome.ended_ns,
            input_tokens=outcome.arrival.prompt_tokens,
            output_tokens=outcome.generated_tokens,
            status=_status(outcome),
            error=outcome.error,
        )
        for outcome in outcomes
    ]


def _status(outcome: RequestOutcome) -> Status:
    if not outcome.error:
        return "completed"
    return "cancelled" if outcome.error == "Cancelled" else "failed"


def queue_fields(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """How long requests waited for their first step to begin, in ms."""
    waits = [
        (outcome.started_ns - outcome.arrival.at_ns) / 1e6
        for outcome in outcomes
        if outcome.started_ns >= 0
    ]
    if not waits:
        return {}
    fields = {"mean_queue_ms": math.fsum(waits) / len(waits)}
    fields |= {f"p{p}_queue_ms": float(np.percentile(waits, p)) for p in QUEUE_PERCENTILES}
    return {name: round(value, 6) for name, value in fields.items()}


class GangListener(Protocol):
    """The kernel, as the gangs see it."""

    def post_event(self, event: AnyEvent) -> None:
        """An event for the scheduler, now."""

    def post_rank_event(self, event: AnyEvent) -> None:
        """An event on a rank, of which the scheduler hears when a message has arrived."""

    def started(self, request: RequestId) -> None:
        """A step of the request has begun."""

    def prefilled(self, sequence: SequenceId, request: RequestId) -> None:
        """The first token of a sequence was drawn."""

    def decoded(self, request: RequestId, ends: IterationEnds) -> None:
        """The request has drawn a token at the end of each of these iterations."""

    def finished(self, sequence: SequenceId, request: RequestId) -> None:
        """The last token was drawn."""

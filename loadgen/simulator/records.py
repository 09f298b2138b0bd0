"""Simulated requests as the records that load tests write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from csps.loadgen.results.record import RequestRecord, Status
from csps.loadgen.simulator.requests import Arrival, Outcome
from csps.loadgen.workloads.request import HASH_BLOCK_TOKENS, Request

QUEUE_PERCENTILES = (50, 99)


def arrivals_of(requests: Sequence[Request]) -> list[Arrival]:
    """Requests of a workload as the simulator takes them: answers of exactly their length."""
    return [
        Arrival(
            at_ns=it.arrival_ns,
            prompt_tokens=it.input_length,
            output_tokens=it.output_length,
            hashes=chained(it.hash_ids[: it.input_length // HASH_BLOCK_TOKENS]),
        )
        for it in requests
    ]


def chained(ids: Sequence[int]) -> tuple[bytes, ...]:
    """Names of whole blocks that name all before them, too."""
    last, found = b"", []
    for it in ids:
        last = blake2b(last + it.to_bytes(16, "little", signed=True), digest_size=16).digest()
        found.append(last)
    return tuple(found)


def records_of(outcomes: Sequence[Outcome]) -> list[RequestRecord]:
    """One record for each request; a chunk is a token, as a server streams them."""
    return [
        RequestRecord(
            scheduled_ns=it.arrival.at_ns,
            sent_ns=it.arrival.at_ns,
            chunk_ns=tuple(it.token_ns),
            finished_ns=it.ended_ns,
            input_tokens=it.arrival.prompt_tokens,
            output_tokens=it.drawn,
            status=_status(it),
            error=it.error,
        )
        for it in outcomes
    ]


def _status(outcome: Outcome) -> Status:
    if not outcome.error:
        return "completed"
    return "cancelled" if outcome.error == "Cancelled" else "failed"


def queue_fields(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How long requests waited for their first step to begin, in ms."""
    waits = [(it.started_ns - it.arrival.at_ns) / 1e6 for it in outcomes if it.started_ns >= 0]
    if not waits:
        return {}
    fields = {"mean_queue_ms": math.fsum(waits) / len(waits)}
    fields |= {f"p{p}_queue_ms": float(np.percentile(waits, p)) for p in QUEUE_PERCENTILES}
    return {name: round(value, 6) for name, value in fields.items()}

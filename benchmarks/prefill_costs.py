"""Costs of prefill jobs by the engine's own account: phases and counters in their spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from csps.actors.timing.timeline import (
    BYTES_SENT,
    COMMUNICATION_S,
    CPU_NS,
    EXCHANGE_S,
    PHASE,
    RANK,
)
from csps.protocols.core.topology import Topology
from csps.services.telemetry.traces.spans import RecordedSpan, Trace

ATTENTION_PHASES = ("attention", "importance", "select", "merge")
"""Phases of a layer's attention. Choosing the tokens to keep is part of its cost."""


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """One job on all of its ranks."""

    attention_s: float
    """Time of computing attention, with choosing tokens, mean over the ranks. It is wall-clock
    time: with fewer cores than ranks it includes waiting for cores.
    """
    attention_cpu_s: float
    """The same as CPU time of the computing threads, which other ranks do not lengthen."""
    hidden: float
    """Share of the time under way for which exchanges did not keep a rank waiting, 0 to 1."""
    between_bytes: int
    """Payload sent to the other server."""
    inside_bytes: int
    """Payload sent to the same server."""


def job_costs(traces: Iterable[Trace], locations: Sequence[str]) -> dict[str, JobCost]:
    """Return the cost of every job with complete spans, by trace id.

    Args:
        locations: Rack-Server-GPU id of each rank.
    """
    servers = _servers(locations)
    return {trace.trace_id: _cost(trace.spans, servers) for trace in traces}


def _servers(locations: Sequence[str]) -> list[tuple[int, int]]:
    return [(place.rack, place.server) for place in Topology.of(locations).locations]


def _cost(spans: Sequence[RecordedSpan], servers: Sequence[object]) -> JobCost:
    jobs = [span.attributes for span in spans if span.name == "prefill.compute"]
    waited = sum(job[COMMUNICATION_S] for job in jobs)
    under_way = sum(job[EXCHANGE_S] for job in jobs)
    assert len(jobs) == len(servers), f"{len(jobs)} spans of a job on {len(servers)} ranks"
    attention = [span for phase in ATTENTION_PHASES for span in _phases(spans, phase)]
    sent = [
        (servers[job[RANK]] == servers[peer], sent_bytes)
        for job in jobs
        for peer, sent_bytes in enumerate(job[BYTES_SENT])
    ]
    return JobCost(
        attention_s=sum(map(_seconds, attention)) / len(servers),
        attention_cpu_s=sum(map(_cpu_seconds, attention)) / len(servers),
        hidden=max(0.0, 1.0 - waited / under_way) if under_way else 0.0,
        between_bytes=sum(sent_bytes for inside, sent_bytes in sent if not inside),
        inside_bytes=sum(sent_bytes for inside, sent_bytes in sent if inside),
    )


def _phases(spans: Iterable[RecordedSpan], phase: str) -> list[RecordedSpan]:
    return [span for span in spans if span.is_phase and span.attributes[PHASE] == phase]


def _seconds(span: RecordedSpan) -> float:
    return span.duration_ns / 1e9


def _cpu_seconds(span: RecordedSpan) -> float:
    return float(span.attributes[CPU_NS]) / 1e9

"""Span files of a server or a benchmark as one timeline for Perfetto (`docs/timeline.md`).

    python benchmarks/timeline_export.py run/traces/*.jsonl --out timeline.json [--trace ID]

A rank is a process with a row for computing and rows for each kind of transfer; each other service
(router, configurator) is a process below them. Without `--trace` it is the latest trace that has
phases of a prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from csps.actors.timeline import Event, Slice, chrome_trace, process_trace
from csps.actors.timeline_export import BYTES, CPU_NS, LAYER, LEVEL, MICRO, PHASE, RANK

SERVICES_FROM = 100_000
"""Process numbers of what is no rank, beyond those of all ranks."""

Record = Mapping[str, Any]
"""A line of a span file; `csps.services.telemetry.tracing.span_record` says what is in it."""


def main() -> int:
    """Write the timeline; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path, help="span files (.jsonl)")
    parser.add_argument("--out", type=Path, default=Path("timeline.json"))
    parser.add_argument("--trace", help="trace id, 32 hex digits")
    args = parser.parse_args()
    try:
        records = of_one_trace(read(args.files), args.trace)
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 1
    args.out.write_text(json.dumps({"traceEvents": trace_events(records)}))
    print(f"{args.out}: {len(records)} spans; open it at https://ui.perfetto.dev")
    return 0


def span_files(folder: str) -> list[Path]:
    """What processes have written into a `spans_dir`."""
    return sorted(Path(folder).glob("*.jsonl*"))


def read(files: Iterable[Path]) -> Iterator[Record]:
    """All spans of some files."""
    for file in files:
        with file.open() as lines:
            yield from map(json.loads, lines)


def of_one_trace(records: Iterable[Record], trace_id: str | None = None) -> list[Record]:
    """The spans of a trace: the one named, or the latest that shows a prefill's phases.

    Raises:
        ValueError: there is none.
    """
    traces: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        traces[record["trace_id"]].append(record)
    if trace_id is not None:
        if trace_id not in traces:
            raise ValueError(f"no spans of trace {trace_id}; there are {', '.join(traces)}")
        return traces[trace_id]
    with_phases = [spans for spans in traces.values() if any(map(is_phase, spans))]
    if not with_phases:
        raise ValueError(f"no phases of a prefill in any of {len(traces)} traces")
    return max(with_phases, key=lambda spans: max(span["start_ns"] for span in spans))


def is_phase(record: Record) -> bool:
    """Whether a span is an event of a rank's timeline."""
    return PHASE in record["attributes"]


def timelines(records: Iterable[Record]) -> dict[int, list[Event]]:
    """Each rank's events, back from their spans."""
    events: dict[int, list[Event]] = defaultdict(list)
    for record in filter(is_phase, records):
        events[record["attributes"][RANK]].append(_event(record))
    return dict(sorted(events.items()))


def _event(record: Record) -> Event:
    attributes = record["attributes"]
    return Event(
        attributes[PHASE],
        record["start_ns"],
        record["end_ns"],
        layer=attributes.get(LAYER),
        level=attributes.get(LEVEL),
        micro=attributes.get(MICRO),
        cpu_ns=attributes[CPU_NS],
        bytes=attributes.get(BYTES, 0),
    )


def trace_events(records: Sequence[Record]) -> list[dict[str, Any]]:
    """In Chrome's trace format: ranks' phases, then the other spans by service."""
    events = [
        event for rank, phases in timelines(records).items()
        for event in chrome_trace(phases, rank=rank)
    ]  # fmt: skip
    services: dict[str, list[Slice]] = defaultdict(list)
    for record in records:
        if not is_phase(record):
            name = str(record["attributes"].get("service.name", "unnamed service"))
            services[name].append(_slice(record, name))
    for pid, (name, slices) in enumerate(services.items(), SERVICES_FROM):
        events += process_trace(slices, pid=pid, name=name)
    return events


def _slice(record: Record, service: str) -> Slice:
    """A span of a service, in the row of its rank if it has one."""
    attributes = record["attributes"]
    row = f"rank {attributes[RANK]}" if RANK in attributes else service
    return Slice(row, record["name"], record["start_ns"], record["end_ns"], attributes)


if __name__ == "__main__":
    sys.exit(main())

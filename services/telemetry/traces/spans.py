"""Spans as they are read back from files of OTLP-JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from csps.actors.engine.step_trace import PHASE, RANK
from csps.protocols.core.errors import ConfigError

SERVICE = "service.name"
REQUEST = "llm_request"
"""The span of a whole request."""
_ERROR = 2
"""Status code."""


@dataclass(frozen=True, kw_only=True)
class RecordedSpan:
    """One finished span of any process."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    """Unix time."""
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any]
    """Its own over those of its process."""

    @property
    def service(self) -> str:
        """What kind of process has written it."""
        return str(self.attributes.get(SERVICE, "unnamed service"))

    @property
    def rank(self) -> int | None:
        """Of the process in its gang, if it is one of a gang."""
        rank = self.attributes.get(RANK)
        return None if rank is None else int(rank)

    @property
    def is_phase(self) -> bool:
        """Whether it is an event of a rank's timeline."""
        return PHASE in self.attributes

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Trace:
    """All spans of one request, or of something else that began a trace."""

    spans: tuple[RecordedSpan, ...]
    """In the order of their beginnings; at least one."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return self.spans[0].trace_id

    @cached_property
    def root(self) -> RecordedSpan:
        """The request as a whole; where it was not recorded, the span that began first."""
        return next((span for span in self.spans if span.name == REQUEST), self.spans[0])

    @property
    def request_id(self) -> str:
        """The client's name of the request; empty if there is none."""
        return str(self.root.attributes.get("gen_ai.request.id", ""))


def span_files(folder: Path) -> list[Path]:
    """What processes have written into a `spans_dir`."""
    return sorted(folder.glob("*.jsonl*"))


def read_spans(files: Iterable[Path]) -> Iterator[RecordedSpan]:
    """All spans of some files. What a process has begun to write is not there yet.

    Raises:
        ConfigError: a line is no OTLP-JSON.
    """
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    yield from _line_spans(line, f"{file}:{number}")


def traces(spans: Iterable[RecordedSpan]) -> list[Trace]:
    """Spans by trace, the latest last; and by request, where a client has several in one trace."""
    by_id: dict[str, list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        by_id[span.trace_id].append(span)
    apart = chain.from_iterable(map(_by_request, by_id.values()))
    found = [Trace(tuple(sorted(some, key=lambda it: it.start_ns))) for some in apart]
    return sorted(found, key=lambda it: it.root.start_ns)


def _by_request(spans: Sequence[RecordedSpan]) -> Iterable[Sequence[RecordedSpan]]:
    """Of one trace. Where it has several requests, a span below none that was written is left out:
    nobody knows whose it is."""
    below: dict[str, list[RecordedSpan]] = {it.span_id: [] for it in spans if it.name == REQUEST}
    if len(below) < 2:
        return [spans]
    parents = {it.span_id: it.parent_id for it in spans}
    for span in spans:
        above: str | None = span.span_id
        while above is not None and above not in below:
            above = parents.get(above)
        if above is not None:
            below[above].append(span)
    return below.values()


def _line_spans(line: str, where: str) -> list[RecordedSpan]:
    try:
        return [
            _span(it, _attributes(group.get("resource", {})))
            for group in json.loads(line)["resourceSpans"]
            for scope in group["scopeSpans"]
            for it in scope["spans"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{where}: not a line of OTLP-JSON ({exc!r})") from None


def _span(it: Mapping[str, Any], resource: Mapping[str, Any]) -> RecordedSpan:
    return RecordedSpan(
        name=it["name"],
        trace_id=it["traceId"],
        span_id=it["spanId"],
        parent_id=it.get("parentSpanId") or None,
        start_ns=int(it["startTimeUnixNano"]),
        end_ns=int(it["endTimeUnixNano"]),
        failed=it.get("status", {}).get("code", 0) == _ERROR,
        attributes={**resource, **_attributes(it)},
    )


def _attributes(it: Mapping[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in it.get("attributes", ())}


def _value(value: Mapping[str, Any]) -> Any:
    ((kind, it),) = value.items()
    if kind == "intValue":
        return int(it)
    if kind == "arrayValue":
        return [_value(element) for element in it.get("values", ())]
    return it

"""Read spans back from files of OTLP-JSON, and group them by request."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from csps.actors.timing.timeline import PHASE, RANK
from csps.protocols.core.errors import ConfigError

SERVICE = "service.name"
REQUEST = "llm_request"
"""Name of the span of a whole request."""
_ERROR = 2
"""Status code of a failed span."""


@dataclass(frozen=True, kw_only=True)
class RecordedSpan:
    """One finished span of any process."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    """Start in Unix time."""
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any]
    """Attributes of the span, which override those of its process."""

    @property
    def service(self) -> str:
        """Kind of the process that wrote the span."""
        return str(self.attributes.get(SERVICE, "unnamed service"))

    @property
    def rank(self) -> int | None:
        """Rank of the process in its gang; None if it belongs to none."""
        rank = self.attributes.get(RANK)
        return None if rank is None else int(rank)

    @property
    def is_phase(self) -> bool:
        """True for a phase of a rank's timeline."""
        return PHASE in self.attributes

    @property
    def duration_ns(self) -> int:
        """Length of the span."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Trace:
    """All spans of one request, or of another root that began a trace."""

    spans: tuple[RecordedSpan, ...]
    """Spans in the order of their starts; at least one."""

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hex digits."""
        return self.spans[0].trace_id

    @cached_property
    def root(self) -> RecordedSpan:
        """Span of the whole request; if it was not recorded, the span that started first."""
        return next((span for span in self.spans if span.name == REQUEST), self.spans[0])

    @property
    def story(self) -> tuple[str, ...]:
        """What happened to the request, in words (`services.requests.story`)."""
        return tuple(self.root.attributes.get("csps.story", ()))

    @property
    def request_id(self) -> str:
        """The client's id of the request; empty if there is none."""
        return str(self.root.attributes.get("gen_ai.request.id", ""))


def span_files(folder: Path) -> list[Path]:
    """List the files that processes have written into a `spans_dir`."""
    return sorted(folder.glob("*.jsonl*"))


def read_spans(files: Iterable[Path]) -> Iterator[RecordedSpan]:
    """Yield all spans of some files, without lines that a process has not finished.

    Raises:
        ConfigError: a line is not OTLP-JSON.
    """
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line_number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    yield from _line_spans(line, f"{file}:{line_number}")


def traces(spans: Iterable[RecordedSpan]) -> list[Trace]:
    """Group spans into traces, the latest last; split a client's trace that has several
    requests."""
    by_id: dict[str, list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        by_id[span.trace_id].append(span)
    apart = chain.from_iterable(map(_by_request, by_id.values()))
    found = [Trace(tuple(sorted(group, key=lambda span: span.start_ns))) for group in apart]
    return sorted(found, key=lambda trace: trace.root.start_ns)


def _by_request(spans: Sequence[RecordedSpan]) -> Iterable[Sequence[RecordedSpan]]:
    """Split the spans of a trace by request; drop spans whose ancestors were not recorded."""
    below: dict[str, list[RecordedSpan]] = {
        span.span_id: [] for span in spans if span.name == REQUEST
    }
    if len(below) < 2:
        return [spans]
    parents = {span.span_id: span.parent_id for span in spans}
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
            _span(span, _attributes(group.get("resource", {})))
            for group in json.loads(line)["resourceSpans"]
            for scope in group["scopeSpans"]
            for span in scope["spans"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{where}: not a line of OTLP-JSON ({exc!r})") from None


def _span(span: Mapping[str, Any], resource: Mapping[str, Any]) -> RecordedSpan:
    return RecordedSpan(
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId") or None,
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        failed=span.get("status", {}).get("code", 0) == _ERROR,
        attributes={**resource, **_attributes(span)},
    )


def _attributes(owner: Mapping[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in owner.get("attributes", ())}


def _value(value: Mapping[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_value(element) for element in content.get("values", ())]
    return content

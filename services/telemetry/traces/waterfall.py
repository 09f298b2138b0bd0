"""Draw one trace as text for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from csps.services.telemetry.traces.spans import RecordedSpan, Trace

BLOCKS = " ▏▎▍▌▋▊▉█"
"""Eighths of a column, from the left."""
MANY = 4
"""Number of sibling spans of one name that share a line."""


@dataclass(frozen=True)
class WaterfallLine:
    """One line: one span, or several of one name."""

    depth: int
    spans: Sequence[RecordedSpan]

    @property
    def label(self) -> str:
        """Process and name, indented by depth."""
        first, count = self.spans[0], len(self.spans)
        times = f" x{count}" if count > 1 else ""
        return f"{_process(first):<14} {'  ' * self.depth}{first.name}{times}"


def waterfall(trace: Trace, *, columns: int) -> str:
    """Return a title, then a line per span: process, name, milliseconds, and a bar on a common
    axis.

    Many sibling spans of one name share a line.
    """
    lines = list(_lines(trace))
    labels = max(len(line.label) for line in lines)
    width = max(10, columns - labels - len("  12345.6 ms  "))
    begin = min(span.start_ns for span in trace.spans)
    end = max(span.end_ns for span in trace.spans)
    texts = [
        f"{line.label:<{labels}}  {sum(s.duration_ns for s in line.spans) / 1e6:7.1f} ms  "
        + _bar(line.spans, begin, end, width).rstrip()
        for line in lines
    ]
    return "\n".join([_title(trace), *texts])


def _title(trace: Trace) -> str:
    attributes = trace.root.attributes
    tokens = " + ".join(
        f"{attributes[key]} {unit}"
        for key, unit in (
            ("gen_ai.usage.input_tokens", "prompt"),
            ("gen_ai.usage.output_tokens", "answer tokens"),
        )
        if key in attributes
    )
    error = f", {attributes['error.type']}" if "error.type" in attributes else ""
    return f"trace {trace.trace_id}  {trace.request_id}  {tokens}{error}"


def _process(span: RecordedSpan) -> str:
    name = span.service.removeprefix("csps-")
    return name if span.rank is None else f"{name} {span.rank}"


def _lines(trace: Trace) -> Iterator[WaterfallLine]:
    known = {span.span_id for span in trace.spans}
    children: dict[str, list[RecordedSpan]] = defaultdict(list)
    for span in trace.spans:
        parent = span.parent_id or ""
        children[parent if parent in known else ""].append(span)
    return _below("", 0, children)


def _below(
    parent: str, depth: int, children: dict[str, list[RecordedSpan]]
) -> Iterator[WaterfallLine]:
    alike: dict[tuple[str, str], list[RecordedSpan]] = defaultdict(list)
    for span in children[parent]:
        alike[_process(span), span.name].append(span)
    for siblings in alike.values():
        leaves = not any(children[span.span_id] for span in siblings)
        shared = leaves and len(siblings) >= MANY
        for group in [siblings] if shared else [[span] for span in siblings]:
            yield WaterfallLine(depth, group)
            for span in group:
                yield from _below(span.span_id, depth + 1, children)


def _bar(spans: Iterable[RecordedSpan], begin: int, end: int, width: int) -> str:
    """Draw a bar: each column as full as its time is covered."""
    column_ns = max(1.0, (end - begin) / width)
    covered = [0.0] * width
    for span in spans:
        at, stop = span.start_ns - begin, max(span.end_ns, span.start_ns + 1) - begin
        for column in range(int(at / column_ns), min(width, int(stop / column_ns) + 1)):
            left, right = column * column_ns, (column + 1) * column_ns
            covered[column] += max(0.0, min(stop, right) - max(at, left)) / column_ns
    return "".join(BLOCKS[_eighths(fraction)] for fraction in covered)


def _eighths(fraction: float) -> int:
    """Round a fraction to eighths; only an empty column has none."""
    return min(8, max(1, round(8 * fraction))) if fraction else 0

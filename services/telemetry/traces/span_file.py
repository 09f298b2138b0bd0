"""The traces of a process in a file, where no OTLP endpoint takes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from csps.services.telemetry.traces.otlp_json import export_request

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A file that has grown to this becomes `NAME.1`, in place of an older one."""


class SpanFile(SpanExporter):
    """Appends a line of OTLP-JSON for each export."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the batch processor on its own thread; a full disk must not stop a server."""
        line = json.dumps(export_request(spans), separators=(",", ":")) + "\n"
        try:
            with self._lock:
                self._rotate()
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is kept open."""

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))

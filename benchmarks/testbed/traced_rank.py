"""A rank that writes its spans and the timeline of every job to a file.

    python traced_rank.py SPANS_DIR CONFIG

Everything else is `csps.actors.host_rank`, which has no SDK.
"""

from __future__ import annotations

import sys

from csps.actors import host_rank
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry import tracing

SERVICE = "csps-prefill"


def main(spans_dir: str, config: str) -> None:
    """Run a rank until standard input ends, and write the last spans."""
    settings = TelemetrySettings(spans_dir=spans_dir, timeline_sample=1.0)
    flush = tracing.install(SERVICE, settings)
    try:
        host_rank.main([config])
    finally:
        flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

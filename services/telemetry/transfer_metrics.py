"""KV on its way between gangs, under SGLang's names."""

from __future__ import annotations

from collections.abc import Sequence

from csps.protocols.messages import KvLanded
from csps.services.telemetry.series import LATENCY_BUCKETS, Series

SPEED_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""GB/s: from a slow network to NVLink."""
MB_BUCKETS = tuple(float(4**power) for power in range(11))


class TransferMetrics:
    """Of each prompt whose KV was sent."""

    def __init__(self, series: Series) -> None:
        self._speed = series.histogram(
            "kv_transfer_speed_gb_s",
            "A prompt's KV by the time from its first message's arrival to its last's. Layers "
            "leave as they are computed: the link may be faster.",
            SPEED_BUCKETS,
        )
        self._latency = series.histogram(
            "kv_transfer_latency_ms",
            "From the arrival of a prompt's first KV to that of its last, milliseconds.",
            tuple(seconds * 1e3 for seconds in LATENCY_BUCKETS),
        )
        self._size = series.histogram("kv_transfer_total_mb", "A prompt's KV.", MB_BUCKETS)
        self._failed = series.counter("num_transfer_failed_reqs", "Requests whose KV got lost.")

    def landed(self, ranks: Sequence[KvLanded]) -> None:
        """All ranks that decode a prompt have its KV; nothing of it was sent where it lay."""
        total = sum(it.received_bytes for it in ranks)
        if not total:
            return
        seconds = max(it.receiving_s for it in ranks)
        self._size.observe(total / 1e6)
        self._latency.observe(seconds * 1e3)
        if seconds:
            self._speed.observe(total / 1e9 / seconds)

    def failed(self) -> None:
        """A request's KV was lost or changed on its way."""
        self._failed.inc()

"""Making the series of `/metrics`: one prefix, and the served model on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600, 1200, 1800,
)  # fmt: skip
"""Seconds, to half an hour: a million-token prompt may take minutes to its first token."""


class Series:
    """Of one router."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def counter(self, name: str, help_text: str) -> Counter:
        """`csps:NAME_total`."""
        return self.counters(name, help_text)()

    def counters(self, name: str, help_text: str, *labels: str) -> Callable[..., Counter]:
        """`csps:NAME_total` with labels, whose values are given to what is returned."""
        family = Counter(f"csps:{name}", help_text, ("model_name", *labels), registry=self.registry)
        return lambda **values: family.labels(model_name=self._model, **values)

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """`csps:NAME`, read when somebody scrapes."""
        self.gauges(name, help_text)(read)

    def gauges(self, name: str, help_text: str, *labels: str) -> Callable[..., None]:
        """Several gauges of one name: called with what reads one, and with the values of labels."""
        family = Gauge(f"csps:{name}", help_text, ("model_name", *labels), registry=self.registry)

        def add(read: Callable[[], float], **values: str) -> None:
            family.labels(model_name=self._model, **values).set_function(read)

        return add

    def histogram(
        self, name: str, help_text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """`csps:NAME`, in seconds unless its buckets say otherwise."""
        family = Histogram(
            f"csps:{name}", help_text, ("model_name",), registry=self.registry, buckets=buckets
        )
        return family.labels(model_name=self._model)

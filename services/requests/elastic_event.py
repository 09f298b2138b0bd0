"""Moved definitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from opentelemetry.util.types import AttributeValue

ElasticEventKind = Literal["scale_down", "scale_up", "migrate", "remaster", "merge", "preempt"]


@dataclass(frozen=True, kw_only=True)
class ElasticEvent:
    """One, as the router has seen it. Times are of the monotonic clock, in seconds.

    scale_down  a prompt was computed by more instances than keep its KV; or a request that is
                decoded went on elsewhere, and its group on fewer instances
    scale_up    a request joins whose answer has slots on more instances than hold its prompt, or
                one that is decoded went on where nothing was decoded
    migrate     KV of a request that is decoded has moved
    remaster    another instance draws a request's tokens; no KV has moved
    merge       a request that joins, or has moved, has decode groups iterate together
    preempt     a prompt is computed where others are decoded, which go on in between
    """

    kind: ElasticEventKind
    began: float
    ended: float
    seconds: float = 0.0
    """What it has cost, on the rank on which it cost most."""
    sent_bytes: int = 0
    tokens: int = 0
    """Whose KV lies elsewhere now."""

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        """Of its span."""
        return {
            "csps.elastic.seconds": self.seconds,
            "csps.elastic.bytes": self.sent_bytes,
            "csps.elastic.tokens": self.tokens,
        }

"""Changes of the group that computes or decodes a request, as its trace and metrics show them
(LoongServe)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from opentelemetry.util.types import AttributeValue

ElasticEventKind = Literal["scale_down", "scale_up", "migrate", "remaster", "merge", "preempt"]


@dataclass(frozen=True, kw_only=True)
class ElasticEvent:
    """One change of a group, as the router observed it. Times are monotonic, in seconds.

    scale_down  a prompt was computed by more instances than store its KV, or a decoding sequence
                moved and left instances of its group without decode work
    scale_up    a joining sequence has answer slots on instances that hold none of its prompt, or a
                decoding sequence moved to instances that decoded nothing before
    migrate     KV of a decoding sequence moved
    remaster    another instance samples a sequence's tokens; no KV moved
    merge       a sequence that joined or moved makes decode groups iterate together
    preempt     a prompt was computed on decoding instances, whose decode iterations ran in between
    """

    kind: ElasticEventKind
    began: float
    ended: float
    seconds: float = 0.0
    """Cost in seconds on the rank where it cost most."""
    sent_bytes: int = 0
    tokens: int = 0
    """Tokens whose KV was moved."""

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        """Return the attributes of the event's span."""
        return {
            "csps.elastic.seconds": self.seconds,
            "csps.elastic.bytes": self.sent_bytes,
            "csps.elastic.tokens": self.tokens,
        }

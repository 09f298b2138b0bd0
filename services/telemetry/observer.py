"""Moved definitions.

What the router tells the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from csps.protocols.core.topology import Location
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import FinishReason, PrefillDone, RankKvReceived
from csps.services.requests.elastic_event import ElasticEvent
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import SloBounds


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A step that all of its ranks have reported."""

    strategy: str
    sp: int
    """Instances that computed it together."""
    tokens: int
    ranks: Sequence[PrefillDone]
    places: Sequence[Location]
    """Of all ranks of the gang, in rank order; those of an instance have one."""


class RequestObserver(Protocol):
    """Callbacks on the event loop, in the middle of the token path: they must be quick."""

    def submitted(self, handle: RequestHandle) -> None:
        """Admitted; `handle.generation` says what it is."""

    def refused(self, error: Exception, slo: SloBounds) -> None:
        """Not admitted; `slo` is what it would have been held to."""

    def started(self, handle: RequestHandle) -> None:
        """An attempt's first step was sent; `handle.timings.queue_s` is known."""

    def first_token(self, handle: RequestHandle) -> None:
        """`handle.timings.ttft_s` and `prefill_s` are known."""

    def token(self, handle: RequestHandle, gap_s: float) -> None:
        """A later token, `gap_s` after the one before."""

    def retried(self, handle: RequestHandle, error: Exception) -> None:
        """An attempt was lost to a fault of the cluster; the request waits again."""

    def finished(self, handle: RequestHandle, reason: FinishReason) -> None:
        """The end of the answer, or its withdrawal; all timings are known."""

    def failed(self, handle: RequestHandle, error: Exception) -> None:
        """The end without a whole answer."""

    def gang_lost(self, role: GangRole, gang_id: str) -> None:
        """A gang is gone with all it held."""

    def cluster_ready(self, epoch: str) -> None:
        """All gangs are attached and linked."""

    def preempted(self, requests: int) -> None:
        """A long step of so many requests stands still on some instances for an urgent one."""

    def step_done(self, figures: StepFigures) -> None:
        """The last rank of a step has reported."""

    def elastic(self, event: ElasticEvent) -> None:
        """A group of an elastic gang has changed."""

    def kv_received(self, landed: Sequence[RankKvReceived]) -> None:
        """All of a prompt's KV is where it decodes: what each of the ranks there says."""


class NullObserver:
    """Watches nothing."""

    def submitted(self, handle: RequestHandle) -> None: ...
    def refused(self, error: Exception, slo: SloBounds) -> None: ...
    def started(self, handle: RequestHandle) -> None: ...
    def first_token(self, handle: RequestHandle) -> None: ...
    def token(self, handle: RequestHandle, gap_s: float) -> None: ...
    def retried(self, handle: RequestHandle, error: Exception) -> None: ...
    def finished(self, handle: RequestHandle, reason: FinishReason) -> None: ...
    def failed(self, handle: RequestHandle, error: Exception) -> None: ...
    def gang_lost(self, role: GangRole, gang_id: str) -> None: ...
    def cluster_ready(self, epoch: str) -> None: ...
    def preempted(self, requests: int) -> None: ...
    def step_done(self, figures: StepFigures) -> None: ...
    def elastic(self, event: ElasticEvent) -> None: ...
    def kv_received(self, landed: Sequence[RankKvReceived]) -> None: ...

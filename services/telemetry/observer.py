"""What the router tells the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from csps.protocols.gang_members import GangRole
from csps.protocols.messages import KvLanded
from csps.protocols.tokens import FinishReason
from csps.services.router.running import Running
from csps.services.router.slo import Slo
from csps.services.telemetry.elastic_metrics import ElasticEvent
from csps.services.telemetry.step_metrics import StepFigures


class Observer(Protocol):
    """Callbacks on the event loop, in the middle of the token path: they must be quick."""

    def submitted(self, running: Running) -> None:
        """Admitted; `running.generation` says what it is."""

    def refused(self, error: Exception, slo: Slo) -> None:
        """Not admitted; `slo` is what it would have been held to."""

    def started(self, running: Running) -> None:
        """An attempt's first step was sent; `running.timings.queue_s` is known."""

    def first_token(self, running: Running) -> None:
        """`running.timings.ttft_s` and `prefill_s` are known."""

    def token(self, running: Running, gap_s: float) -> None:
        """A later token, `gap_s` after the one before."""

    def retried(self, running: Running, error: Exception) -> None:
        """An attempt was lost to a fault of the cluster; the request waits again."""

    def finished(self, running: Running, reason: FinishReason) -> None:
        """The end of the answer, or its withdrawal; all timings are known."""

    def failed(self, running: Running, error: Exception) -> None:
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

    def kv_landed(self, landed: Sequence[KvLanded]) -> None:
        """All of a prompt's KV is where it decodes: what each of the ranks there says."""


class NoObserver:
    """Watches nothing."""

    def submitted(self, running: Running) -> None: ...
    def refused(self, error: Exception, slo: Slo) -> None: ...
    def started(self, running: Running) -> None: ...
    def first_token(self, running: Running) -> None: ...
    def token(self, running: Running, gap_s: float) -> None: ...
    def retried(self, running: Running, error: Exception) -> None: ...
    def finished(self, running: Running, reason: FinishReason) -> None: ...
    def failed(self, running: Running, error: Exception) -> None: ...
    def gang_lost(self, role: GangRole, gang_id: str) -> None: ...
    def cluster_ready(self, epoch: str) -> None: ...
    def preempted(self, requests: int) -> None: ...
    def step_done(self, figures: StepFigures) -> None: ...
    def elastic(self, event: ElasticEvent) -> None: ...
    def kv_landed(self, landed: Sequence[KvLanded]) -> None: ...

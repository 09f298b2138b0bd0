"""Define what the router reports to metrics and traces about requests and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol, cast

from csps.protocols.core.topology import Location
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import FinishReason, PrefillDone, RankKvReceived
from csps.services.requests.request_handle import ElasticEvent, RequestHandle
from csps.services.requests.request_spec import SloBounds

_log = logging.getLogger(__name__)
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A step that all of its ranks have reported."""

    strategy: str
    sp: int
    """Instances that computed the step together."""
    tokens: int
    ranks: Sequence[PrefillDone]
    places: Sequence[Location]
    """Locations of all ranks of the gang, in rank order; the ranks of an instance share one."""


class RequestObserver(Protocol):
    """Callbacks on the event loop, in the middle of the token path: they must be quick."""

    def submitted(self, handle: RequestHandle) -> None:
        """Observe an admitted request; `handle.spec` describes it."""

    def refused(self, error: Exception, slo: SloBounds) -> None:
        """Observe a rejected request; `slo` holds the objectives it would have had."""

    def started(self, handle: RequestHandle) -> None:
        """Observe an attempt whose first step was sent; `handle.timings.queue_s` is known."""

    def first_token(self, handle: RequestHandle) -> None:
        """Observe the first token; `handle.timings.ttft_s` and `prefill_s` are known."""

    def token(self, handle: RequestHandle, gap_s: float) -> None:
        """Observe a later token, `gap_s` after the one before."""

    def retried(self, handle: RequestHandle, error: Exception) -> None:
        """Observe an attempt lost to a fault of the cluster; the request waits again."""

    def finished(self, handle: RequestHandle, reason: FinishReason) -> None:
        """Observe the end of an answer, or its cancellation; all timings are known."""

    def failed(self, handle: RequestHandle, error: Exception) -> None:
        """Observe a request that ended without a whole answer."""

    def gang_lost(self, role: GangRole, gang_id: str) -> None:
        """Observe the loss of a gang with all its KV."""

    def cluster_ready(self, epoch: str) -> None:
        """Observe that all gangs are attached and linked."""

    def preempted(self, requests: int) -> None:
        """Observe that a high-priority step preempts a step of `requests` requests on some
        instances."""

    def step_done(self, figures: StepFigures) -> None:
        """Observe the last rank's report about a step."""

    def elastic(self, event: ElasticEvent) -> None:
        """Observe a change of an elastic group."""

    def kv_received(self, received: Sequence[RankKvReceived]) -> None:
        """Observe that every decoding rank has received a prompt's KV."""

    def kv_saved(self, tokens: int) -> None:
        """Observe that an instance has written KV of so many tokens to files."""

    def kv_restored(self, tokens: int | None, seconds: float) -> None:
        """Observe that a gang has read KV of so many tokens from files; None: that it could not."""


class NullObserver:
    """Observer that does nothing."""

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
    def kv_received(self, received: Sequence[RankKvReceived]) -> None: ...
    def kv_saved(self, tokens: int) -> None: ...
    def kv_restored(self, tokens: int | None, seconds: float) -> None: ...


def guarded(observe: Callable[P, None]) -> Callable[P, None]:
    """Return the function with its errors logged: what it observes has happened all the same, and
    must reach scheduler and clients."""

    @wraps(observe)
    def observed(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            observe(*args, **kwargs)
        except Exception:
            _log.exception("%s failed", observe.__qualname__)

    return observed


class _Guarded:
    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        method = guarded(getattr(self._observer, name))
        setattr(self, name, method)  # the next call finds it at once
        return method


def guarded_observer(observer: RequestObserver) -> RequestObserver:
    """Return the observer with the errors of its methods logged."""
    return cast(RequestObserver, _Guarded(observer))

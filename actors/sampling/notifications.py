"""Notifications that a rank sends to the router on its own.

`ProgressReport` is a periodic heartbeat of a step: one without it counts as hung.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from csps.actors.sampling.batch_sampler import Sample
from csps.protocols.core.errors import CspsError, RequestError
from csps.protocols.gang.messages import PrefillProgress, RequestFailed, SampledToken

Notify = Callable[[str, Any], None]
"""Function (name of the notification, message dataclass); callable from any thread, keeps the
order."""


def sampled_token(sequence_id: int, index: int, sample: Sample) -> SampledToken:
    """Return a sampled token as part of the message to the router."""
    return SampledToken(
        sequence_id=sequence_id,
        index=index,
        token=sample.token,
        finish_reason=sample.finish_reason,
        logprob=sample.logprob,
        top_logprobs=sample.top,
    )


def request_failed(sequence_id: int, rank: int, error: CspsError) -> RequestFailed:
    """Return an error as the message to the router."""
    return RequestFailed(
        sequence_id=sequence_id,
        rank=rank,
        code=type(error).__name__,
        message=str(error),
        param=error.param if isinstance(error, RequestError) else None,
    )


REPORT_S = 1.0
"""Minimum seconds between two reports. Work between two yield points may take longer; the router's
deadline is far above it."""


class ProgressReport:
    """Progress of one step on a rank, or of piggybacked prompts, reported now and then. Any thread
    may call it; two at once may both report, which counts as one."""

    def __init__(self, notify: Notify, *, rank: int, step_id: int | None = None) -> None:
        self._notify = notify
        self._message = PrefillProgress(rank=rank, step_id=step_id)
        self._last_report = time.monotonic()  # short steps have nothing to report before their end

    def step(self) -> None:
        """Note progress: a yield point was reached, KV was sent, or a piggybacked chunk was
        computed."""
        now = time.monotonic()
        if now - self._last_report >= REPORT_S:
            self._last_report = now
            self._notify("prefill_progress", self._message)

"""What a rank tells the router, unasked.

A word now and then that a rank gets on with prompts, so that its silence means that it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from csps.actors.sampling.batch_sampler import Sample
from csps.protocols.core.errors import CspsError, RequestError
from csps.protocols.gang.messages import PrefillProgress, RequestFailed, SampledToken

Notify = Callable[[str, Any], None]
"""(name of the notification, message dataclass); callable from any thread, keeps the order."""


def sampled_token(sequence_id: int, index: int, sample: Sample) -> SampledToken:
    """A draw as a row of the message that goes to the router."""
    return SampledToken(
        sequence_id=sequence_id,
        index=index,
        token=sample.token,
        finish_reason=sample.finish_reason,
        logprob=sample.logprob,
        top_logprobs=sample.top,
    )


def request_failed(sequence_id: int, rank: int, error: CspsError) -> RequestFailed:
    """An error as the message that goes to the router."""
    return RequestFailed(
        sequence_id=sequence_id,
        rank=rank,
        code=type(error).__name__,
        message=str(error),
        param=error.param if isinstance(error, RequestError) else None,
    )


REPORT_S = 1.0
"""Seconds between two words, at least. What takes longer between two points of a job at which
there is anything to tell is not cut short: the router's deadline is far longer."""


class ProgressReport:
    """Told of every part of a step and every piece that rides, tells the router of some. Any thread
    may; two at once may both tell, and count as one."""

    def __init__(self, notify: Notify, *, rank: int) -> None:
        self._notify = notify
        self._rank = rank
        self._last_report = 0.0

    def step(self) -> None:
        """A part of a step is computed, or sent, or a piece of a prompt that rides."""
        now = time.monotonic()
        if now - self._last_report >= REPORT_S:
            self._last_report = now
            self._notify("prefill_progress", PrefillProgress(rank=self._rank))

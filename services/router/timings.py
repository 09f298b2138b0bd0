"""When a request reached which state, and how long it was in each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from csps.protocols.messages import PrefillDone


@dataclass(kw_only=True)
class Timings:
    """Seconds spent in each state by the last attempt; None for a state that was not reached.

    `ttft_s` and `total_s` count from submission, over all attempts.
    """

    queue_s: float | None = None
    """Waiting for a place."""
    plan_s: float | None = None
    """From the place until the first step was sent: decode slots are reserved meanwhile."""
    prefill_s: float | None = None
    """From the first step's sending to its token."""
    transfer_s: float | None = None
    """From that token until all KV had landed: the part of the transfer that shows."""
    transfer_wait_s: float | None = None
    """The longest that KV has waited for its turn to be sent to a decode rank."""
    decode_s: float | None = None
    """From the hand-over to decode until the last token."""
    ttft_s: float | None = None
    total_s: float | None = None
    rank_queue_s: float = 0.0
    """The slowest prefill rank's figures, as it reported them."""
    compute_s: float = 0.0
    communication_s: float = 0.0
    """Waiting for exchanges inside the prefill group."""
    exchange_s: float = 0.0
    """Such exchanges were under way, hidden behind computing or not."""
    hidden_communication: float | None = None
    """Hidden communication / total communication, over all ranks; None without any."""
    rank_transfer_s: float = 0.0
    yielded_s: float = 0.0
    tokens: int = 0
    attempts: int = 0

    def add_figures(self, figures: Sequence[PrefillDone]) -> None:
        """Take in what the ranks of a prefill group have measured."""
        self.rank_queue_s = max(it.queue_s for it in figures)
        self.compute_s = max(it.compute_s for it in figures)
        self.communication_s = max(it.communication_s for it in figures)
        self.exchange_s = max(it.exchange_s for it in figures)
        self.hidden_communication = _hidden(figures)
        self.rank_transfer_s = max(it.transfer_s for it in figures)
        self.yielded_s = max(it.yielded_s for it in figures)


def _hidden(figures: Sequence[PrefillDone]) -> float | None:
    total_s = sum(it.exchange_s for it in figures)
    if not total_s:
        return None
    return max(0.0, 1.0 - sum(it.communication_s for it in figures) / total_s)


@dataclass(slots=True)
class Marks:
    """When (`time.monotonic()`) an attempt reached each state."""

    submitted: float = field(default_factory=time.monotonic)
    queued: float = field(default_factory=time.monotonic)
    """Entered the queue: `submitted`, or the loss of the previous attempt."""
    placed: float | None = None
    """The scheduler has found a place; decode slots are asked for."""
    launched: float | None = None
    """The attempt's first step was sent."""
    prefilled: float | None = None
    """Its prefill has drawn a token."""
    first_token: float | None = None
    """Of the answer, whichever attempt it came from."""
    joined: float | None = None
    """All KV had landed and decode was told to go on."""
    last_token: float | None = None
    ended: float | None = None

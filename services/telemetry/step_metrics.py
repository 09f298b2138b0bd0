"""What makes a sequence-parallel prefill: by which strategy on how many instances, what it sent
how far, and how much of its communication computing hid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.messages import PrefillDone
from csps.protocols.topology import Location
from csps.services.telemetry.series import Series


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


class StepMetrics:
    """Counters, so that shares are taken over any time: `docs/metrics.md` has the queries."""

    def __init__(self, series: Series) -> None:
        one, several = series.counter, series.counters
        self._steps = several("prefill_steps", "Steps of prefill.", "strategy", "sp_size")
        self._tokens = several(
            "prefill_step_tokens", "Prompt tokens computed in steps.", "strategy", "sp_size"
        )
        self._sent = several(
            "prefill_sent_bytes", "Between ranks during steps, by how far they went.", "within"
        )
        self._compute = one("prefill_compute_seconds", "Computing in steps, over ranks.")
        self._exchange = one(
            "prefill_communication_seconds", "Exchanges under way in steps, over ranks."
        )
        self._waited = one(
            "prefill_exposed_communication_seconds",
            "Of them, the time in which a rank stood still.",
        )
        self._yielded = one(
            "prefill_yielded_seconds", "Steps stood still for something else, over ranks."
        )
        self._preemptions = one(
            "num_preemptions", "Prompts whose step stood still for an urgent one."
        )

    def preempted(self, requests: int) -> None:
        """An urgent step was sent to instances that compute a long one of so many requests."""
        self._preemptions.inc(requests)

    def done(self, step: StepFigures) -> None:
        """Add a step."""
        labels = {"strategy": step.strategy, "sp_size": str(step.sp)}
        self._steps(**labels).inc()
        self._tokens(**labels).inc(step.tokens)
        for it in step.ranks:
            self._compute.inc(max(0.0, it.compute_s))
            self._exchange.inc(it.exchange_s)
            self._waited.inc(min(it.communication_s, it.exchange_s))
            self._yielded.inc(it.yielded_s)
            for peer, sent in enumerate(it.bytes_sent):
                if sent:
                    self._sent(within=_within(step.places[it.rank], step.places[peer])).inc(sent)


def _within(one: Location, other: Location) -> str:
    """The smallest that both are in."""
    if one.server_id == other.server_id:
        return "server"
    return "rack" if one.rack == other.rack else "cluster"

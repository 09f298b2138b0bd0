"""What the instances of a prefill gang are busy with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.services.scheduling.kv_ledger import KvLedger
from csps.services.scheduling.policy import JobDecision
from csps.services.scheduling.state import LongJob, PrefillInstance


@dataclass(slots=True)
class _Part:
    """An instance's part of an outstanding job."""

    tokens: int
    urgent: bool
    overtaken_tokens: int = 0


class PrefillLoad:
    """Outstanding jobs and KV slots of a prefill gang, by instance.

    Parameters
    ----------
    capacities
        KV slots of each instance.
    locations
        Rack-Server-GPU id of each instance.
    """

    def __init__(self, capacities: Sequence[int], locations: Sequence[str]) -> None:
        self.ledger = KvLedger(capacities)
        self._locations = tuple(locations)
        self._parts: list[dict[int, _Part]] = [{} for _ in capacities]

    def start(self, ticket: int, decision: JobDecision) -> None:
        """A job was decided on; `ticket` names it from now on."""
        self.ledger.reserve(ticket, decision.slots)
        for instance, tokens in decision.slots.items():
            if decision.urgent:
                self._count_overtaking(instance, tokens)
            self._parts[instance][ticket] = _Part(tokens, decision.urgent)

    def _count_overtaking(self, instance: int, tokens: int) -> None:
        for part in self._parts[instance].values():
            if not part.urgent:
                part.overtaken_tokens += tokens

    def done(self, ticket: int, instance: int) -> None:
        """The instance is through with its part and has freed the KV of it."""
        self._parts[instance].pop(ticket, None)
        self.ledger.give_back(ticket, instance)

    def shrink(self, ticket: int, decision: JobDecision | None) -> None:
        """Requests left the job before it was sent; None: all of them did."""
        slots = decision.slots if decision is not None else {}
        for instance, parts in enumerate(self._parts):
            if instance in slots:
                parts[ticket].tokens = slots[instance]
            else:
                parts.pop(ticket, None)
        self.ledger.give_back_all(ticket)
        if slots:
            self.ledger.reserve(ticket, slots)

    def snapshot(self) -> tuple[PrefillInstance, ...]:
        """The gang's part of a `ClusterState`."""
        return tuple(
            PrefillInstance(
                instance=instance,
                location=self._locations[instance],
                free_slots=self.ledger.free(instance),
                long_jobs=tuple(
                    LongJob(tokens=part.tokens, overtaken_tokens=part.overtaken_tokens)
                    for part in parts.values()
                    if not part.urgent
                ),
                urgent_tokens=sum(part.tokens for part in parts.values() if part.urgent),
            )
            for instance, parts in enumerate(self._parts)
        )

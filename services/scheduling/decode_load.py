"""What the instances of a decode gang hold."""

from __future__ import annotations

from collections.abc import Sequence

from csps.services.scheduling.kv_ledger import KvLedger
from csps.services.scheduling.policy import DecodePlacement
from csps.services.scheduling.state import DecodeInstance


class DecodeLoad:
    """Requests and KV slots of a decode gang, by instance.

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
        self._mastered: list[set[int]] = [set() for _ in capacities]

    def reserve(self, rid: int, placement: DecodePlacement) -> None:
        """Count a request's slots as taken, the ones for tokens to come included."""
        self.ledger.reserve(rid, placement.slots)
        self._mastered[placement.master].add(rid)

    def freed(self, rid: int, instance: int) -> None:
        """The instance holds nothing of the request any more."""
        self._mastered[instance].discard(rid)
        self.ledger.give_back(rid, instance)

    def snapshot(self) -> tuple[DecodeInstance, ...]:
        """The gang's part of a `ClusterState`."""
        return tuple(
            DecodeInstance(
                instance=instance,
                location=self._locations[instance],
                free_slots=self.ledger.free(instance),
                requests=len(mastered),
            )
            for instance, mastered in enumerate(self._mastered)
        )

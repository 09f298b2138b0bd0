"""The gangs that the scheduler knows, by the numbers that it knows them by."""

from __future__ import annotations

import itertools

from csps.protocols.gang_client import GangClient
from csps.services.scheduling.events import GangUp, InstanceUp
from csps.services.scheduling.ids import GangId


class AttachedGangs:
    """Numbers every incarnation of a gang anew."""

    def __init__(self) -> None:
        self._by_number: dict[GangId, GangClient] = {}
        self._numbers = itertools.count(1)
        self._epochs: dict[GangId, str] = {}

    def add(self, gang: GangClient) -> GangId:
        """A gang was attached."""
        number = next(self._numbers)
        self._by_number[number] = gang
        return number

    def remove(self, gang: GangClient) -> GangId | None:
        """A gang is gone; None if it was never added."""
        number = self.number_of(gang)
        if number is not None:
            del self._by_number[number]
            self._epochs.pop(number, None)
        return number

    def get(self, number: GangId) -> GangClient | None:
        """The gang, as long as it lives."""
        return self._by_number.get(number)

    def number_of(self, gang: GangClient) -> GangId | None:
        """The number of a gang that is attached."""
        return next((it for it, known in self._by_number.items() if known is gang), None)

    @property
    def prefill_locations(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of the instances that compute prompts; none while there are none."""
        found = (gang.locations for gang in self._by_number.values() if gang.role != "decode")
        return next(found, ())

    def linked(self, decode: GangClient, epoch: str) -> None:
        """KV comes to a decode gang under this epoch from now on."""
        number = self.number_of(decode)
        assert number is not None, "linked, but not attached"
        self._epochs[number] = epoch

    def epoch_of(self, decode: GangClient) -> str:
        """Of the KV that comes to a decode gang; empty while none can come."""
        number = self.number_of(decode)
        return "" if number is None else self._epochs.get(number, "")


def gang_up(number: GangId, gang: GangClient, *, generation: int) -> GangUp:
    """What the scheduler is told of a gang."""
    return GangUp(
        gang=number,
        generation=generation,
        may_prefill=gang.role != "decode",
        may_decode=gang.role != "prefill",
        tp=gang.tp,
        instances=tuple(
            InstanceUp(location=location, kv_slots=slots)
            for location, slots in zip(gang.locations, gang.capacities, strict=True)
        ),
        max_positions=min(it.max_positions for it in gang.descriptions),
        kv_bytes_per_token=max(it.kv_bytes_per_token for it in gang.descriptions),
    )

"""Transfers of KV that take turns at the instances that receive it, as on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from csps.protocols.receiving_backends import ReceivingBackends, Transfer
from csps.services.scheduling.ids import InstanceId, SequenceId


class Receiving:
    """The backends of all instances that receive from one gang.

    Args:
        backends: of each instance; None: as many as there are transfers.
    """

    def __init__(self, backends: int | None) -> None:
        self._backends = backends
        self._instances: dict[InstanceId, ReceivingBackends] = {}
        self._waiting: dict[tuple[InstanceId, Transfer], Callable[[], None]] = {}

    @property
    def limited(self) -> bool:
        """Transfers may have to wait."""
        return self._backends is not None

    def ask(self, instance: InstanceId, transfer: Transfer, begin: Callable[[], None]) -> None:
        """Begin when its turn comes."""
        if self._backends is None:
            return begin()
        if instance not in self._instances:
            self._instances[instance] = ReceivingBackends(self._backends)
        self._waiting[instance, transfer] = begin
        return self._begin(instance, self._instances[instance].handshake(transfer))

    def end(self, instance: InstanceId, transfer: Transfer) -> None:
        """It is over, or nobody wants it any more."""
        if (backends := self._instances.get(instance)) is not None:
            self._waiting.pop((instance, transfer), None)
            self._begin(instance, backends.landed(transfer))

    def release(self, sequence: SequenceId, instance: InstanceId) -> None:
        """All KV of a sequence has landed there, or nobody wants it any more."""
        if (backends := self._instances.get(instance)) is None:
            return
        # Nobody would say that these may begin: whoever receives does not want them.
        going_on = [self._waiting.pop((instance, it)) for it in backends.waiting_of(sequence)]
        self._begin(instance, backends.release(sequence))
        for begin in going_on:
            begin()

    def forget(self, sequence: SequenceId) -> None:
        """Nobody wants it, wherever it was to go."""
        for instance in list(self._instances):
            self.release(sequence, instance)

    def check_idle(self) -> None:
        """Assert that every backend has come back."""
        assert not self._waiting, "transfers that never begin"
        for backends in self._instances.values():
            backends.check_integrity()
            assert backends.free == backends.total, "a backend was lost"

    def _begin(self, instance: InstanceId, granted: Iterable[Transfer]) -> None:
        for transfer in granted:
            self._waiting.pop((instance, transfer))()

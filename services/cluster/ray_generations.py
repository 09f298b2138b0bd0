"""`Generations` in the key-value store of Ray's GCS, which lives as long as the cluster."""

from __future__ import annotations

import asyncio

from ray import serve
from ray.experimental import internal_kv

_NAMESPACE = "csps"


def application_name() -> str:
    """Of the application that this replica belongs to; several may share a Ray cluster."""
    return serve.get_replica_context().app_name


class RayGenerations:
    """One counter of one application.

    The store cannot add and has no transactions, but it can refuse to overwrite: the counter is
    the largest of the keys `NAME/number`, and claiming a number is making its key. What is held
    stands under `NAME-held/number`.
    """

    def __init__(self, name: str) -> None:
        """Ask for nothing yet.

        Args:
            name: the same for all who share the counter, such as "csps/routers".
        """
        self._prefix, self._held_prefix = f"{name}/", f"{name}-held/"

    async def claim(self) -> int:
        return await asyncio.to_thread(self._claim)

    async def hold(self, number: int, beat: int) -> None:
        key = f"{self._held_prefix}{number}"
        await asyncio.to_thread(
            internal_kv._internal_kv_put,
            key,
            str(beat).encode(),
            overwrite=True,
            namespace=_NAMESPACE,
        )

    async def release(self, number: int) -> None:
        key = f"{self._held_prefix}{number}"
        await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=_NAMESPACE)

    async def held(self) -> dict[int, int]:
        return await asyncio.to_thread(self._read_held)

    def _read_held(self) -> dict[int, int]:
        held = {}
        for key in internal_kv._internal_kv_list(self._held_prefix, namespace=_NAMESPACE):
            beat = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if beat is not None:  # released meanwhile
                held[int(key.decode().removeprefix(self._held_prefix))] = int(beat)
        return held

    def _claim(self) -> int:
        newest = max(self._numbers(), default=0)
        while True:
            number = newest + 1
            taken = internal_kv._internal_kv_put(
                self._key(number), b"", overwrite=False, namespace=_NAMESPACE
            )
            # A key that could be made may be an old one that was tidied away meanwhile; then
            # there is a larger one.
            numbers = self._numbers()
            newest = max(numbers)
            if not taken and newest == number:
                self._forget([it for it in numbers if it < number])
                return number

    def _numbers(self) -> list[int]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
        return [int(key.decode().removeprefix(self._prefix)) for key in keys]

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            internal_kv._internal_kv_del(self._key(number), namespace=_NAMESPACE)

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"

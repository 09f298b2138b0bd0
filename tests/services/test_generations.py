"""Counters that only grow, whoever asks and whatever dies."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from file_generation_store import FileGenerations
from ray.experimental import internal_kv

from csps.services.cluster.fencing import Generations, MemoryGenerations
from csps.services.cluster.ray_context import RayGenerations


class Kv:
    """Ray's key-value store as far as it is used; its behavior was read in Ray 2.60."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        for name in ("put", "get", "list", "del"):
            monkeypatch.setattr(internal_kv, f"_internal_kv_{name}", getattr(self, f"_{name}"))

    def _put(self, key: str, value: bytes, overwrite: bool, namespace: str) -> bool:
        with self._lock:
            existed = (namespace, key) in self.keys
            if overwrite or not existed:
                self.keys[namespace, key] = value
            return existed

    def _get(self, key: bytes, namespace: str) -> bytes | None:
        with self._lock:
            return self.keys.get((namespace, key.decode()))

    def _list(self, prefix: str, namespace: str) -> list[bytes]:
        with self._lock:
            return [
                key.encode() for ns, key in self.keys if ns == namespace and key.startswith(prefix)
            ]

    def _del(self, key: str, namespace: str) -> int:
        with self._lock:
            return int(self.keys.pop((namespace, key), None) is not None)


def counter(kind: str, path: Path) -> Generations:
    if kind == "file":
        return FileGenerations(path / "generations")
    return RayGenerations("csps/routers")


async def test_memory_counts_from_one() -> None:
    generations = MemoryGenerations()
    assert [await generations.claim() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["file", "ray"])
async def test_a_counter_continues_after_another_process(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kv(monkeypatch)
    claimed = [await counter(kind, tmp_path).claim() for _ in range(4)]
    assert claimed == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["file", "ray"])
async def test_concurrent_claims_get_different_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kv(monkeypatch)
    claims = (counter(kind, tmp_path).claim() for _ in range(24))
    claimed = await asyncio.gather(*claims)
    assert len(set(claimed)) == 24
    assert await counter(kind, tmp_path).claim() > max(claimed)


async def test_a_deleted_number_is_not_handed_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow reader's number is claimed and deleted by others before the reader claims it."""
    kv, slow, quick = Kv(monkeypatch), RayGenerations("a"), RayGenerations("a")
    await quick.claim()
    numbers = slow._numbers

    def stale() -> list[int]:
        slow._numbers = numbers  # type: ignore[method-assign]
        seen = numbers()
        assert quick._claim() == 2
        assert quick._claim() == 3
        return seen

    slow._numbers = stale  # type: ignore[method-assign]
    assert await slow.claim() == 4
    assert await quick.claim() == 5
    assert len(kv.keys) == 1, "old keys are tidied away"


@pytest.mark.parametrize("kind", ["memory", "file", "ray"])
async def test_a_priority_is_seen_by_all_until_it_is_released(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kv(monkeypatch)
    memory = MemoryGenerations()
    here, there = (memory if kind == "memory" else counter(kind, tmp_path) for _ in range(2))
    await here.claim()
    await here.publish_heartbeat(1, 1)
    await here.publish_heartbeat(12, 5)
    await here.publish_heartbeat(1, 2)
    assert await there.heartbeats() == {1: 2, 12: 5}
    await there.withdraw_heartbeat(1)
    await there.withdraw_heartbeat(1)
    assert await here.heartbeats() == {12: 5}
    assert await there.claim() == 2, "counting has nothing to do with it"


async def test_applications_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    Kv(monkeypatch)
    assert await RayGenerations("a/routers").claim() == 1
    assert await RayGenerations("b/routers").claim() == 1

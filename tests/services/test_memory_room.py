"""Ranks that wait for main memory until the former rollout's gangs have ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from csps.protocols.core.errors import ConfigError, FaultError
from csps.protocols.gang.members import GangRole
from csps.services.cluster.membership import Census, StaticDirectory
from csps.services.deployments import gang_rank
from csps.services.deployments.gang_rank import _wait_for_room
from csps.services.launch import preflight
from csps.services.planning.machine import GIB, MainMemory
from csps.services.settings.settings import Settings

DEADLINE_S = 60.0
PLENTY, LITTLE = 10**6 * GIB, 0


class Registry(StaticDirectory):
    """A registry of which each question gets the next answer, the last one for good."""

    def __init__(self, *answers: Census | Exception) -> None:
        super().__init__()
        self._answers = list(answers)
        self.asked = 0

    async def census(self) -> Census:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def census(*outdated: str, settled: bool = True) -> Census:
    return Census(begun=frozenset[GangRole](), outdated=outdated, settled=settled)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of this machine."""
    sizes = {"total": PLENTY, "available": LITTLE}
    monkeypatch.setattr(preflight, "main_memory", lambda root: MainMemory(**sizes))
    monkeypatch.setattr(gang_rank, "ROOM_POLL_S", 0.0)
    return sizes


@pytest.fixture
def settings(tiny_llama: Path) -> Settings:
    return Settings(model=str(tiny_llama))


async def test_enough_memory_asks_nobody(memory: dict[str, int], settings: Settings) -> None:
    memory["available"] = PLENTY
    registry = Registry(FaultError("nobody is asked"))
    await _wait_for_room(settings, registry)
    assert not registry.asked


async def test_memory_that_former_gangs_take_is_waited_for(
    memory: dict[str, int], settings: Settings
) -> None:
    registry = Registry(FaultError("being replaced"), census(settled=False), census("a"))
    waiting = asyncio.create_task(_wait_for_room(settings, registry))
    async with asyncio.timeout(DEADLINE_S):
        while registry.asked < 10:  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(0)
        assert not waiting.done()
        memory["available"] = PLENTY
        await waiting


async def test_a_gang_whose_memory_nobody_takes_starts_with_what_there_is(
    memory: dict[str, int], settings: Settings
) -> None:
    await asyncio.wait_for(_wait_for_room(settings, Registry(census("a"), census())), DEADLINE_S)


async def test_a_gang_that_would_not_fit_alone_fails(
    memory: dict[str, int], settings: Settings
) -> None:
    memory["total"] = LITTLE
    with pytest.raises(ConfigError, match=r"^this machine has 0\.0 GiB of memory, but"):
        await asyncio.wait_for(_wait_for_room(settings, Registry(census("a"))), DEADLINE_S)

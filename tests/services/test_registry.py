"""The registry's polls: answered by news, ended by time, never stuck."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from csps.protocols.core.errors import DeadlineExceeded
from csps.protocols.gang.members import RankAddress
from csps.services.cluster import registry as module
from csps.services.cluster.membership import Member
from csps.services.cluster.registry import Registry, RegistryDirectory


def member(rank: int) -> Member:
    address = RankAddress(rank=rank, host="127.0.0.1", port=1000 + rank)
    replica = f"actor {rank}"
    return Member(role="decode", gang_id="a", world_size=2, address=address, replica=replica)


async def test_a_new_reader_gets_the_view_at_once() -> None:
    _, view = await Registry().wait_change(-1)
    assert view.prefill is view.decode is None


async def test_a_poll_is_answered_when_a_gang_is_complete() -> None:
    registry = Registry()
    version, _ = await registry.wait_change(-1)
    poll = asyncio.ensure_future(registry.wait_change(version))
    await registry.join(member(0))
    await registry.join(member(1))
    newer, view = await poll
    assert newer != version
    assert view.decode is not None


async def test_a_poll_without_news_ends_with_the_same_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    registry = Registry()
    version, _ = await registry.wait_change(-1)
    assert (await registry.wait_change(version))[0] == version


async def test_another_registry_has_other_versions() -> None:
    first, second = Registry(), Registry()
    assert (await first.wait_change(-1))[0] != (await second.wait_change(-1))[0]


async def test_a_rank_learns_the_address_of_its_gangs_store() -> None:
    registry = Registry()
    waiting = asyncio.ensure_future(registry.store_address("a"))
    await registry.publish_store("b", "127.0.0.1", 1, 0, "decode")
    await registry.publish_store("a", "127.0.0.1", 2, 0, "decode")
    assert await waiting == ("127.0.0.1", 2)


async def test_a_census_knows_gangs_from_the_first_sign_of_their_start() -> None:
    registry = Registry()
    assert (await registry.census(7)).begun == frozenset()
    await registry.publish_store("a", "127.0.0.1", 2, 7, "decode")
    await registry.publish_store("b", "127.0.0.1", 2, 6, "prefill")
    await registry.begin("c", 7, "elastic")
    await registry.begin("a", 7, "elastic")
    assert (await registry.census(7)).begun == {"decode", "elastic"}
    await registry.publish_store("c", "127.0.0.1", 3, 5, "elastic")
    assert await registry.store_address("c") == ("127.0.0.1", 3)
    assert (await registry.census(7)).begun == {"decode"}
    for rank in (0, 1):
        await registry.join(replace(member(rank), rollout=7))
    assert (await registry.census(7)).begun == {"decode"}
    assert (await registry.census(8)).outdated == ("a",)
    assert (await registry.census(7)).outdated == ()


async def test_a_registry_settles_once_all_ranks_have_had_time_to_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = Registry()
    assert not (await registry.census(1)).settled
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    assert (await registry.census(1)).settled


async def test_replacing_a_gang_ends_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, ended = Registry(), list[str]()
    monkeypatch.setattr(module.ray, "kill", ended.append)
    assert not await registry.replace("a"), "a registry that was just started knows no gang"
    await registry.join(member(0))
    await registry.join(member(1))
    assert await registry.replace("a")
    assert sorted(ended) == ["actor 0", "actor 1"]


class Handle:
    """A Serve handle whose registry is gone: calls wait for the next one."""

    class _Method:
        async def remote(self, *args: object) -> None:
            await asyncio.Event().wait()

    wait_change = _Method()


async def test_a_poll_of_a_registry_that_is_gone_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("POLL_S", "ANSWER_S"):
        monkeypatch.setattr(module, name, 0.01)
    with pytest.raises(DeadlineExceeded, match="a poll of the registry"):
        await RegistryDirectory(Handle(), 0).wait_change(-1)  # type: ignore[arg-type]

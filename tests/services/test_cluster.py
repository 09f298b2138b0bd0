"""Attaching, linking, losing and finding gangs again, over real RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cluster_waits import linked
from fake_gangs import PATIENCE_S, SECRET, FakeGang, loop_iterations, until

from csps.protocols.gang import members
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import GangMembers, RankAddress
from csps.protocols.gang.messages import LinkBroken
from csps.protocols.rpc.schema import unpack
from csps.services.cluster import attachment, fencing
from csps.services.cluster.attachment import STANDBY, UNUSABLE, Cluster, ClusterDeadlines
from csps.services.cluster.fencing import Generations, MemoryGenerations
from csps.services.cluster.kv_links import KvLink
from csps.services.cluster.membership import ClusterView, Directory, StaticDirectory


@pytest.fixture(autouse=True)
def _leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen leases: a test's process may stand still for longer than a holder may."""
    for module in (members, fencing):
        monkeypatch.setattr(module, "LIVENESS_TIMEOUT_S", 600.0)


@dataclass
class Log:
    """A listener that remembers what it was told."""

    cluster: Cluster
    facts: list[str] = field(default_factory=list)
    """Gangs and links that came up and went down, in order."""
    links: list[KvLink] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    notifications: list[tuple[str, int, str]] = field(default_factory=list)
    busy: bool = False

    def gang_up(self, gang: GangClient) -> None:
        self.facts.append(f"{gang.gang_id} up")

    def gang_down(self, gang: GangClient, reason: str) -> None:
        self.facts.append(f"{gang.gang_id} down")
        self.lost.append((gang.gang_id, reason))

    def link_up(self, link: KvLink) -> None:
        self.facts.append("link up")
        self.links.append(link)

    def link_down(self, link: KvLink, reason: str) -> None:
        self.facts.append("link down")
        assert link is self.links[-1]

    def stands_by(self, waits: bool) -> None:
        self.facts.append("stands by" if waits else "stands by no more")

    def notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        self.notifications.append((gang.gang_id, rank, method))
        if method == "link_broken":
            self.cluster.link_broken(gang, unpack(LinkBroken, payload))


@asynccontextmanager
async def following(
    directory: Directory,
    *gangs: FakeGang,
    generations: Generations | None = None,
    **deadlines: float,
) -> AsyncIterator[tuple[Cluster, Log]]:
    cluster = Cluster(
        directory,
        secret=SECRET,
        router_id="test",
        generations=generations or MemoryGenerations(),
        deadlines=ClusterDeadlines(**{"retry_s": 0.01, **deadlines}),
    )
    log = Log(cluster)
    cluster.listen(log)
    await cluster.start()
    try:
        yield cluster, log
    finally:
        await cluster.close()
        await asyncio.gather(*(gang.close() for gang in gangs))


async def view_of(prefill: FakeGang | None, decode: FakeGang | None) -> ClusterView:
    members = [None if gang is None else await gang.start() for gang in (prefill, decode)]
    return ClusterView(prefill=members[0], decode=members[1])


def vanished(gang_id: str, ranks: int = 2) -> GangMembers:
    """Return members at addresses where nobody listens any more."""
    addresses = [RankAddress(rank=rank, host="127.0.0.1", port=9) for rank in range(ranks)]
    return GangMembers(gang_id=gang_id, ranks=tuple(addresses))


async def test_both_gangs_are_attached_and_linked() -> None:
    prefill = FakeGang("prefill", "p1", instances=2, tp=2)
    decode = FakeGang("decode", "d1", instances=3)
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode) as (cluster, log):
        link = await linked(cluster, PATIENCE_S)
        assert log.links == [link]
        assert (cluster.generation, link.epoch) == (1, "1.1")
        assert link.prefill.instances == 2
        assert link.prefill.ranks_of(1) == range(2, 4)
        assert link.prefill.capacities == (10_000, 10_000)
        assert link.prefill.locations == ("0-0-0", "0-0-2")
        for rank in prefill.ranks + decode.ranks:
            (message,) = rank.connections
            assert message.epoch == link.epoch
            assert (message.prefill_ranks, message.decode_ranks) == (4, 3)
            assert (message.prefill_tp, message.decode_tp) == (2, 1)
            assert len(rank.attached) == 1


async def test_gangs_that_come_one_after_the_other_are_linked() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory = StaticDirectory()
    async with following(directory, prefill, decode) as (cluster, _):
        await until(lambda: cluster.trouble == "waiting for a prefill and a decode gang")
        directory.publish(await view_of(None, decode))
        await until(lambda: cluster.trouble == "waiting for a prefill gang")
        directory.publish(ClusterView(prefill=await prefill.start(), decode=decode.members))
        await linked(cluster, PATIENCE_S)


async def test_a_closed_connection_loses_the_gang_and_a_new_one_is_linked_with_the_survivor() -> (
    None
):
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("prefill", "p2")
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode, second) as (cluster, log):
        first_link = await linked(cluster, PATIENCE_S)
        await prefill.kill(1)
        await until(lambda: log.lost)
        assert log.lost[0][0] == "p1"
        assert "rank 1 of prefill gang p1" in log.lost[0][1]
        assert cluster.link is None
        await until(lambda: prefill.ranks[0].router is None)  # the rest is hung up on
        directory.publish(ClusterView(prefill=await second.start(), decode=decode.members))
        link = await linked(cluster, PATIENCE_S)
        assert link.decode is first_link.decode
        assert len(decode.leader.attached) == 1
        assert [message.epoch for message in decode.leader.connections] == [
            first_link.epoch,
            link.epoch,
        ]
        assert link.epoch != first_link.epoch
        assert set(log.facts[:2]) == {"p1 up", "d1 up"}
        assert log.facts[2:] == ["link up", "link down", "p1 down", "p2 up", "link up"]


async def test_a_gang_that_the_directory_replaces_is_detached() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("decode", "d2")
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode, second) as (cluster, log):
        await linked(cluster, PATIENCE_S)
        directory.publish(ClusterView(prefill=prefill.members, decode=await second.start()))
        await until(lambda: len(log.links) == 2)
        assert log.lost == [("d1", "gang d1 was replaced by d2")]


async def test_vanished_ranks_delay_nothing() -> None:
    prefill, decode = FakeGang("prefill", "p2"), FakeGang("decode", "d1")
    view = await view_of(prefill, decode)
    directory = StaticDirectory(ClusterView(prefill=vanished("p1"), decode=view.decode))
    async with following(directory, prefill, decode) as (cluster, _):
        await until(lambda: "cannot connect" in cluster.trouble)
        directory.publish(view)
        await linked(cluster, PATIENCE_S)


async def test_an_address_that_never_answers_is_given_up_on_news() -> None:
    """A listener accepts and stays silent: only the deadline, or news, ends the attempt."""
    prefill, decode = FakeGang("prefill", "p2"), FakeGang("decode", "d1")
    view = await view_of(prefill, decode)
    silent = await asyncio.start_server(lambda *_: asyncio.Event().wait(), "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    mute = GangMembers(gang_id="p1", ranks=(RankAddress(rank=0, host=host, port=port),))
    directory = StaticDirectory(ClusterView(prefill=mute, decode=view.decode))
    try:
        async with following(directory, prefill, decode, attach_s=600) as (cluster, _):
            await until(lambda: decode.leader.asked)
            directory.publish(view)
            await linked(cluster, PATIENCE_S)
    finally:
        silent.close()


async def test_a_link_that_misses_its_deadline_is_retried_under_a_new_epoch() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    prefill.may_connect.clear()
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode, link_s=0.05) as (cluster, _):
        await until(lambda: len(decode.leader.connections) == 2)
        prefill.may_connect.set()
        await linked(cluster, PATIENCE_S)
        epochs = [message.epoch for message in decode.leader.connections]
        assert len(set(epochs)) == len(epochs)


async def test_a_gang_lost_while_it_is_linked_ends_the_attempt() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("decode", "d2")
    prefill.may_connect.clear()
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode, second) as (cluster, log):
        await until(lambda: decode.leader.connections)
        await decode.kill(1)
        await until(lambda: log.lost)
        prefill.may_connect.set()
        directory.publish(ClusterView(prefill=prefill.members, decode=await second.start()))
        link = await linked(cluster, PATIENCE_S)
        assert link.decode.gang_id == "d2"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "other"}, "different models: model_fingerprint other against same"),
        ({"gang_id": "p9"}, "expected"),
        ({"world_size": 4}, "expected"),
    ],
)
async def test_gangs_with_different_models_are_not_linked(
    change: dict[str, Any], reason: str
) -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    view = await view_of(prefill, decode)
    for name, value in change.items():
        setattr(prefill, name, value)
    async with following(StaticDirectory(view), prefill, decode) as (cluster, _):
        await until(lambda: reason in cluster.trouble)
        assert cluster.link is None
        assert cluster.phase.endswith(f": {UNUSABLE}")


@pytest.mark.parametrize(
    ("locations", "reason"),
    [
        (["0-0-0", "0-0-1", "0-0-2", "rack0-srv1-3"], "prefill gang p1: 'rack0-srv1-3' is not a"),
        (["0-0-0", "0-0-1", "0-0-0", "0-0-1"], "prefill gang p1: topology puts both 0 and 2 at"),
        (["0-0-0", "0-1-1", "0-1-2", "0-1-3"], "rank 0 is at 0-0-0 and rank 1 at 0-1-1; allowed"),
    ],
)
async def test_a_gang_with_invalid_locations_is_not_attached(
    locations: list[str], reason: str
) -> None:
    """Requests never meet such a location, so neither a plan nor a scheduling round can fail
    on it."""
    prefill, decode = FakeGang("prefill", "p1", tp=2), FakeGang("decode", "d1")
    prefill.locations = locations
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode) as (cluster, log):
        await until(lambda: reason in cluster.trouble)
        assert "p1 up" not in log.facts
        assert not prefill.leader.attached
        assert not log.links
        assert cluster.phase == f"waiting for a prefill gang: {UNUSABLE}"


async def test_a_corrected_mistake_is_not_reported_any_more() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("prefill", "p2")
    prefill.fingerprint = "other"
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode, second) as (cluster, log):
        await until(lambda: cluster.phase == f"connecting the gangs: {UNUSABLE}")
        directory.publish(ClusterView(prefill=await second.start(), decode=decode.members))
        await linked(cluster, PATIENCE_S)
        assert cluster.phase == ""
        await second.kill(0)
        await until(lambda: log.lost[-1][0] == "p2")
        assert cluster.phase == "waiting for a prefill gang"


async def test_ranks_of_the_wrong_role_are_refused() -> None:
    first, second = FakeGang("decode", "d1"), FakeGang("decode", "d2")
    view = ClusterView(prefill=await first.start(), decode=await second.start())
    async with following(StaticDirectory(view), first, second) as (cluster, _):
        await until(lambda: "is a decode rank; allowed are prefill" in cluster.trouble)


async def test_a_reset_gang_is_attached_again_under_another_name() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode) as (cluster, log):
        link = await linked(cluster, PATIENCE_S)
        link.prefill.disconnect("it is silent")
        await until(lambda: log.lost == [("p1", "it is silent")])
        await linked(cluster, PATIENCE_S)
        assert len(set(prefill.leader.attached)) == 2
        assert len(decode.leader.attached) == 1


async def test_notifications_of_a_detached_gang_are_dropped() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode) as (cluster, log):
        link = await linked(cluster, PATIENCE_S)
        prefill.sample(1, 0)
        await until(lambda: log.notifications == [("p1", 1, "tokens")])
        prefill.sample(1, 1)
        link.prefill.disconnect("now")
        await loop_iterations()
        assert len(log.notifications) == 1


# --- two routers --------------------------------------------------------------------------


async def test_a_successor_attaches_to_no_gang_while_the_holder_lives() -> None:
    """Not even to a new gang: the holder would lose the other gang's work."""
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("prefill", "p2")
    directory = StaticDirectory(await view_of(prefill, decode))
    shared = MemoryGenerations()
    async with following(directory, prefill, decode, second, generations=shared) as (holder, log):
        await linked(holder, PATIENCE_S)
        late = StaticDirectory(ClusterView(prefill=prefill.members, decode=decode.members))
        async with following(late, generations=shared) as (successor, second_log):
            await until(lambda: successor.phase.endswith(STANDBY))
            assert second_log.facts == ["stands by"]
            await prefill.kill(0)
            late.publish(ClusterView(prefill=await second.start(), decode=decode.members))
            await until(lambda: second.leader.asked)
            asked = second.leader.asked
            await until(lambda: second.leader.asked > asked + 2)
            assert not second.leader.attached
            directory.publish(ClusterView(prefill=second.members, decode=decode.members))
            await linked(holder, PATIENCE_S)
            assert [gang_id for gang_id, _ in log.lost] == ["p1"]
            assert holder.generation == 1
            await holder.close()
            link = await linked(successor, PATIENCE_S)
            assert link.epoch == "2.1"
            await until(lambda: "stands by no more" in second_log.facts)


async def test_a_router_whose_requests_lost_their_gangs_has_takeover_priority() -> None:
    """A redeployment replaces the ranks: nobody holds the new ones yet, and the successor learns of
    them before the router that has streams to finish."""
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("prefill", "p2"), FakeGang("decode", "d2")
    directory = StaticDirectory(await view_of(prefill, decode))
    shared = MemoryGenerations()
    async with following(directory, prefill, decode, *second, generations=shared) as (older, log):
        await linked(older, PATIENCE_S)
        log.busy = True
        late = StaticDirectory()
        async with following(late, generations=shared) as (successor, _):
            await until(lambda: successor.generation == 2)
            await prefill.kill(0)
            await decode.kill(0)
            await until(lambda: len(log.lost) == 2)
            view = await view_of(*second)
            late.publish(view)
            await until(lambda: successor.phase.endswith(STANDBY))
            directory.publish(view)
            link = await linked(older, PATIENCE_S)
            assert (link.prefill.gang_id, older.generation) == ("p2", 1)
            assert successor.phase.endswith(STANDBY)
            await older.close()
            assert (await linked(successor, PATIENCE_S)).epoch.startswith("2.")


async def test_a_router_with_requests_attaches_to_no_other_model() -> None:
    """The router leaves the new gangs to its successor."""
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = [
        FakeGang(role, gang_id, fingerprint="another")
        for role, gang_id in (("prefill", "p2"), ("decode", "d2"))
    ]
    directory = StaticDirectory(await view_of(prefill, decode))
    shared = MemoryGenerations()
    async with following(directory, prefill, decode, *second, generations=shared) as (older, log):
        await linked(older, PATIENCE_S)
        log.busy = True
        await prefill.kill(0)
        await decode.kill(0)
        directory.publish(await view_of(*second))
        await until(lambda: older.phase.endswith(UNUSABLE))
        asked = second[0].leader.asked
        await until(lambda: second[0].leader.asked > asked + 2)
        for rank in (*second[0].ranks, *second[1].ranks):
            assert rank.fence.generation == 0, "it has held none of them, however briefly"
        async with following(directory, generations=shared) as (successor, _):
            await linked(successor, PATIENCE_S)
        assert len(log.links) == 1
        log.busy = False
        await linked(older, PATIENCE_S)


async def test_a_silent_holder_is_superseded_and_waits_for_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory = StaticDirectory(await view_of(prefill, decode))
    shared = MemoryGenerations()
    async with following(directory, prefill, decode, generations=shared) as (silent, log):
        await linked(silent, PATIENCE_S)
        with monkeypatch.context() as impatient:
            impatient.setattr(members, "LIVENESS_TIMEOUT_S", 0.0)
            async with following(directory, generations=shared) as (successor, successor_log):
                await until(lambda: successor.link is not None)
                impatient.undo()
                await until(lambda: len(log.lost) == 2)
                await until(lambda: silent.phase.endswith(STANDBY))
                await until(lambda: silent.generation == 3)
                await loop_iterations()
                assert not successor_log.lost, (
                    "the two do not take the gangs from each other for ever"
                )
        await linked(silent, PATIENCE_S)


async def test_a_draining_router_keeps_its_gangs_and_takes_no_new_ones() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    second = FakeGang("decode", "d2")
    directory = StaticDirectory(await view_of(prefill, decode))
    async with following(directory, prefill, decode, second) as (cluster, log):
        link = await linked(cluster, PATIENCE_S)
        cluster.drain()
        directory.publish(ClusterView(prefill=prefill.members, decode=await second.start()))
        await loop_iterations()
        assert cluster.link is link
        assert not log.lost
        await decode.kill(0)
        await until(lambda: log.lost)
        await loop_iterations()
        assert not second.leader.attached


async def test_an_older_gang_does_not_replace_a_newer_one() -> None:
    """A restarted directory may learn of the dying gang first."""
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d2")
    old = FakeGang("decode", "d1")
    view = await view_of(prefill, decode)
    newest = replace(decode.members, incarnation=2)
    directory = StaticDirectory(replace(view, decode=newest))
    async with following(directory, prefill, decode, old) as (cluster, log):
        link = await linked(cluster, PATIENCE_S)
        directory.publish(replace(view, decode=replace(await old.start(), incarnation=1)))
        await loop_iterations()
        directory.publish(replace(view, decode=newest))
        await loop_iterations()
        assert cluster.link is link
        assert not log.lost


def test_members_are_complete() -> None:
    with pytest.raises(ValueError, match="not complete"):
        GangMembers(gang_id="g", ranks=(RankAddress(rank=1, host="h", port=1),))
    with pytest.raises(ValueError, match="no ranks"):
        GangMembers(gang_id="g", ranks=())


# --- a router that is cut off from Ray -------------------------------------------------------


class Unreachable(MemoryGenerations):
    """A store that hangs once it is told to."""

    hangs = False

    async def heartbeats(self) -> dict[int, int]:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().heartbeats()


async def test_a_broken_link_is_made_again_without_the_store_of_generations() -> None:
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory, store = StaticDirectory(await view_of(prefill, decode)), Unreachable()
    async with following(directory, prefill, decode, generations=store) as (cluster, log):
        first = await linked(cluster, PATIENCE_S)
        store.hangs = True
        broken = LinkBroken(epoch=first.epoch, rank=0, reason="its peer")
        decode.leader.notify("link_broken", broken)
        await until(lambda: len(log.links) == 2)
        assert not log.lost


async def test_a_store_of_generations_that_hangs_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fencing, "STORE_S", 0.05)
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory, store = StaticDirectory(await view_of(prefill, decode)), Unreachable()
    store.hangs = True
    async with following(directory, prefill, decode, generations=store) as (cluster, _):
        await until(lambda: "store of router generations did not finish" in cluster.trouble)
        store.hangs = False
        await linked(cluster, PATIENCE_S)


class Failing(StaticDirectory):
    """A directory that fails once it is told to."""

    fails = False

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        if self.fails:
            raise ConnectionError("no registry")
        return await super().wait_change(version)


async def test_a_router_cut_off_from_ray_leaves_its_gangs_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It serves on as long as no other router asks for them."""
    monkeypatch.setattr(attachment, "KEEP_ALIVE_S", 0.01)
    prefill, decode = FakeGang("prefill", "p1"), FakeGang("decode", "d1")
    directory, shared = Failing(await view_of(prefill, decode)), MemoryGenerations()
    cut_off = following(directory, prefill, decode, generations=shared, silence_s=0.1)
    async with cut_off as (older, log):
        await linked(older, PATIENCE_S)
        fence = decode.leader.fence
        directory.fails = True
        directory.publish(directory._view)
        await until(lambda: older._reconciler.failing_s > 0.1)
        stopped = fence._last_heartbeat
        await until(lambda: older._reconciler.failing_s > 0.3)
        assert fence._last_heartbeat == stopped
        assert older.link is not None
        assert not log.lost
        monkeypatch.setattr(members, "LIVENESS_TIMEOUT_S", 0.0)
        late = StaticDirectory(directory._view)
        async with following(late, generations=shared) as (successor, _):
            await until(lambda: successor.link is not None)
            await until(lambda: len(log.lost) == 2)

"""The stand-in for NCCL refuses what NCCL would, and the mesh does nothing of that kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import strict_group
import torch
from mesh_threads import on_ranks
from strict_group import EVERY_RULE, BrokenRule, Rule, StrictGroup, strict
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from csps.actors.comm import process_group
from csps.actors.comm.mesh import ControlTag, Mesh, Tag
from csps.actors.comm.process_group import ABORT_HANGS, InstanceGroup, LaunchOrder, PeerLost
from csps.actors.comm.transfers import Label, Transfers
from csps.actors.timing.timeline import StepClock


def groups(body: Callable[[Any, int], Any], rules: frozenset[Rule] = EVERY_RULE) -> list[Any]:
    """Return what `body(group, rank)` returns on two ranks of one communicator."""
    return on_ranks(2, lambda mesh: body(mesh._data.group, mesh.rank), strict(rules))


def test_tags_mean_nothing() -> None:
    def body(group: Any, rank: int) -> list[float]:
        if rank == 0:
            for number, tag in ((1.0, 7), (2.0, 3)):
                group.send([torch.tensor([number])], 1, tag).wait()
            return []
        room = [torch.zeros(1), torch.zeros(1)]
        for buffer, tag in zip(room, (3, 7), strict=True):
            group.recv([buffer], 0, tag).wait()
        return [float(buffer) for buffer in room]

    assert groups(body)[1] == [1.0, 2.0]


def test_a_buffer_holds_garbage_until_it_was_waited_for() -> None:
    def body(group: Any, rank: int) -> bool:
        if rank == 0:
            group.send([torch.ones(2)], 1, 0).wait()
            return True
        room = torch.zeros(2)
        work = group.recv([room], 0, 0)
        work.call.done.result(60)  # it has arrived
        poisoned = bool(room.isnan().all())
        work.wait()
        return poisoned and room.tolist() == [1.0, 1.0]

    assert groups(body) == [True, True]


def test_a_group_ends_when_all_its_parts_have() -> None:
    may_send = threading.Event()

    def body(group: Any, rank: int) -> bool:
        if rank == 0:
            group.send([torch.ones(1)], 1, 0).wait()
            may_send.wait(60)
            group.send([torch.ones(1)], 1, 0).wait()
            return True
        room = torch.zeros(2, 1)
        group._start_coalescing()
        for buffer in room:
            group.recv([buffer], 0, 0)
        work = group._end_coalescing()
        done_early = work.call.done.done()
        may_send.set()
        work.wait()
        return not done_early and room.tolist() == [[1.0], [1.0]]

    assert groups(body) == [True, True]


def test_calls_wait_for_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that begin with different calls hang under NCCL; under gloo's tags they would not."""
    monkeypatch.setattr(strict_group, "HANG", timedelta(seconds=0.3))

    def body(group: Any, rank: int) -> None:
        room, mine = torch.zeros(1), torch.ones(1)
        first = group.recv([room], 1 - rank, 0)
        group.send([mine], 1 - rank, 1)
        first.wait()

    with pytest.raises(RuntimeError):
        groups(body)


def test_after_abort_a_wait_succeeds_with_garbage() -> None:
    def body(group: Any, rank: int) -> bool:
        if rank == 0:
            return True
        room = torch.zeros(1)
        work = group.recv([room], 0, 0)
        group.abort()
        return bool(work.wait()) and bool(room.isnan().all())

    assert groups(body) == [True, True]


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        (Rule.NO_DEADLINE, lambda group: group.send([torch.ones(1)], 1, 0).wait(timedelta(1))),
        (Rule.DEVICE, lambda group: group.send([torch.ones(1, device="meta")], 1, 0)),
        (Rule.DEVICE, lambda group: group.send([torch.ones(4, 4).T], 1, 0)),
        (Rule.ONE_THREAD, lambda group: _from_another_thread(group)),
    ],
)
def test_a_broken_rule_is_named(rule: Rule, call: Callable[[Any], None]) -> None:
    def body(group: Any, rank: int) -> None:
        if rank == 0:
            with pytest.raises(BrokenRule, match=rule.name):
                call(group)

    groups(body)


def _from_another_thread(group: Any) -> None:
    caught: list[BaseException] = []
    group.recv([torch.ones(1)], 1, 0)

    def run() -> None:
        try:
            group.recv([torch.ones(1)], 1, 0)
        except BrokenRule as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise caught[0]


def test_a_communicator_of_a_device_without_an_index_is_refused() -> None:
    def body(group: Any, rank: int) -> None:
        with pytest.raises(BrokenRule, match="INDEXED_DEVICE"):
            group.eager_connect_single_device(torch.device("cuda"))
        group.eager_connect_single_device(torch.device("cuda", 0))

    groups(body)


# --- the mesh ------------------------------------------------------------------------------------


def _swap(mesh: Mesh) -> list[float]:
    room = torch.zeros(1)
    other = 1 - mesh.rank
    sent = torch.tensor([float(mesh.rank)])
    mesh.exchange([(other, sent)], [(other, room)], Tag.ROWS).wait()
    return room.tolist()


def test_exchanges_keep_all_rules() -> None:
    assert on_ranks(2, _swap, strict()) == [[1.0], [0.0]]


def test_the_first_exchange_may_be_of_a_part_of_the_gang() -> None:
    """All ranks connect when the mesh is made."""

    def body(mesh: Mesh) -> list[float]:
        return _swap(mesh) if mesh.rank < 2 else []

    assert on_ranks(3, body, strict()) == [[1.0], [0.0], []]


def test_gang_and_instance_connect_the_current_device_by_its_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL makes a communicator for the index that it is given, and looks for that of a tensor's
    device at the first exchange."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    connected: list[torch.device] = []
    connect = StrictGroup.eager_connect_single_device

    def noted(group: StrictGroup, device: torch.device) -> None:
        connect(group, device)
        connected.append(device)

    monkeypatch.setattr(StrictGroup, "eager_connect_single_device", noted)
    store = HashStore()

    def body(mesh: Mesh) -> torch.device:
        group = InstanceGroup(
            store,
            name="tp",
            rank=mesh.rank,
            size=2,
            device="cuda",
            host="127.0.0.1",
            data_group=strict(),
        )
        group.close()
        return mesh.device

    third = torch.device("cuda", 3)
    assert on_ranks(2, body, strict(), device="cuda") == [third, third]
    assert connected == [third] * 4


def test_control_messages_do_not_wait_behind_data() -> None:
    """Rank 0 posts data that arrives only after a control message has."""

    def body(mesh: Mesh) -> list[float]:
        words = torch.zeros(1, dtype=torch.int64)
        if mesh.rank == 0:
            room = torch.zeros(1)
            data = mesh.exchange([], [(1, room)], Tag.ROWS)
            mesh.send(words, 1, ControlTag.DECODE_TOKEN).wait()
            data.wait()
            return room.tolist()
        mesh.recv(words, 0, ControlTag.DECODE_TOKEN).wait()
        mesh.exchange([(0, torch.ones(1))], [], Tag.ROWS).wait()
        return []

    assert on_ranks(2, body, strict()) == [[1.0], []]


def test_a_wait_of_a_closed_mesh_is_no_success() -> None:
    """NCCL's would be: what was received is garbage and must not be used."""

    def body(mesh: Mesh) -> Tensor | None:
        if mesh.rank == 0:
            return None
        pending = mesh.exchange([], [(0, torch.zeros(1))], Tag.ROWS)
        mesh.close()
        with pytest.raises(PeerLost, match="closed"):
            pending.wait()
        return None

    on_ranks(2, body, strict())


def test_what_is_received_is_passed_on_by_the_thread_that_computes() -> None:
    """The thread does not wait for the receive: both are on the communicator's stream."""

    def body(mesh: Mesh) -> list[float]:
        label, room = Label(phase="relay", layer=0), torch.zeros(2)
        with Transfers(mesh, StepClock()) as transfers:
            if mesh.rank == 0:
                transfers.start([(1, torch.tensor([1.0, 2.0]))], [], Tag.ROWS, label)
            elif mesh.rank == 1:
                arrival = transfers.start([], [(0, room)], Tag.ROWS, label)
                transfers.pass_on(arrival, [(2, room[1:])], Tag.RELAYED_ROWS, label)
                assert room.isnan().all()
            else:
                arrival = transfers.start([], [(1, room[1:])], Tag.RELAYED_ROWS, label)
            if mesh.rank:
                transfers.wait(arrival)
        return room.tolist()

    assert on_ranks(3, body, strict()) == [[0.0, 0.0], [1.0, 2.0], [0.0, 2.0]]


def test_an_instance_sums_by_the_same_rules() -> None:
    """The result of a wait is garbage as well when the group was closed."""
    store, summed = HashStore(), threading.Barrier(2)
    terms = [torch.ones(2), torch.full((2,), 2.0)]

    def run(rank: int) -> list[float]:
        group = InstanceGroup(
            store,
            name="tp",
            rank=rank,
            size=2,
            device="cpu",
            host="127.0.0.1",
            data_group=strict(),
        )
        total = group.all_reduce(terms[rank]).tolist()
        summed.wait(60)
        group.close()
        with pytest.raises(PeerLost, match="closed"):
            group.all_reduce(torch.ones(1))
        return cast(list[float], total)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2), timeout=60)) == [[3.0, 3.0], [3.0, 3.0]]


def test_one_thread_begins_what_goes_through_a_devices_groups() -> None:
    launches = LaunchOrder()
    fields = {"rank": 0, "device": "cpu", "host": "127.0.0.1", "launches": launches}
    mesh = Mesh(HashStore(), name="gang", world_size=1, **fields)  # type: ignore[arg-type]
    group = InstanceGroup(HashStore(), name="tp", size=1, **fields)  # type: ignore[arg-type]
    mesh.exchange([], [], Tag.ROWS)
    with ThreadPoolExecutor(1) as engine:
        engine.submit(launches.take).result(60)
        engine.submit(mesh.exchange, [], [], Tag.ROWS).result(60)
        engine.submit(group.all_reduce, torch.ones(1)).result(60)
    with pytest.raises(AssertionError, match="beside the engine's"):
        mesh.exchange([], [], Tag.ROWS)
    with pytest.raises(AssertionError, match="beside the engine's"):
        group.all_reduce(torch.ones(1))
    mesh.close()


def test_an_abort_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(process_group, "ABORT_DEADLINE", timedelta(milliseconds=10))
    monkeypatch.setattr(process_group.os, "_exit", exits.append)
    over = threading.Event()

    def body(mesh: Mesh) -> None:
        monkeypatch.setattr(mesh._data.group, "abort", lambda: over.wait(60))
        mesh.close()

    on_ranks(1, body, strict())
    over.set()
    assert exits == [ABORT_HANGS, ABORT_HANGS], "the test's own close as well"

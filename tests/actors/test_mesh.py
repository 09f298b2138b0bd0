"""Groups of ranks: messages match in order, and no rank waits for a lost one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from black_holes import sockets_of, swallow
from mesh_threads import on_ranks
from torch._C._distributed_c10d import HashStore

from csps.actors.comm import process_group
from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.process_group import (
    IDLE,
    PEER_DEADLINE,
    InstanceGroup,
    PeerLost,
    Pending,
    TorchGroup,
)
from csps.actors.comm.rendezvous import JOIN_DEADLINE
from csps.protocols.rpc import wire

JOIN_S = 60.0


def send(mesh: Mesh, tensor: torch.Tensor, peer: int, tag: Tag) -> Pending:
    return mesh.exchange([(peer, tensor)], [], tag)


def recv(mesh: Mesh, tensor: torch.Tensor, peer: int, tag: Tag) -> Pending:
    return mesh.exchange([], [(peer, tensor)], tag)


def test_messages_of_one_tag_arrive_in_order_whatever_other_tags_do() -> None:
    def body(mesh: Mesh) -> list[float]:
        peer = 1 - mesh.rank
        sends = [send(mesh, torch.tensor([float(i)]), peer, Tag.HISTORY) for i in range(3)]
        sends.append(send(mesh, torch.tensor([9.0]), peer, Tag.KV_MOVE))
        other, first, second = torch.empty(1), torch.empty(1), torch.empty(1)
        recv(mesh, other, peer, Tag.KV_MOVE).wait()
        recv(mesh, first, peer, Tag.HISTORY).wait()
        third = torch.empty(1)
        recv(mesh, second, peer, Tag.HISTORY).wait()
        recv(mesh, third, peer, Tag.HISTORY).wait()
        for sending in sends:
            sending.wait()
        return [other.item(), first.item(), second.item(), third.item()]

    assert on_ranks(2, body) == [[9.0, 0.0, 1.0, 2.0]] * 2


def test_an_exchange_leaves_out_what_is_empty() -> None:
    def body(mesh: Mesh) -> torch.Tensor:
        peer, got = 1 - mesh.rank, torch.zeros(2)
        nothing = torch.empty(0, 3)
        mesh.exchange(
            [(peer, nothing), (peer, torch.full((2,), float(mesh.rank)))],
            [(peer, nothing), (peer, got)],
            Tag.HISTORY,
        ).wait()
        return got

    zeros, ones = on_ranks(2, body)
    assert zeros.tolist() == [1.0, 1.0]
    assert ones.tolist() == [0.0, 0.0]


def waiting(operation: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Return an operation that waits in a thread, and the error with which it fails."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            operation()
        except RuntimeError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_closing_wakes_waiters_here_and_at_peers_and_leaves_the_others_alone() -> None:
    barrier = threading.Barrier(3)

    def body(mesh: Mesh) -> bool:
        waiter = None
        if mesh.rank == 0:  # waits for 2 on its own mesh, which it closes
            waiter = waiting(lambda: recv(mesh, torch.empty(1), 2, Tag.HISTORY).wait(IDLE))
        if mesh.rank == 1:  # waits for 0, which goes
            waiter = waiting(lambda: recv(mesh, torch.empty(1), 0, Tag.HISTORY).wait(IDLE))
        barrier.wait()
        if mesh.rank == 0:
            mesh.close()
        if waiter is not None:
            thread, errors = waiter
            thread.join(JOIN_S)
            assert not thread.is_alive()
            assert len(errors) == 1
        barrier.wait()
        if mesh.rank == 1:
            send(mesh, torch.ones(1), 2, Tag.HISTORY).wait()
        if mesh.rank == 2:
            got = torch.zeros(1)
            recv(mesh, got, 1, Tag.HISTORY).wait()
            return bool(got.item())
        return True

    assert on_ranks(3, body) == [True] * 3


def test_closing_a_world_of_one_and_closing_twice() -> None:
    def body(mesh: Mesh) -> None:
        mesh.close()
        mesh.close()

    on_ranks(1, body)
    on_ranks(2, body)


def test_an_instance_sums_and_waits_longer_than_it_may_take_to_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of an instance drift apart by the length of a layer."""
    deadlines: list[timedelta] = []
    make = process_group.gloo_group

    def noted(*arguments: Any) -> TorchGroup:
        group = make(*arguments)
        deadlines.append(cast(Any, group).options._timeout)
        return group

    monkeypatch.setattr(process_group, "gloo_group", noted)
    store = HashStore()
    groups: dict[int, InstanceGroup] = {}

    def form(rank: int) -> None:
        groups[rank] = InstanceGroup(
            store, name="tp", rank=rank, size=2, device="cpu", host="127.0.0.1"
        )

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    total = torch.full((3,), 1.0)
    thread, errors = waiting(lambda: groups[0].all_reduce(total))
    groups[1].all_reduce(torch.full((3,), 2.0))
    thread.join(JOIN_S)
    assert not errors
    assert deadlines == [PEER_DEADLINE] * 2
    assert PEER_DEADLINE > JOIN_DEADLINE
    assert total.tolist() == [3.0] * 3
    for group in groups.values():
        group.close()
    with pytest.raises(RuntimeError):
        groups[0].all_reduce(total)


def test_a_peer_whose_packets_vanish_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the kernel retransmitted for a quarter of an hour, and gloo waited for
    PEER_DEADLINE, while all ranks answered the router."""
    monkeypatch.setattr(wire, "UNACKNOWLEDGED_S", 1.0)
    others, joined = sockets_of(os.getpid()).values(), threading.Barrier(2)

    def body(mesh: Mesh) -> None:
        joined.wait(JOIN_S)
        if mesh.rank == 0:
            for descriptor, inode in sockets_of(os.getpid()).items():
                if inode not in others:
                    with socket.socket(fileno=os.dup(descriptor)) as sock:
                        swallow(sock)
        joined.wait(JOIN_S)
        send(mesh, torch.ones(1), 1 - mesh.rank, Tag.HISTORY)
        with pytest.raises(PeerLost, match=r"Connection timed out|closed by peer"):
            recv(mesh, torch.empty(1), 1 - mesh.rank, Tag.HISTORY).wait(timedelta(seconds=30))

    on_ranks(2, body)

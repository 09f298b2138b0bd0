"""Hierarchical collectives against flat ones and against plain tensor arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from rank_world import RankWorld, rank_world
from torch import Tensor

from csps.actors.comm.mesh import Mesh
from csps.actors.comm.row_collectives import (
    MakeTree,
    RowGather,
    RowReduce,
    RowShards,
    all_gather,
    flat_tree,
    server_tree,
)
from csps.actors.comm.transfers import Transfers
from csps.actors.timing.timeline import StepClock

T = TypeVar("T")

WORLD = 8
WIDTH = 5
QUICK = settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Case:
    """A group of ranks with its order, servers and numbers of rows."""

    ranks: tuple[int, ...]
    servers: tuple[int, ...]
    lengths: tuple[int, ...]
    takers: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(sum(self.lengths[:i]) for i in range(len(self.lengths) + 1))

    def shards(self, mesh: Mesh, tree: MakeTree) -> RowShards:
        return RowShards(
            mesh=mesh,
            ranks=self.ranks,
            bounds=self.bounds,
            servers=self.servers,
            takers=self.takers,
            tree=tree,
            replicas=tuple(range(len(self.ranks))),
        )

    def on_members(self, world: RankWorld, body: Callable[[Mesh], T]) -> list[T]:
        """Return what the body returns on each member; earlier byte counts are reset."""
        for mesh in world.meshes:
            mesh.bytes_sent[:] = [0] * mesh.world_size
        return world.each(len(self.ranks), lambda member: body(world.meshes[self.ranks[member]]))

    def between_servers(self, world: RankWorld) -> int:
        """Return the bytes that members sent to members of other servers."""
        return sum(
            world.meshes[rank].bytes_sent[peer]
            for rank, server in zip(self.ranks, self.servers, strict=True)
            for peer, other in zip(self.ranks, self.servers, strict=True)
            if server != other
        )


@st.composite
def cases(draw: st.DrawFn, *, all_take: bool = False) -> Case:
    size = draw(st.integers(1, WORLD))
    members = st.integers(0, size - 1)
    return Case(
        ranks=tuple(draw(st.permutations(range(WORLD)))[:size]),
        servers=tuple(sorted(draw(st.integers(0, 3)) for _ in range(size))),
        lengths=tuple(draw(st.sampled_from((0, 1, 2, 7))) for _ in range(size)),
        takers=tuple(range(size))
        if all_take
        else tuple(sorted(draw(st.sets(members, min_size=1)))),
    )


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with rank_world(WORLD) as ranks:
        yield ranks


def transfers(mesh: Mesh, *, overlap: bool = True) -> Transfers:
    return Transfers(mesh, StepClock(), overlap=overlap)


def rows_of(case: Case) -> Tensor:
    return torch.randn(case.bounds[-1], WIDTH, generator=torch.Generator().manual_seed(0))


def contributions_of(case: Case) -> Tensor:
    """Return (members, T, d) small integers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(case.ranks), case.bounds[-1], WIDTH)
    return torch.randint(-99, 99, shape, generator=generator).float()


@QUICK
@given(
    case=cases(),
    tree=st.sampled_from((flat_tree, server_tree)),
    parts=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_gathered_rows_are_the_owners_bit_for_bit(
    world: RankWorld, case: Case, tree: MakeTree, parts: int, overlap: bool
) -> None:
    rows = rows_of(case)

    def gather(mesh: Mesh) -> Tensor:
        shards = case.shards(mesh, tree)
        cut, line = tuple(shards.parts(parts)), transfers(mesh, overlap=overlap)
        with line, RowGather(shards, rows[shards.resident], cut, line) as stream:
            if shards.member in case.takers:
                for part in reversed(cut):
                    stream.wait(part)
                    assert torch.equal(stream.rows_td[part.rows], rows[part.rows])
        return stream.rows_td

    gathered = case.on_members(world, gather)
    for member in case.takers:
        assert torch.equal(gathered[member], rows)


@QUICK
@given(
    case=cases(),
    tree=st.sampled_from((flat_tree, server_tree)),
    parts=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_reduced_rows_are_the_sums_of_what_takers_gave(
    world: RankWorld, case: Case, tree: MakeTree, parts: int, overlap: bool
) -> None:
    given_mtd = contributions_of(case)
    expected = given_mtd[list(case.takers)].sum(0)

    def reduce(mesh: Mesh) -> Tensor:
        shards = case.shards(mesh, tree)
        cut, line = tuple(shards.parts(parts)), transfers(mesh, overlap=overlap)
        with line, RowReduce(shards, torch.empty(WIDTH), line) as stream:
            for part in cut:
                if shards.member in case.takers:
                    stream.add(part, given_mtd[shards.member, part.rows])
                elif part.owner == shards.member:
                    stream.collect(part)
            return stream.result()

    for member, sums in enumerate(case.on_members(world, reduce)):
        assert torch.equal(sums, expected[case.bounds[member] : case.bounds[member + 1]])


def gather_on_all(case: Case, world: RankWorld, tree: MakeTree) -> None:
    rows = rows_of(case)

    def gather(mesh: Mesh) -> None:
        shards = case.shards(mesh, tree)
        with transfers(mesh) as line:
            all_gather(shards, rows[shards.resident], line)

    case.on_members(world, gather)


def reduce_scatter(shards: RowShards, contribution_td: Tensor, transfers: Transfers) -> Tensor:
    """Return own rows' sums (t, d) of the takers' contributions (T, d); others pass an empty (0,
    d)."""
    parts = tuple(shards.parts(1))
    like_d = contribution_td.new_empty(contribution_td.shape[1])
    with RowReduce(shards, like_d, transfers) as reduce:
        for part in parts:
            if shards.member in shards.takers:
                reduce.add(part, contribution_td[part.rows])
            elif part.owner == shards.member:
                reduce.collect(part)
        return reduce.result()


def reduce_on_all(case: Case, world: RankWorld, tree: MakeTree) -> None:
    contributions = contributions_of(case)

    def reduce(mesh: Mesh) -> None:
        shards = case.shards(mesh, tree)
        with transfers(mesh) as line:
            reduce_scatter(shards, contributions[shards.member], line)

    case.on_members(world, reduce)


@QUICK
@given(case=cases(all_take=True), collective=st.sampled_from((gather_on_all, reduce_on_all)))
def test_each_row_and_each_sum_crosses_to_a_server_once(
    world: RankWorld, case: Case, collective: Callable[[Case, RankWorld, MakeTree], None]
) -> None:
    others = [len(set(case.servers) - {server}) for server in case.servers]
    crossings = sum(rows * servers for rows, servers in zip(case.lengths, others, strict=True))
    collective(case, world, server_tree)
    assert case.between_servers(world) == crossings * WIDTH * 4


@pytest.mark.parametrize("collective", [gather_on_all, reduce_on_all])
@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
def test_two_servers_exchange_one_gpus_share_of_the_flat_bytes(
    world: RankWorld, gpus: int, collective: Callable[[Case, RankWorld, MakeTree], None]
) -> None:
    members = range(2 * gpus)
    case = Case(
        ranks=tuple(members),
        servers=tuple(member // gpus for member in members),
        lengths=(4,) * len(members),
        takers=tuple(members),
    )
    between = {}
    for tree in (flat_tree, server_tree):
        collective(case, world, tree)
        between[tree] = case.between_servers(world)
    assert between[server_tree] * gpus == between[flat_tree]


def test_sums_of_half_precision_are_formed_in_fp32(world: RankWorld) -> None:
    case = Case(ranks=(0, 1, 2), servers=(0, 0, 0), lengths=(2, 0, 1), takers=(0, 1, 2))
    # bf16 has 8 bits: 256 + 1 is 256, and so is that + 1 again.
    terms = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)

    def reduce(mesh: Mesh) -> Tensor:
        shards = case.shards(mesh, flat_tree)
        with transfers(mesh) as line:
            rows = terms[shards.member].expand(3, WIDTH).contiguous()
            return reduce_scatter(shards, rows, line)

    sums = torch.cat(case.on_members(world, reduce))
    assert sums.dtype == torch.bfloat16
    assert (sums == 258).all()


def test_replicas_do_not_send_each_other_what_they_hold(world: RankWorld) -> None:
    """There are two instances of two tensor-parallel ranks, one on each server."""
    case = Case(ranks=(0, 1, 2, 3), servers=(0, 0, 1, 1), lengths=(3, 3, 2, 2), takers=(0, 1, 2, 3))
    rows = rows_of(case)

    def gather(mesh: Mesh) -> Tensor:
        plain = case.shards(mesh, server_tree)
        shards = RowShards(**{**vars(plain), "replicas": (0, 0, 1, 1)})
        assert shards.resident == (slice(0, 6) if mesh.rank < 2 else slice(6, 10))
        with transfers(mesh) as line:
            return all_gather(shards, rows[shards.resident], line)

    assert all(torch.equal(gathered, rows) for gathered in case.on_members(world, gather))
    row_bytes = WIDTH * rows.element_size()
    # Inside a server there are only the relays of the other server's rows.
    assert [mesh.bytes_sent[mesh.rank ^ 1] for mesh in world.meshes[:4]] == [
        2 * row_bytes, 2 * row_bytes, 3 * row_bytes, 3 * row_bytes
    ]  # fmt: skip


def test_near_rows_arrive_before_far_members_have_begun(world: RankWorld) -> None:
    case = Case(ranks=(0, 1, 2), servers=(0, 0, 1), lengths=(2, 2, 2), takers=(0, 1, 2))
    rows, near_done = rows_of(case), threading.Barrier(3, timeout=30)

    def gather(mesh: Mesh) -> None:
        shards = case.shards(mesh, server_tree)
        parts = tuple(shards.parts(2))
        if shards.member == 2:
            near_done.wait()
        with (
            transfers(mesh) as line,
            RowGather(shards, rows[shards.resident], parts, line) as stream,
        ):
            if shards.member != 2:
                for part in parts[:4]:
                    stream.wait(part)
                near_done.wait()

    case.on_members(world, gather)


def test_dead_peer_is_an_error_and_not_a_hang() -> None:
    """The member that would have got the dead one's rows from another gets an error as well."""
    case = Case(ranks=(0, 1, 2, 3), servers=(0, 0, 1, 1), lengths=(1,) * 4, takers=(0, 1, 2, 3))
    rows, dead = rows_of(case), 2

    def gather(mesh: Mesh) -> None:
        shards = case.shards(mesh, server_tree)
        try:
            if mesh.rank != dead:
                with pytest.raises(RuntimeError), transfers(mesh) as line:
                    all_gather(shards, rows[shards.resident], line)
        finally:
            mesh.close()

    with rank_world(4, None) as world:
        case.on_members(world, gather)

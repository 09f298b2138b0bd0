"""All-gather and reduce-scatter of rows as sequences of micro-partitions (CSPS §3.2.4, §3.2.5).

One tree per owner is used down to gather and up to reduce. Down, an owner's rows reach every member
that computes with them. Up, the members' contributions to these rows return and are summed at every
fork. The flat tree is a star. In the hierarchical tree (CSPS §3.2.4) rows enter each other server
once, through a relay rank that spreads them inside. So a server's link carries rows and sums once
instead of once per GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from csps.actors.comm.continuations import Continuation
from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.actors.timing.timeline import Phase
from csps.protocols.attention.sp_tp import MicroPartition, relay_parents
from csps.protocols.core.placement import even_share


@dataclass(frozen=True)
class RowTree:
    """Tree of members that one owner's rows reach; members are numbered in the order of the
    sequence."""

    owner: int
    parents: Mapping[int, int]
    """Parent of every member that takes the rows, except the owner, in ascending order."""

    @cached_property
    def _children(self) -> Mapping[int, tuple[int, ...]]:
        forks: dict[int, tuple[int, ...]] = {}
        for child, parent in self.parents.items():
            forks[parent] = (*forks.get(parent, ()), child)
        return forks

    def children_of(self, member: int) -> tuple[int, ...]:
        """Return the next members on the way down, ascending."""
        return self._children.get(member, ())


MakeTree = Callable[[int, Sequence[Hashable], Sequence[int]], RowTree]
"""Function (owner, server of each member, members that take the rows) that returns a tree."""


def flat_tree(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> RowTree:
    """Return a tree in which all members exchange rows and contributions with the owner itself."""
    return RowTree(owner, {member: owner for member in takers if member != owner})


def server_tree(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> RowTree:
    """Return a tree with a star inside the owner's server and one relay rank in every other server
    (`relay_parents`)."""
    return RowTree(owner, relay_parents(owner, servers, takers))


@dataclass(frozen=True, kw_only=True)
class RowShards:
    """Rows of one batch, sharded over a group: member i owns rows [bounds[i], bounds[i+1]).

    Members without rows take part. Members that compute with none of the rows (`takers` lacks them)
    may own rows all the same.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    """Mesh rank of each member, in the order of the sequence."""
    bounds: tuple[int, ...]
    servers: tuple[Hashable, ...]
    """Server of each member; equal values are the same server."""
    takers: tuple[int, ...]
    """Members that take all rows, ascending."""
    tree: MakeTree
    replicas: tuple[int, ...]
    """Replica number of each member; members with equal numbers have each other's rows from the
    start."""

    def __post_init__(self) -> None:
        sizes = {len(self.ranks), len(self.bounds) - 1, len(self.servers), len(self.replicas)}
        assert len(sizes) == 1, "ranks, bounds, servers and replicas are of different groups"
        assert list(self.bounds) == sorted(self.bounds), f"bounds {self.bounds} descend"

    @property
    def member(self) -> int:
        """Return this rank's place in the group."""
        return self.ranks.index(self.mesh.rank)

    @property
    def total_rows(self) -> int:
        """Return the number of rows of the whole batch."""
        return self.bounds[-1]

    def rows_of(self, member: int) -> slice:
        """Return the rows that a member owns."""
        return slice(self.bounds[member], self.bounds[member + 1])

    @property
    def resident(self) -> slice:
        """Return the rows that this member has from the start: its own and its replicas'."""
        alike = [m for m, label in enumerate(self.replicas) if label == self.replicas[self.member]]
        return slice(self.bounds[alike[0]], self.bounds[alike[-1] + 1])

    @cached_property
    def reduce_trees(self) -> tuple[RowTree, ...]:
        """Return, per owner, the tree of contributions to its rows."""
        return tuple(self.tree(o, self.servers, self.takers) for o in range(len(self.ranks)))

    @cached_property
    def gather_trees(self) -> tuple[RowTree, ...]:
        """Return, per owner, the tree of its rows, without members that have them already."""
        return tuple(
            self.tree(owner, self.servers, self._takers_of(owner))
            for owner in range(len(self.ranks))
        )

    def parts(self, micro_partitions: int) -> Iterator[MicroPartition]:
        """Yield every member's rows in at most `micro_partitions` parts, ascending; none is
        empty."""
        for owner in range(len(self.ranks)):
            rows = self.rows_of(owner)
            for index in range(micro_partitions):
                cut = even_share(rows.stop - rows.start, micro_partitions, index)
                if cut:
                    yield MicroPartition(
                        owner, rows.start + cut.start, rows.start + cut.stop, index
                    )

    def _takers_of(self, owner: int) -> Sequence[int]:
        return [m for m in self.takers if self.replicas[m] != self.replicas[owner] or m == owner]


class RowExchange(ABC):
    """Rows that travel between members, part by part, beside what this member computes.

    The context ends when this member has passed on what others get through it, and not later: later
    messages, also of a high-priority step, may have the same tags and must not overtake these.
    """

    def __init__(
        self, shards: RowShards, transfers: Transfers, *, phase: Phase, layer: int | None
    ) -> None:
        self._shards = shards
        self._member = shards.member
        self._transfers = transfers
        self._phase = phase
        self._layer = layer
        self._arrivals: dict[MicroPartition, PendingTransfer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish()

    @abstractmethod
    def _finish(self) -> None:
        """Wait until this member has passed on all that goes through it; may be called twice."""

    def _label(self, part: MicroPartition) -> Label:
        return Label(phase=self._phase, layer=self._layer, micro=part.index)


class RowGather(RowExchange):
    """Rows on their way to all members that compute with them.

    Everything is under way from the start, nearby members' rows first; without overlap it has
    arrived when the constructor returns. `wait` in any order, best from near to far.

    Shapes: t rows that this member has, T rows of the batch, d columns.
    """

    def __init__(
        self,
        shards: RowShards,
        resident_td: Tensor,
        parts: Sequence[MicroPartition],
        transfers: Transfers,
        *,
        layer: int | None = None,
    ) -> None:
        super().__init__(shards, transfers, phase="all-gather", layer=layer)
        self.rows_td = resident_td.new_empty(shards.total_rows, resident_td.shape[1])
        """Rows of the whole batch; undefined where no `wait` has returned."""
        self.rows_td[shards.resident] = resident_td
        self._relays: dict[MicroPartition, Continuation[None]] = {}
        with transfers.as_one():
            self._start(parts)
            if not transfers.overlap:
                self._finish()

    def wait(self, part: MicroPartition) -> None:
        """Wait until the part's rows are in `rows_td`; return at once for rows resident from the
        start.

        Raises:
            RuntimeError: a peer died.
        """
        if part in self._arrivals:
            self._transfers.wait(self._arrivals[part])

    def _finish(self) -> None:
        for part, relay in self._relays.items():
            self._transfers.join(relay, self._label(part))

    def _start(self, parts: Sequence[MicroPartition]) -> None:
        # The same order on every rank, as NCCL demands. The first parts of all owners come before
        # any second one, because arrivals are noticed in the order in which they were begun.
        parts = sorted(parts, key=lambda part: part.index)
        for part in parts:
            self._start_star(part, near=True)
        for part in parts:
            self._start_star(part, near=False)
            self._start_relay(part)

    def _start_star(self, part: MicroPartition, *, near: bool) -> None:
        """Start a part between its owner and the next members, of its own server or of others."""
        tree, servers = self._shards.gather_trees[part.owner], self._shards.servers
        children = [
            child
            for child in tree.children_of(part.owner)
            if (servers[child] == servers[part.owner]) == near
        ]
        if self._member == part.owner and children:
            self._transfers.start(self._sends(part, children), [], Tag.ROWS, self._label(part))
        elif self._member in children:
            self._arrivals[part] = self._receive(part, part.owner, Tag.ROWS)

    def _start_relay(self, part: MicroPartition) -> None:
        """Start a part between a relay rank and the members behind it."""
        tree = self._shards.gather_trees[part.owner]
        parent, children = tree.parents.get(self._member), tree.children_of(self._member)
        if parent is not None and parent != part.owner:
            self._arrivals[part] = self._receive(part, parent, Tag.RELAYED_ROWS)
        elif parent is not None and children:
            sends = self._sends(part, children)
            self._relays[part] = self._transfers.pass_on(
                self._arrivals[part], sends, Tag.RELAYED_ROWS, self._label(part)
            )

    def _sends(self, part: MicroPartition, members: Sequence[int]) -> list[tuple[int, Tensor]]:
        rows_td = self.rows_td[part.rows]
        return [(self._shards.ranks[member], rows_td) for member in members]

    def _receive(self, part: MicroPartition, member: int, tag: Tag) -> PendingTransfer:
        source = (self._shards.ranks[member], self.rows_td[part.rows])
        return self._transfers.start([], [source], tag, self._label(part))


def all_gather(shards: RowShards, resident_td: Tensor, transfers: Transfers) -> Tensor:
    """Return all rows of the batch (T, d), on every member that takes them."""
    parts = tuple(shards.parts(1))
    with RowGather(shards, resident_td, parts, transfers) as gather:
        for part in parts:
            gather.wait(part)
    return gather.rows_td


class RowReduce(RowExchange):
    """Contributions of all members that computed with the rows, on their way to the rows' owners.

    Every taker adds its contribution to every part once, all in the same order of parts; members
    that take no rows collect their own in that order. Contributions travel beside further
    computing, or, without overlap, when a member asks for its result. Sums are formed in a fixed
    order of members and in fp32 at least, so a result does not depend on the order of arrival.

    Shapes: t rows that this member owns, d columns.
    """

    def __init__(
        self,
        shards: RowShards,
        like_d: Tensor,
        transfers: Transfers,
        *,
        layer: int | None = None,
    ) -> None:
        super().__init__(shards, transfers, phase="reduce-scatter", layer=layer)
        self._like_d = like_d
        self._sums: dict[MicroPartition, Continuation[Tensor]] = {}
        self._forwards: dict[MicroPartition, Continuation[None]] = {}
        self._deferred: list[tuple[MicroPartition, Tensor | None]] = []

    def add(self, part: MicroPartition, contribution_td: Tensor) -> None:
        """Contribute to a part's rows; the tensor must not change afterwards."""
        if self._transfers.overlap:
            self._begin(part, contribution_td)
        else:
            self._deferred.append((part, contribution_td))

    def collect(self, part: MicroPartition) -> None:
        """Collect others' contributions to an own part, on a member that takes no rows. Call it at
        the part's place in the others' order, after sending all that they need from this member
        before."""
        if self._transfers.overlap:
            self._begin(part, None)
        else:
            self._deferred.append((part, None))

    def result(self) -> Tensor:
        """Return the own rows' sums (t, d), once every taker has added to all of them.

        Raises:
            RuntimeError: a peer died.
        """
        with self._transfers.as_one():
            for part, contribution_td in self._deferred:
                self._begin(part, contribution_td)
            self._deferred.clear()
            if not self._transfers.overlap:
                self._finish()
        sums = [self._sum_of(part) for part in sorted(self._sums, key=lambda part: part.start)]
        return torch.cat(sums) if sums else self._like_d.new_empty(0, len(self._like_d))

    def _sum_of(self, part: MicroPartition) -> Tensor:
        self._transfers.wait(self._arrivals[part])
        return self._transfers.join(self._sums[part], self._label(part))

    def _begin(self, part: MicroPartition, contribution_td: Tensor | None) -> None:
        tree = self._shards.reduce_trees[part.owner]
        if part.owner == self._member or tree.children_of(self._member):
            self._collect(part, contribution_td)
        else:
            assert contribution_td is not None, (
                f"member {self._member} takes no rows and must collect only its own, not {part}"
            )
            self._send_up(part, contribution_td)

    def _collect(self, part: MicroPartition, own_td: Tensor | None) -> None:
        """Sum contributions from behind this member; the owner keeps the sum, a relay rank passes
        it on."""
        children = self._shards.reduce_trees[part.owner].children_of(self._member)
        arriving = [self._like_d.new_empty(part.length, len(self._like_d)) for _ in children]
        sources = zip((self._shards.ranks[child] for child in children), arriving, strict=True)
        tag = _tag(part, self._member)
        arrival = self._transfers.start([], list(sources), tag, self._label(part))
        terms = arriving if own_td is None else [own_td, *arriving]
        self._arrivals[part] = arrival
        # Two channels: in one, a relay rank would hold back others' sums until those of its own
        # rows have come from afar.
        if part.owner == self._member:
            self._sums[part] = self._transfers.then("sums", arrival, partial(_sum, terms))
        else:
            forward = partial(self._forward, part, terms)
            self._forwards[part] = self._transfers.then("sums passed on", arrival, forward)

    def _finish(self) -> None:
        for part, forward in self._forwards.items():
            self._transfers.wait(self._arrivals[part])
            self._transfers.join(forward, self._label(part))

    def _forward(self, part: MicroPartition, terms: Sequence[Tensor]) -> None:
        self._send_up(part, _sum(terms))

    def _send_up(self, part: MicroPartition, sum_td: Tensor) -> None:
        parent = self._shards.reduce_trees[part.owner].parents[self._member]
        target, tag = (self._shards.ranks[parent], sum_td), _tag(part, parent)
        self._transfers.start([target], [], tag, self._label(part))


def _tag(part: MicroPartition, receiver: int) -> Tag:
    """Return the tag of sums: two tags, so that sums to pass on are noticed before the own ones
    arrive."""
    return Tag.ROW_SUMS if receiver == part.owner else Tag.SUMS_TO_RELAY


def _sum(terms: Sequence[Tensor]) -> Tensor:
    if len(terms) == 1:
        return terms[0]
    dtype = terms[0].dtype
    total = terms[0].to(torch.promote_types(dtype, torch.float32)) + terms[1]
    for term in terms[2:]:
        total += term
    return total.to(dtype)

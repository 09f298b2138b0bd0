"""The launches of ranks on a device, in order, and whether any timing lets them deadlock.

A device runs the calls of its communicators one after the other, in the order of the host's calls
(`csps.actors.comm.process_group`). A call ends when all its sends and receives have met those of
their peers. A rank's work between two calls needs only earlier calls. The log of all ranks' calls
therefore shows whether they can hang, without a GPU and without the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from strict_group import EVERY_RULE, Parts, strict
from torch._C._distributed_c10d import Store

from csps.actors.comm.layout import GangLayout
from csps.actors.comm.process_group import GroupMaker, TorchGroup


@dataclass(frozen=True)
class Launch:
    """One call of one rank; ranks are numbered over the gang."""

    communicator: str
    sends: tuple[tuple[int, int], ...] = ()
    """(peer, bytes)."""
    recvs: tuple[tuple[int, int], ...] = ()
    sum_of: tuple[int, ...] = ()
    """Members of a sum, this rank too."""
    bytes: int = 0
    """Size of a sum."""


Log = Mapping[int, Sequence[Launch]]
"""Launches by rank."""


class LaunchLog:
    """Notes the calls of ranks whose groups come from it."""

    def __init__(self) -> None:
        self.launches: dict[int, list[Launch]] = defaultdict(list)

    def group(self, communicator: str, members: Sequence[int]) -> GroupMaker:
        """Make groups of these ranks of the gang."""

        def make(store: Store, rank: int, size: int, host: str) -> TorchGroup:
            def note(parts: Parts) -> None:
                launch = Launch(
                    communicator,
                    sends=tuple((members[peer], size) for peer, size in parts.sends),
                    recvs=tuple((members[peer], size) for peer, size in parts.recvs),
                    sum_of=tuple(members) if parts.sums else (),
                    bytes=parts.sums,
                )
                self.launches[members[rank]].append(launch)

            return strict(EVERY_RULE, note)(store, rank, size, host)

        return make

    def groups_of(self, rank: int, layout: GangLayout) -> GroupMaker:
        """Make a rank's groups, in the order in which it does: its instance's, and the gang's."""
        everyone = list(range(layout.world_size))
        instance = layout.instance_of(rank)
        makers = iter(
            [self.group(f"tp{instance}", list(layout.ranks_of(instance)))] * (layout.tp > 1)
            + [self.group("gang", everyone)]
        )
        return lambda *group: next(makers)(*group)


class Deadlock(AssertionError):
    """Ranks wait for each other."""


class _Standing:
    """Position of a rank in its log."""

    def __init__(self, log: Sequence[Launch]) -> None:
        self._log = list(log)
        self._next = 0
        self._begin()

    def _begin(self) -> None:
        launch = self.launch
        self.sends = list(launch.sends) if launch else []
        self.recvs = list(launch.recvs) if launch else []
        self.sums = bool(launch and launch.sum_of)
        if launch and not (self.sends or self.recvs or self.sums):
            self.end()

    @property
    def launch(self) -> Launch | None:
        """Return the call under way."""
        return self._log[self._next] if self._next < len(self._log) else None

    def met(self) -> None:
        """Record that a part has ended."""
        if not (self.sends or self.recvs or self.sums):
            self.end()

    def end(self) -> None:
        """Go on to the next call."""
        self._next += 1
        self._begin()


def replay(log: Log, random: Random) -> None:
    """Let the ranks work their logs off, of what can happen next always something at random.

    Raises:
        Deadlock: nothing can happen, though ranks are under way.
        AssertionError: two sides of a message differ.
    """
    ranks = {rank: _Standing(launches) for rank, launches in log.items()}
    while any(rank.launch for rank in ranks.values()):
        possible = [rank for rank in ranks if _can_meet(ranks, rank)]
        if not possible:
            raise Deadlock(
                {rank: waiting.launch for rank, waiting in ranks.items() if waiting.launch}
            )
        _meet(ranks, random.choice(possible))


def _can_meet(ranks: Mapping[int, _Standing], rank: int) -> bool:
    own = ranks[rank]
    if own.launch is None:
        return False
    if own.sums:
        return all(_sums(ranks[peer], own.launch) for peer in own.launch.sum_of)
    return any(_takes(ranks[peer], own.launch, rank) for peer, _ in own.sends)


def _sums(peer: _Standing, launch: Launch) -> bool:
    return peer.launch is not None and peer.sums and peer.launch.communicator == launch.communicator


def _takes(peer: _Standing, launch: Launch, rank: int) -> bool:
    if peer.launch is None or peer.launch.communicator != launch.communicator:
        return False
    return any(source == rank for source, _ in peer.recvs)


def _meet(ranks: Mapping[int, _Standing], rank: int) -> None:
    own = ranks[rank]
    assert own.launch is not None
    launch = own.launch
    if own.sums:
        for peer in launch.sum_of:
            other = ranks[peer].launch
            assert other is not None
            assert other.bytes == launch.bytes, (launch, other)
            ranks[peer].end()
        return
    target, size = next(send for send in own.sends if _takes(ranks[send[0]], launch, rank))
    receiver = ranks[target]
    taken = next(recv for recv in receiver.recvs if recv[0] == rank)
    assert taken[1] == size, f"{rank} sends {target} {size} bytes, who expects {taken[1]}"
    own.sends.remove((target, size))
    receiver.recvs.remove(taken)
    own.met()
    receiver.met()

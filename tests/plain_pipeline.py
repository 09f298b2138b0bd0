"""The pipeline simulator once more, event by event and one configuration at a time.

Ranks are generators, times are floats, and nothing is an array: what the vectorised one is held to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from csps.configurator.pipeline.program import Op
from csps.configurator.pipeline.simulate import LEAST_LEFT

EPS = 1e-15


@dataclass
class Exchange:
    """What one exchange carries over each wire: (seconds, senders, receivers)."""

    wires: dict[int, tuple[float, frozenset[int], frozenset[int]]]
    after: int = -1


@dataclass
class Plain:
    """One configuration."""

    scripts: Sequence[Sequence[tuple[Op, int]]]
    compute: Sequence[Sequence[float]]
    filler: Sequence[Sequence[float]]
    exchanges: Sequence[Exchange]
    latency: Sequence[float]
    cores_of: Sequence[int]
    cores: Sequence[float]
    loads: Sequence[Sequence[float]]
    """Cores that each wire takes of each rank's, while it carries something."""
    crowding: float

    now: float = 0.0
    begun: set[tuple[int, int]] = field(default_factory=set)
    arrived: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """By rank, exchange and wire."""
    sent: set[tuple[int, int]] = field(default_factory=set)
    """Exchange and wire that have left."""
    wire_ends: dict[tuple[int, int], float] = field(default_factory=dict)
    rank_ends: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        """To the end."""
        ranks = {rank: self._rank(rank) for rank in range(len(self.scripts))}
        left: dict[int, float] = {}
        """Seconds of computing on a core of one's own."""
        carrying: dict[int, tuple[int, float]] = {}
        for rank in list(ranks):
            self._advance(rank, ranks, left)
        while True:
            self._start(carrying)
            rates = self._rates(left, carrying)
            times = [self.now + left[rank] / rates[rank] for rank in left]
            times += [end for _, end in carrying.values()]
            times += [time for time in self.arrived.values() if time > self.now]
            if not times:
                break
            then = min(times)
            ended = [r for r in left if self.now + left[r] / rates[r] <= then + EPS * then]
            for rank in left:
                left[rank] -= (then - self.now) * rates[rank]
            self.now = then
            for rank in ended:
                del left[rank]
            for wire, (number, end) in list(carrying.items()):
                if end <= then:
                    del carrying[wire]
                    self._carried(number, wire, end)
            for rank in list(ranks):
                if rank not in left:
                    self._advance(rank, ranks, left)
        assert not ranks, "a rank waits for ever"

    def _advance(
        self, rank: int, ranks: dict[int, Iterator[float | None]], left: dict[int, float]
    ) -> None:
        try:
            seconds = next(ranks[rank])
        except StopIteration:
            del ranks[rank]
            self.rank_ends[rank] = self.now
            return
        if seconds is not None:
            left[rank] = seconds

    def _rank(self, rank: int) -> Iterator[float | None]:
        """Yields seconds to compute, or None to be asked again at the next event."""
        filler = iter([seconds for seconds in self.filler[rank] if seconds > 0])
        for op, argument in self.scripts[rank]:
            if op == Op.COMPUTE and self.compute[rank][argument] > 0:
                yield self.compute[rank][argument]
            elif op == Op.POST:
                self.begun.add((rank, argument))
            elif op == Op.FILL:
                yield from filler
            elif op == Op.WAIT:
                while not self._here(rank, argument):
                    yield next(filler, None)
            elif op == Op.STAND:
                while not (self._here(rank, argument) and self._gone(rank, argument)):
                    yield None

    def _here(self, rank: int, number: int) -> bool:
        return all(
            self.arrived.get((rank, number, wire), float("inf")) <= self.now
            for wire, (seconds, _, receivers) in self.exchanges[number].wires.items()
            if seconds > 0 and rank in receivers
        )

    def _gone(self, rank: int, number: int) -> bool:
        return all(
            (number, wire) in self.sent
            for wire, (seconds, senders, _) in self.exchanges[number].wires.items()
            if seconds > 0 and rank in senders
        )

    def _start(self, carrying: dict[int, tuple[int, float]]) -> None:
        for wire in range(len(self.latency)):
            if wire in carrying:
                continue
            queue = [
                number
                for number, exchange in enumerate(self.exchanges)
                if (number, wire) not in self.sent and exchange.wires.get(wire, (0.0,))[0] > 0
            ]
            if queue and self._can_leave(queue[0], wire):
                carrying[wire] = queue[0], self.now + self.exchanges[queue[0]].wires[wire][0]

    def _can_leave(self, number: int, wire: int) -> bool:
        exchange = self.exchanges[number]
        _, senders, receivers = exchange.wires[wire]
        begun = all((rank, number) in self.begun for rank in senders | receivers)
        return begun and (
            exchange.after < 0 or all(self._here(rank, exchange.after) for rank in senders)
        )

    def _carried(self, number: int, wire: int, end: float) -> None:
        self.sent.add((number, wire))
        self.wire_ends[number, wire] = end
        for rank in self.exchanges[number].wires[wire][2]:
            self.arrived[rank, number, wire] = end + self.latency[wire]

    def _rates(
        self, left: dict[int, float], carrying: dict[int, tuple[int, float]]
    ) -> dict[int, float]:
        rates = {}
        for rank in left:
            cores = self.cores[self.cores_of[rank]]
            active = sum(self.cores_of[other] == self.cores_of[rank] for other in left)
            load = sum(
                share
                for wire in carrying
                for end, share in enumerate(self.loads[wire])
                if self.cores_of[end] == self.cores_of[rank]
            )
            left_over = max(cores / self.crowding - load, LEAST_LEFT * cores)
            rates[rank] = 1.0 if active + load <= cores else min(1.0, left_over / active)
        return rates

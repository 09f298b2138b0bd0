"""The pipeline simulator, compared with a plain twin and with what holds of any pipeline.

The twin works event by event and one configuration at a time: ranks are generators, times are
floats, and nothing is an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.configurator.pipeline import simulate as engine
from csps.configurator.pipeline.program import Durations, Machine, Op, PipelineOutcome, Program
from csps.configurator.pipeline.simulate import LEAST_LEFT, simulate

EPS = 1e-15


@dataclass
class Exchange:
    """Load of one exchange on each wire: (seconds, senders, receivers)."""

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
    """Arrival by rank, exchange and wire."""
    sent: set[tuple[int, int]] = field(default_factory=set)
    """Exchange and wire that have left."""
    wire_ends: dict[tuple[int, int], float] = field(default_factory=dict)
    rank_ends: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        """Run to the end."""
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
        """Yield seconds to compute, or None to be asked again at the next event."""
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
            elif op == Op.BLOCK:
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


@dataclass(frozen=True)
class World:
    program: Program
    durations: Durations
    machine: Machine

    def outcome(self) -> PipelineOutcome:
        return simulate(self.program, self.durations, self.machine)

    def plain(self, c: int) -> Plain:
        ops, senders = self.program.ops_rp, self.program.senders_ewr
        plain = Plain(
            scripts=[
                [(Op(op), int(argument)) for op, argument in zip(*row, strict=True)]
                for row in zip(ops, self.program.arguments_rp, strict=True)
            ],
            compute=self.durations.compute_crk[c].tolist(),
            filler=self.durations.filler_crf[c].tolist(),
            exchanges=[
                Exchange(
                    wires={
                        wire: (
                            float(self.durations.wires_cwe[c, wire, number]),
                            _members(senders[number, wire]),
                            _members(self.program.receivers_ewr[number, wire]),
                        )
                        for wire in range(senders.shape[1])
                    },
                    after=int(self.program.after_e[number]),
                )
                for number in range(len(senders))
            ],
            latency=self.machine.latency_w.tolist(),
            cores_of=self.machine.cores_of_r.tolist(),
            cores=self.machine.cores_d.tolist(),
            loads=self.machine.loads_wr.tolist(),
            crowding=self.machine.crowding,
        )
        plain.run()
        return plain


def _members(mask: np.ndarray) -> frozenset[int]:
    return frozenset(map(int, np.flatnonzero(mask)))


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    shared_cores: bool | None = None,
    overlap: bool | None = None,
    crowded: bool = False,
) -> World:
    """Ranks that begin all exchanges in order, compute in between, and wait for what was begun.

    Args:
        overlap: every wait is filled, or, for None, some are.
        crowded: wires take cores of their ends, and too few cores are not used to the full.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, configurations = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    exchanges, columns = draw(st.integers(1, 6)), 5
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    wires = max(1, len(pairs) if draw(st.booleans()) else len(pairs) // 2)
    wire_of = {pair: number % wires for number, pair in enumerate(pairs)}
    senders = np.zeros((exchanges, wires, ranks), bool)
    receivers = np.zeros((exchanges, wires, ranks), bool)
    for number in range(exchanges):
        for (a, b), wire in wire_of.items():
            if rng.random() < 0.7:
                senders[number, wire, a] = receivers[number, wire, b] = True
    # Passed on: an earlier exchange. All have begun it by then, so that nobody waits for ever.
    after = [
        int(rng.integers(0, number)) if number and rng.random() < 0.3 else -1
        for number in range(exchanges)
    ]
    scripts = [_script(rng, exchanges, columns, overlap) for _ in range(ranks)]
    places = max(map(len, scripts))
    ops = np.full((ranks, places), int(Op.FILL))
    arguments = np.zeros((ranks, places), np.int64)
    for rank, script in enumerate(scripts):
        for place, (op, argument) in enumerate(script):
            ops[rank, place], arguments[rank, place] = op, argument

    def seconds(*shape: int) -> np.ndarray:
        """Often nothing, often alike: several things end at once."""
        drawn = rng.choice([0.0, 1.0, 2.0, 0.5], shape)
        return np.where(rng.random(shape) < 0.4, rng.random(shape), drawn)

    sharing = draw(st.booleans()) if shared_cores is None else shared_cores
    carried = (senders | receivers).any(axis=2).T
    return World(
        Program(
            ops_rp=ops,
            arguments_rp=arguments,
            senders_ewr=senders,
            receivers_ewr=receivers,
            after_e=np.array(after),
        ),
        Durations(
            compute_crk=seconds(configurations, ranks, columns),
            filler_crf=seconds(configurations, ranks, 3),
            wires_cwe=seconds(configurations, wires, exchanges) * carried,
        ),
        Machine(
            latency_w=rng.choice([0.0, 0.3], wires),
            cores_of_r=rng.integers(0, 2, ranks) if sharing else np.arange(ranks),
            cores_d=np.array([1.0, 2.0]) if sharing else np.ones(ranks),
            # Eighths, whose sums are the same in any order.
            loads_wr=(senders | receivers).any(axis=0)
            * (rng.choice([0.0, 0.375, 0.875]) * crowded),
            crowding=1.25 if crowded else 1.0,
        ),
    )


def _script(
    rng: np.random.Generator, exchanges: int, columns: int, overlap: bool | None
) -> list[tuple[Op, int]]:
    script: list[tuple[Op, int]] = []
    for number in range(exchanges):
        script += [(Op.COMPUTE, int(rng.integers(columns))) for _ in range(rng.integers(3))]
        script.append((Op.POST, number))
    waited = rng.permutation(exchanges) if rng.random() < 0.5 else range(exchanges)
    for number in waited:
        stands = not overlap and rng.random() < 0.3
        script.append((Op.BLOCK if stands else Op.WAIT, int(number)))
        script += [(Op.COMPUTE, int(rng.integers(columns))) for _ in range(rng.integers(3))]
    return [*script, (Op.FILL, 0)]


@settings(max_examples=examples(100))
@given(worlds(shared_cores=False))
def test_equals_the_plain_simulator_bit_for_bit(world: World) -> None:
    outcome = world.outcome()
    for c in range(len(outcome.ranks_cr)):
        plain = world.plain(c)
        assert [plain.rank_ends[r] for r in sorted(plain.rank_ends)] == pytest.approx(
            outcome.ranks_cr[c].tolist(), rel=1e-12, abs=1e-12
        )
        for (number, wire), end in plain.wire_ends.items():
            assert outcome.wires_cwe[c, wire, number] == pytest.approx(end, rel=1e-12)


@settings(max_examples=examples(100))
@given(st.one_of(worlds(shared_cores=True), worlds(crowded=True)))
def test_equals_the_plain_simulator_where_ranks_and_wires_share_cores(world: World) -> None:
    outcome = world.outcome()
    for c in range(len(outcome.ranks_cr)):
        plain = world.plain(c)
        expected = [plain.rank_ends[r] for r in sorted(plain.rank_ends)]
        assert outcome.ranks_cr[c].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=examples(100))
@given(worlds())
def test_makespan_is_at_least_each_resources_load(world: World) -> None:
    outcome, durations = world.outcome(), world.durations
    span_c = outcome.makespan_c * (1 + 1e-12)
    ops, arguments = world.program.ops_rp, world.program.arguments_rp
    load_cr = durations.filler_crf.sum(axis=2)
    for rank, (row, columns) in enumerate(zip(ops, arguments, strict=True)):
        computed = columns[row == Op.COMPUTE]
        load_cr[:, rank] += durations.compute_crk[:, rank][:, computed].sum(axis=1)
    assert (load_cr <= span_c[:, None]).all()
    # Each rank waits for all exchanges, so that what wires carry for it is within its time.
    carried_cw = durations.wires_cwe.sum(axis=2)
    received_w = world.program.receivers_ewr.any(axis=(0, 2))
    assert (carried_cw[:, received_w] <= span_c[:, None]).all()
    for cores in range(len(world.machine.cores_d)):
        mates = world.machine.cores_of_r == cores
        work_c = load_cr[:, mates].sum(axis=1)
        assert (work_c <= world.machine.cores_d[cores] * span_c).all()


@settings(max_examples=examples(100))
@given(worlds())
def test_nothing_leaves_before_what_comes_before_it(world: World) -> None:
    """The critical path of each exchange: what its senders compute first, then its time."""
    outcome, durations = world.outcome(), world.durations
    senders = world.program.senders_ewr
    for rank, (ops, arguments) in enumerate(
        zip(world.program.ops_rp, world.program.arguments_rp, strict=True)
    ):
        for place in np.flatnonzero(ops == Op.POST):
            number = arguments[place]
            before = arguments[:place][ops[:place] == Op.COMPUTE]
            computed_c = durations.compute_crk[:, rank][:, before].sum(axis=1)
            for wire in np.flatnonzero(senders[number, :, rank]):
                seconds_c = durations.wires_cwe[:, wire, number]
                least_c = (computed_c + seconds_c) * (1 - 1e-12)
                ended_c = outcome.wires_cwe[:, wire, number]
                assert (ended_c >= least_c)[seconds_c > 0].all()


@settings(max_examples=examples(100))
@given(worlds(shared_cores=False))
def test_wires_carry_exchanges_in_order(world: World) -> None:
    for of_wire_we in world.outcome().wires_cwe:
        for ends_e in of_wire_we:
            assert (np.diff(ends_e[~np.isnan(ends_e)]) > 0).all()


@settings(max_examples=examples(100))
@given(worlds(shared_cores=False, overlap=True), st.floats(0.0, 1.0))
def test_more_bandwidth_is_never_slower(world: World, factor: float) -> None:
    """Every wait is filled, as in the engine: a rank that blocks with filler left may be late."""
    faster = replace(
        world, durations=replace(world.durations, wires_cwe=world.durations.wires_cwe * factor)
    )
    before, after = world.outcome(), faster.outcome()
    assert (after.ranks_cr <= before.ranks_cr * (1 + 1e-12)).all()


@settings(max_examples=examples(10))
@given(worlds())
def test_configurations_are_simulated_alike_one_by_one_and_together(world: World) -> None:
    together = world.outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CELLS", 1)
        assert np.array_equal(world.outcome().ranks_cr, together.ranks_cr)


def test_a_program_that_cannot_end_is_named() -> None:
    program = Program(
        ops_rp=np.array([[Op.WAIT]] * 2),
        arguments_rp=np.zeros((2, 1), np.int64),
        senders_ewr=np.array([[[True, False]]]),
        receivers_ewr=np.array([[[False, True]]]),
        after_e=np.array([-1]),
    )
    durations = Durations(
        compute_crk=np.zeros((1, 2, 0)),
        filler_crf=np.zeros((1, 2, 0)),
        wires_cwe=np.ones((1, 1, 1)),
    )
    machine = Machine(
        latency_w=np.zeros(1),
        cores_of_r=np.arange(2),
        cores_d=np.ones(2),
        loads_wr=np.zeros((1, 2)),
    )
    with pytest.raises(AssertionError, match="cannot end"):
        simulate(program, durations, machine)

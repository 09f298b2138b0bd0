"""Decode groups: sequences without a common instance are iterated independently."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.configurator.costs.latency import DecodeCost, LinearDecodeCost
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.decode_batch import (
    IterationCost,
    SimulatedBatches,
    SimulatedMember,
)
from csps.loadgen.simulator.kernel import SimulationResult, Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.simulate import scheduler_of
from csps.loadgen.simulator.timeline import EventTimeline
from csps.protocols.core.placement import KvSlice
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOverlay, Placed

ROUND = 1_000
"""Iterations take a multiple of it, and sequences join beside it, so that no two things coincide.
"""


def cost_of(instances: tuple[int, ...]) -> IterationCost:
    """Return a cost in whole nanoseconds, which depends on everything that it may depend on."""
    unit = ROUND << 48
    line = LinearDecodeCost(a=(5 + len(instances)) * unit, b=unit, c=3 * unit)
    return IterationCost(
        decode=DecodeCost(small=line, large=line, tipping_batch=99),
        instances=len(instances),
        exchange=7 * unit,
        far_row=2 * unit,
    )


@dataclass
class _Row:
    """A sequence of the plain model."""

    at: int
    context: int
    left: int
    master: int
    ranks: frozenset[int]
    ends: list[int]


def plainly(rows: list[_Row]) -> None:
    """Iterate one by one: whatever is connected by common instances starts together, as soon as
    none of its instances iterates."""
    now, running = 0, {}  # end -> (instances, rows)
    waiting = sorted(rows, key=lambda row: row.at)
    present: list[_Row] = []
    while waiting or present:
        now = min([*running, *(row.at for row in waiting[:1])])
        if now in running:
            for row in running.pop(now)[1]:
                row.ends.append(now)
                row.context, row.left = row.context + 1, row.left - 1
            present = [row for row in present if row.left]
        while waiting and waiting[0].at <= now:
            present.append(waiting.pop(0))
        busy = frozenset().union(*(instances for instances, _ in running.values()))
        for instances in components(present):
            if busy.isdisjoint(instances):
                group = [row for row in present if row.ranks <= instances]
                end = now + iteration(group, instances)
                assert end not in running
                running[end] = instances, group


def components(rows: list[_Row]) -> list[frozenset[int]]:
    found: list[frozenset[int]] = []
    for row in rows:
        sharing = [part for part in found if part & row.ranks]
        found = [part for part in found if not part & row.ranks]
        found.append(row.ranks.union(*sharing))
    return found


def iteration(rows: list[_Row], instances: frozenset[int]) -> int:
    n = len(instances)
    busiest = max(sum(row.master == master for row in rows) for master in instances)
    far = sum(len(row.ranks) - 1 for row in rows)
    total = 5 + n + sum(row.context for row in rows) + 3 * n * busiest
    return ROUND * (total + (7 + 2 * far if far else 0))


@st.composite
def sequences(draw: st.DrawFn) -> list[_Row]:
    rows = []
    for number in range(draw(st.integers(1, 9))):
        ranks = draw(st.frozensets(st.integers(0, 3), min_size=1, max_size=3))
        rows.append(
            _Row(
                at=draw(st.integers(0, 60)) * ROUND + number + 1,
                context=draw(st.integers(1, 9)),
                left=draw(st.integers(1, 9)),
                master=draw(st.sampled_from(sorted(ranks))),
                ranks=ranks,
                ends=[],
            )
        )
    return rows


@settings(max_examples=examples(300))
@given(sequences())
def test_groups_merge_and_split_as_if_iterated_one_by_one(rows: list[_Row]) -> None:
    timeline = EventTimeline()
    ends: dict[int, list[int]] = {}
    members = [
        SimulatedMember(
            sequence=number,
            context=row.context,
            tokens=row.left,
            master=row.master,
            ranks=tuple(sorted(row.ranks)),
        )
        for number, row in enumerate(rows)
    ]

    def finished(member: SimulatedMember) -> None:
        found = [
            part.log.ends_ns(part.start, part.stop)
            for part in batches.ends_of(member, member.tokens)
        ]
        ends[member.sequence] = [end for part in found for end in part]

    batches = SimulatedBatches(timeline, cost=cost_of, finished=finished)
    for member, row in zip(members, rows, strict=True):
        timeline.at(row.at, partial(batches.join, member))
    while not timeline.empty:
        timeline.step()
    plainly(rows)
    assert ends == {number: row.ends for number, row in enumerate(rows)}
    assert batches.decoded_tokens == sum(len(row.ends) for row in rows)
    assert len(batches) == 0


def test_a_sequence_that_leaves_lets_its_group_split() -> None:
    timeline = EventTimeline()
    left: list[int] = []
    ended: dict[int, int] = {}
    batches = SimulatedBatches(
        timeline,
        cost=cost_of,
        finished=lambda member: ended.setdefault(member.sequence, timeline.now_ns),
    )
    for number, ranks in enumerate([(0,), (1,), (0, 1)]):
        member = SimulatedMember(
            sequence=number, context=1, tokens=10, master=ranks[0], ranks=ranks
        )
        timeline.at(number, partial(batches.join, member))
    timeline.at(20 * ROUND, lambda: batches.leave(2, lambda: left.append(timeline.now_ns)))
    while not timeline.empty:
        timeline.step()
    apart = [0, 0]
    for number in (0, 1):
        row = _Row(0, 1, 10, number, frozenset({number}), [])
        plainly([row])
        apart[number] = row.ends[-1]
    assert len(left) == 1
    assert left[0] > 20 * ROUND
    assert set(ended) == {0, 1}
    assert ended[0] > apart[0], "it was iterated with the others for a while"


# --- freeness ----------------------------------------------------------------------------------


def simulated(arrivals: list[Arrival], **options: Any) -> SimulationResult:
    cluster = load_cluster("tetris-16")
    scheduler = scheduler_of(cluster, "tetris", options)
    simulator = Simulator(scheduler, cluster, arrivals)
    found = simulator.run()
    simulator.gangs.check_idle()
    return found


def tpot_ns(found: SimulationResult) -> float:
    return statistics.fmean(
        (outcome.ended_ns - outcome.first_token_ns) / (outcome.generated_tokens - 1)
        for outcome in found.outcomes
    )


def test_freeness_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers on one decode instance take longer than answers spread by freeness."""
    rng = random.Random(1)
    arrivals = [
        Arrival(
            at_ns=number * 150_000_000, prompt_tokens=rng.randint(4_000, 90_000), output_tokens=400
        )
        for number in range(40)
    ]
    by_freeness = tpot_ns(simulated(arrivals))

    def first(
        self: DecodeOverlay, prompt_tokens: int, output_tokens: int, *, modest: bool = False
    ) -> Placed | None:
        total = prompt_tokens + output_tokens
        roomy = (holder.id for holder in self._holders.values() if holder.free >= total)
        holder = next(roomy, None)
        return None if holder is None else Placed((KvSlice(holder, 0, prompt_tokens),), holder)

    monkeypatch.setattr(DecodeOverlay, "place_whole", first)
    assert tpot_ns(simulated(arrivals)) > 1.05 * by_freeness


def test_a_slow_decode_instance_holds_up_no_other() -> None:
    """Where 1,000,000 tokens are attended to, iterations take twice as long."""
    long = Arrival(at_ns=0, prompt_tokens=1_000_000, output_tokens=3_000)
    short = Arrival(at_ns=60_000_000_000, prompt_tokens=5_000, output_tokens=200)
    found = simulated([long, short])
    alone = simulated([replace(short, at_ns=0)])
    beside, expected = found.outcomes[1], alone.outcomes[0]
    assert found.outcomes[0].ended_ns > beside.ended_ns, "they decode at the same time"
    gaps = [b - a for a, b in zip(beside.token_ns[2:], beside.token_ns[3:], strict=False)]
    usual = [b - a for a, b in zip(expected.token_ns[2:], expected.token_ns[3:], strict=False)]
    assert gaps == pytest.approx(usual, abs=1)

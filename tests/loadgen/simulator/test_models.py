"""Links, steps in order and decoding, each against a slower way to the same answer."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.configurator.costs.latency import DecodeCost, LinearDecodeCost
from csps.loadgen.simulator.decode_batch import IterationCost, SimulatedBatches, SimulatedMember
from csps.loadgen.simulator.step_order import SimulatedStep, StepOrder
from csps.loadgen.simulator.timeline import EventTimeline, Link


def run(timeline: EventTimeline) -> None:
    while not timeline.empty:
        timeline.step()


# --- links ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transfers", [1, 2, 7])
def test_n_equal_transfers_take_n_times_as_long(transfers: int) -> None:
    timeline = EventTimeline()
    link = Link(timeline, bytes_per_s=1_000_000_000, latency_ns=50)
    arrived: list[int] = []
    for _ in range(transfers):
        link.send(1000, lambda: arrived.append(timeline.now_ns))
    run(timeline)
    assert arrived == [transfers * 1000 + 50] * transfers


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=12).map(
        sorted
    ),
    st.integers(1, 4),
)
def test_a_shared_link_ends_transfers_when_an_exact_one_does(
    sends: list[tuple[int, int]], bytes_per_ns: int
) -> None:
    timeline = EventTimeline()
    link = Link(timeline, bytes_per_s=bytes_per_ns * 1_000_000_000)
    arrived: dict[int, int] = {}
    for index, (at, size) in enumerate(sends):

        def come(index: int = index) -> None:
            arrived[index] = timeline.now_ns

        timeline.at(at, partial(link.send, size, come))
    run(timeline)
    for index, exact in enumerate(processor_sharing(sends, bytes_per_ns)):
        # Each end on the way is rounded up to a whole nanosecond.
        assert 0 <= arrived[index] - exact <= len(sends)


def processor_sharing(sends: list[tuple[int, int]], rate: int) -> list[Fraction]:
    """Return the ends in rational arithmetic, from one change to the next."""
    left = {index: Fraction(size) for index, (_, size) in enumerate(sends)}
    ends = [Fraction(0)] * len(sends)
    now = Fraction(0)
    while left:
        active = [flow for flow in left if sends[flow][0] <= now]
        coming = [Fraction(sends[flow][0]) for flow in left if sends[flow][0] > now]
        finish = [now + left[flow] * len(active) / rate for flow in active]
        later = min([*coming, *finish])
        for flow in active:
            left[flow] -= (later - now) * rate / len(active)
            if not left[flow]:
                ends[flow] = later
                del left[flow]
        now = later
    return ends


# --- steps ---------------------------------------------------------------------------------


class Steps:
    """Records who computes what, and when."""

    def __init__(self, instances: int, quantum_ns: int = 0) -> None:
        self.timeline = EventTimeline()
        self.order = StepOrder(self.timeline, instances, quantum_ns)
        self.tasks: list[SimulatedStep] = []
        self.started: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def at(
        self, at_ns: int, members: tuple[int, ...], work_ns: int, *, high_priority: bool = False
    ) -> int:
        number = len(self.tasks)
        task = SimulatedStep(
            members=members,
            work_ns=work_ns,
            high_priority=high_priority,
            started=lambda: self.started.update({number: self.timeline.now_ns}),
            ended=lambda: self.ended.update({number: self.timeline.now_ns}),
        )
        self.tasks.append(task)
        self.timeline.at(at_ns, lambda: self.order.submit(task))
        return number

    def run(self) -> None:
        run(self.timeline)


def test_a_step_starts_when_all_its_members_have_come_to_it() -> None:
    steps = Steps(3)
    steps.at(0, (0, 1), 100)
    steps.at(0, (2,), 30)
    both = steps.at(0, (1, 2), 50)
    behind = steps.at(0, (2,), 10)
    steps.run()
    assert (steps.started[both], steps.ended[both]) == (100, 150)
    assert steps.started[behind] == 150, "an idle instance keeps the order of its steps"


def test_an_urgent_step_runs_inside_a_long_one_and_holds_up_all_of_it() -> None:
    steps = Steps(2)
    long = steps.at(0, (0, 1), 100)
    high_priority = steps.at(40, (1,), 7, high_priority=True)
    steps.run()
    assert (steps.started[high_priority], steps.ended[high_priority]) == (40, 47)
    assert steps.ended[long] == 107


def test_urgent_steps_on_two_members_hold_up_a_long_one_at_the_same_time() -> None:
    steps = Steps(2)
    long = steps.at(0, (0, 1), 100)
    steps.at(40, (0,), 20, high_priority=True)
    steps.at(45, (1,), 20, high_priority=True)
    steps.run()
    assert steps.ended[long] == 125


def test_a_long_step_is_interrupted_at_the_end_of_a_quantum() -> None:
    steps = Steps(1, quantum_ns=30)
    long = steps.at(0, (0,), 100)
    first = steps.at(40, (0,), 5, high_priority=True)
    second = steps.at(62, (0,), 5, high_priority=True)
    last = steps.at(105, (0,), 5, high_priority=True)
    steps.run()
    assert steps.started[first] == 60
    assert steps.started[second] == 65, "it stands at a quantum's end already"
    assert steps.ended[long] == 110, "the last quantum's end is the step's"
    assert steps.started[last] == 110


def test_a_withdrawn_step_ends_and_lets_others_go_on() -> None:
    steps = Steps(1, quantum_ns=30)
    running = steps.at(0, (0,), 100)
    asked = steps.at(10, (0,), 5, high_priority=True)
    waiting = steps.at(0, (0,), 100)
    last = steps.at(0, (0,), 10)
    steps.timeline.at(20, lambda: steps.order.cancel_step(steps.tasks[asked]))
    steps.timeline.at(25, lambda: steps.order.cancel_step(steps.tasks[waiting]))
    steps.timeline.at(50, lambda: steps.order.cancel_step(steps.tasks[running]))
    steps.run()
    assert asked not in steps.started
    assert waiting not in steps.started
    assert steps.ended == {asked: 20, waiting: 25, running: 50, last: 60}


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 10]))
def test_whatever_comes_everything_ends_and_no_instance_does_two_things(
    seed: int, quantum_ns: int
) -> None:
    rng = random.Random(seed)
    steps = Steps(4, quantum_ns)
    total = [0] * 4
    for _ in range(30):
        members = tuple(sorted(rng.sample(range(4), rng.choice([1, 1, 2, 3, 4]))))
        work = rng.randint(1, 40)
        steps.at(rng.randint(0, 300), members, work, high_priority=rng.random() < 0.4)
        for member in members:
            total[member] += work
    steps.run()
    assert len(steps.ended) == 30
    for number, task in enumerate(steps.tasks):
        assert steps.ended[number] - steps.started[number] >= task.work_ns
        if task.high_priority:
            assert steps.ended[number] - steps.started[number] == task.work_ns
    for high_priority in (False, True):
        for instance in range(4):
            spans = sorted(
                (steps.started[number], steps.ended[number])
                for number, task in enumerate(steps.tasks)
                if task.high_priority is high_priority and instance in task.members
            )
            assert all(a[1] <= b[0] for a, b in pairwise(spans)), "two at a time"
    assert max(steps.ended.values()) >= max(total), "work takes its time"


def test_one_instance_never_idles_while_it_has_work() -> None:
    rng = random.Random(4)
    steps = Steps(1, quantum_ns=3)
    arrivals = sorted(rng.randint(0, 2000) for _ in range(100))
    works = [rng.randint(1, 30) for _ in arrivals]
    for at, work in zip(arrivals, works, strict=True):
        steps.at(at, (0,), work, high_priority=rng.random() < 0.3)
    steps.run()
    free = 0
    for at, work in zip(arrivals, works, strict=True):
        free = max(free, at) + work
    assert max(steps.ended.values()) == free


# --- decoding ------------------------------------------------------------------------------

lines = st.builds(
    LinearDecodeCost,
    a=st.integers(0, 1 << 60),
    b=st.integers(0, 1 << 50),
    c=st.integers(0, 1 << 55),
)


@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(1, 5000), st.integers(1, 60)),
        min_size=1,
        max_size=12,
    ).map(sorted),
    st.integers(-1, 20),
    lines,
    lines,
    st.integers(0, 500),
)
def test_jumping_ahead_is_iterating(
    requests: list[tuple[int, int, int]],
    leaver: int,
    small: LinearDecodeCost,
    large: LinearDecodeCost,
    gap_ns: int,
) -> None:
    """Same ends, to the nanosecond, as one iteration after another."""
    cost = DecodeCost(small=small, large=large, tipping_batch=3)
    timeline = EventTimeline()
    ended: dict[int, int] = {}
    batch = SimulatedBatches(
        timeline,
        cost=lambda _: IterationCost(decode=cost),
        gap_ns=gap_ns,
        finished=lambda row: ended.setdefault(row.sequence, timeline.now_ns),
    )
    for number, (at, context, tokens) in enumerate(requests):
        row = SimulatedMember(sequence=number, context=context, tokens=tokens, ranks=(0,))
        timeline.at(at, partial(batch.join, row))
    leave_ns = requests[min(max(leaver, 0), len(requests) - 1)][0] + 777
    if leaver >= 0:

        def left() -> None:
            ended.setdefault(leaver, timeline.now_ns)

        timeline.at(leave_ns, partial(batch.leave, leaver, left))
    run(timeline)
    expected, tokens = iterated(requests, leaver, leave_ns, cost, gap_ns)
    assert ended == expected
    assert batch.decoded_tokens == tokens
    assert len(batch) == 0


def iterated(
    requests: list[tuple[int, int, int]],
    leaver: int,
    leave_ns: int,
    cost: DecodeCost,
    gap_ns: int,
) -> tuple[dict[int, int], int]:
    """Iterate one by one; fractions of a nanosecond persist while the batch is the same, as in a
    jump.
    """
    ended: dict[int, int] = {}
    rows: dict[int, tuple[int, int]] = {}
    coming = dict(enumerate(requests))
    leaves = {leaver: leave_ns} if leaver >= 0 else {}
    now, part, generated = 0, 0, 0
    before: tuple[int, ...] = ()
    while coming or rows or leaves:
        if not rows:
            now = max(now, min([*(entry[0] for entry in coming.values()), *leaves.values()]))
            part = 0
        changed = False
        for number, at in list(leaves.items()):
            if at <= now:
                del leaves[number]
                waiting = number in coming and coming[number][0] <= at
                if number not in rows and not waiting:
                    ended.setdefault(number, at)  # no iteration concerns it
                    continue
                changed = True
                rows.pop(number, None)
                coming.pop(number, None)
                ended.setdefault(number, now)
        for number, (at, context, tokens) in list(coming.items()):
            if at <= now:
                changed = True
                rows[number] = (context, tokens)
                del coming[number]
        if changed or tuple(rows) != before:
            part, before = 0, tuple(rows)
        if not rows:
            continue
        regime = cost.small if len(rows) <= cost.tipping_batch else cost.large
        part += regime.a + regime.b * sum(row[0] for row in rows.values()) + regime.c * len(rows)
        now, part = now + gap_ns + (part >> 48), part & ((1 << 48) - 1)
        generated += len(rows)
        rows = {number: (context + 1, left - 1) for number, (context, left) in rows.items()}
        for number, (_, left) in list(rows.items()):
            if not left:
                del rows[number]
                ended.setdefault(number, now)
    return ended, generated

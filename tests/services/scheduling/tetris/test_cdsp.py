"""Algs. 1-3 of Tetris §5.1 as they stand in the paper, corrected but not made fast.

Queue times shrink (Eq. 2) in states that are copied; there are no bounds and no memory. And all
chains of groups, tried.

Plans of chunks against the plain algorithm, all chains tried, and what Tetris' paper says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import inf, isclose, sqrt

from hypothesis import given
from hypothesis import strategies as st
from paper_tables import TETRIS_TABLE_1

from csps.configurator.costs.latency import StepCost
from csps.configurator.costs.latency_tables import TETRIS_LLAMA3_8B_A100
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, CdspChunk

Costs = Mapping[int, tuple[float, float, float, float]]
"""(a, b, c, d) by group size, in nanoseconds."""


@dataclass(frozen=True)
class Queues:
    """The instance pool P."""

    servers: tuple[tuple[int, ...], ...]
    queue: Mapping[int, float]
    """T_i of Eq. 2."""
    first: Mapping[int, float]
    """T_i at the beginning, which decides among instances that are free by now."""

    def key(self, instance: int) -> tuple[float, float, int]:
        return self.queue[instance], self.first[instance], instance

    def within(self, group: Sequence[int]) -> Queues:
        servers = tuple(
            tuple(instance for instance in server if instance in group) for server in self.servers
        )
        return replace(self, servers=tuple(filter(None, servers)))

    def later(self, elapsed: float) -> Queues:
        """Eq. 2."""
        return replace(
            self, queue={instance: max(0.0, t - elapsed) for instance, t in self.queue.items()}
        )


@dataclass(frozen=True)
class Plan:
    ttft: float
    chunks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(tokens, group)."""


def get_group(pool: Queues, initial: Sequence[int], size: int) -> tuple[int, ...]:
    """GetGroup."""
    group = list(initial)
    near = [instance for server in pool.servers if set(server) & set(group) for instance in server]
    rest = sorted(set(near) - set(group), key=pool.key)
    group += rest[: size - len(group)]
    free = [sorted(server, key=pool.key) for server in pool.servers if not set(server) & set(group)]
    while missing := size - len(group):
        fitting = [server for server in free if len(server) >= missing]
        if fitting:
            group += min(fitting, key=lambda server: pool.key(server[missing - 1]))[:missing]
            break
        whole = min(free, key=lambda server: pool.key(server[-1]))
        free.remove(whole)
        group += whole
    return tuple(sorted(group))


@dataclass
class PlainCdsp:
    """Alg. 1."""

    costs: Costs
    rate: float
    min_chunk: int
    solved: list[tuple[float, float]] = field(default_factory=list)

    def took(self, size: int, past: int, length: int) -> float:
        """Eq. 1."""
        a, b, c, d = self.costs[size]
        return a + length * (b + c * past + d * length)

    def single(
        self, left: int, past: int, held: tuple[int, ...], sizes: Sequence[int], pool: Queues
    ) -> tuple[float, tuple[int, ...]]:
        """Alg. 2, which returns the time as well."""
        best, chosen = inf, ()
        for size in sizes:
            group = get_group(pool, held, size)
            ttft = max(pool.queue[instance] for instance in group) + self.took(size, past, left)
            if ttft < best * (1.0 - self.rate):
                best, chosen = ttft, group
        return best, chosen

    def chunk(
        self, left: int, past: int, held: tuple[int, ...], now: int, then: int, pool: Queues
    ) -> tuple[int, tuple[int, ...]]:
        """Alg. 3."""
        group = get_group(pool, held, now)
        following = get_group(pool, group, then)
        budget = max(pool.queue[instance] for instance in following) - max(
            pool.queue[instance] for instance in group
        )
        a, b, c, d = self.costs[now]
        if budget <= a:
            return 0, group
        b += c * past
        root = (budget - a) / b if d == 0 else (sqrt(b * b + 4 * d * (budget - a)) - b) / (2 * d)
        self.solved.append((budget, self.took(now, past, int(root))))
        length = min(left, int(root))
        if length < left and left - length < self.min_chunk:
            length = left - self.min_chunk
        return (length if length >= self.min_chunk else 0), group

    def schedule(
        self, left: int, past: int, held: tuple[int, ...], sizes: Sequence[int], pool: Queues
    ) -> Plan:
        """Alg. 1; times from the end of the chunks before."""
        best, group = self.single(left, past, held, sizes, pool)
        found = Plan(best, ((left, group),))
        pool = pool.within(group)
        inside = [size for size in sizes if size <= len(group)]
        for now in inside:
            for then in inside:
                if now >= then:
                    continue
                length, group = self.chunk(left, past, held, now, then, pool)
                if not length:
                    continue
                elapsed = max(pool.queue[instance] for instance in group) + self.took(
                    now, past, length
                )
                after = Plan(0.0)
                if length < left:
                    larger = [size for size in inside if size >= then]
                    after = self.schedule(
                        left - length, past + length, group, larger, pool.later(elapsed)
                    )
                if elapsed + after.ttft < found.ttft:
                    found = Plan(elapsed + after.ttft, ((length, group), *after.chunks))
        return found


def chains(
    plain: PlainCdsp,
    left: int,
    past: int,
    held: tuple[int, ...],
    sizes: Sequence[int],
    pool: Queues,
) -> Iterator[Plan]:
    """Every plan that chunks of Alg. 3 make: at each chunk any size, and any size to follow, inside
    the group that a single chunk for what is left would take."""
    _, group = plain.single(left, past, held, sizes, pool)
    inside, pool = [size for size in sizes if size <= len(group)], pool.within(group)
    for size in inside:
        group = get_group(pool, held, size)
        queue = max(pool.queue[instance] for instance in group)
        yield Plan(queue + plain.took(size, past, left), ((left, group),))
    for now, then in combinations(inside, 2):
        length, group = plain.chunk(left, past, held, now, then, pool)
        if not 0 < length < left:
            continue
        elapsed = max(pool.queue[instance] for instance in group) + plain.took(now, past, length)
        larger = [size for size in inside if size >= then]
        rest = chains(plain, left - length, past + length, group, larger, pool.later(elapsed))
        for after in rest:
            yield Plan(elapsed + after.ttft, ((length, group), *after.chunks))


def same(one: float, other: float) -> bool:
    """Times that differ by rounding at most."""
    return isclose(one, other, rel_tol=1e-9, abs_tol=1.0)


S = 1_000_000_000
K = 1024
TABLE = {size: TETRIS_LLAMA3_8B_A100.step(size) for size in (1, 2, 4, 8, 16)}

Chunks = tuple[tuple[int, tuple[int, ...]], ...]
"""(tokens, group)."""
EVEN = st.sampled_from([(4,), (8,), (2, 2), (4, 4), (2, 2, 2, 2), (8, 8)])
ANY = st.one_of(EVEN, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
RATES = st.sampled_from([0.0, 0.05, 0.3, 0.75])


@st.composite
def worlds(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = ANY) -> World:
    servers = draw(shapes)
    count = sum(servers)
    # Few different times, so that there are ties.
    times = st.one_of(st.integers(0, 5).map(lambda seconds: seconds * S), st.integers(0, 4 * S))
    queue = draw(st.lists(times, min_size=count, max_size=count))
    return World(
        servers, queue, draw(st.integers(1, 200 * K)), draw(RATES), draw(st.integers(1, 4 * K))
    )


class World:
    """Instances, their queues, and a prompt."""

    def __init__(
        self, servers: tuple[int, ...], queue: list[int], length: int, rate: float, least: int
    ) -> None:
        self.servers, self.queue, self.length = servers, queue, length
        self.rate, self.least = rate, least
        count = sum(servers)
        self.sizes = sorted({1 << n for n in range(count.bit_length())} | {count})
        self.costs = {size: TETRIS_LLAMA3_8B_A100.step(size) for size in self.sizes}
        self.plain = PlainCdsp(
            {size: latency.in_ns for size, latency in self.costs.items()}, rate, self.least
        )
        numbers = iter(range(count))
        self.by_server = tuple(tuple(next(numbers) for _ in range(n)) for n in servers)
        queues = dict(enumerate(map(float, queue)))
        self.pool = Queues(self.by_server, queues, queues)

    def __repr__(self) -> str:
        return f"World({self.servers}, {self.queue}, {self.length}, {self.rate}, {self.least})"

    def plan(
        self, *, chunked: bool = True, past: int = 0, holders: tuple[int, ...] = ()
    ) -> list[CdspChunk]:
        made = Cdsp(self.servers, self.costs, min_chunk=self.least, chunked=chunked)
        return made.plan(self.length, self.queue, self.rate, past=past, holders=holders)


def shape(chunks: list[CdspChunk]) -> Chunks:
    return tuple((chunk.length, chunk.members) for chunk in chunks)


# --- against other ways to the same --------------------------------------------------------------


@given(worlds())
def test_a_plan_is_that_of_the_plain_algorithm(world: World) -> None:
    expected = world.plain.schedule(world.length, 0, (), world.sizes, world.pool)
    chunks = world.plan()
    assert same(chunks[-1].end_ns, expected.ttft)
    # Several plans may end at the same time.
    assert shape(chunks) == expected.chunks or same(absolute(shape(chunks), world), expected.ttft)


@given(worlds(), st.data())
def test_so_is_the_plan_of_what_is_left_of_a_prompt(world: World, data: st.DataObject) -> None:
    numbers = st.integers(0, sum(world.servers) - 1)
    holders = tuple(sorted(data.draw(st.sets(numbers, min_size=1))))
    past = data.draw(st.integers(1, 100 * K))
    sizes = [size for size in world.sizes if size >= len(holders)]
    expected = world.plain.schedule(world.length, past, holders, sizes, world.pool)
    chunks = world.plan(past=past, holders=holders)
    assert [len(group) for _, group in shape(chunks)] == [
        len(group) for _, group in expected.chunks
    ]
    assert chunks[0].start == past
    assert same(chunks[-1].end_ns, expected.ttft)


@given(worlds(st.sampled_from([(4,), (8,), (2, 2), (4, 4)])))
def test_no_chain_of_groups_is_better(world: World) -> None:
    """At rate 0, inside the groups of single chunks, as Alg. 1 has it of every rest of a prompt:
    where a single chunk for the rest would not take the largest group, another chain may be."""
    world = World(world.servers, world.queue, world.length, 0.0, world.least)
    tried = chains(world.plain, world.length, 0, (), world.sizes, world.pool)
    best = min(plan.ttft for plan in tried)
    found = world.plan()[-1].end_ns
    assert found <= best or same(found, best)


def absolute(chunks: Chunks, world: World) -> float:
    """When chunks end, by times at which instances are free."""
    free, end, past = dict(enumerate(map(float, world.queue))), 0.0, 0
    for length, group in chunks:
        end = max(free[instance] for instance in group) + world.plain.took(len(group), past, length)
        free.update(dict.fromkeys(group, end))
        past += length
    return end


@given(worlds())
def test_shrinking_queues_and_absolute_times_are_the_same(world: World) -> None:
    """Eq. 2."""
    plan = world.plain.schedule(world.length, 0, (), world.sizes, world.pool)
    assert same(plan.ttft, absolute(plan.chunks, world))


# --- what holds of every plan --------------------------------------------------------------------


@given(worlds())
def test_chunks_are_whole_nested_and_in_order(world: World) -> None:
    chunks = world.plan()
    assert sum(chunk.length for chunk in chunks) == world.length
    for before, after in pairwise(chunks):
        assert after.start == before.start + before.length
        assert set(before.members) < set(after.members)
        assert before.end_ns <= after.begin_ns
    if len(chunks) > 1:
        assert min(chunk.length for chunk in chunks) >= world.least
    for chunk in chunks:
        assert len(set(chunk.members)) == len(chunk.members)
        assert chunk.begin_ns >= max(world.queue[member] for member in chunk.members)


@given(worlds())
def test_chunks_never_cost_time(world: World) -> None:
    (single,) = world.plan(chunked=False)
    assert world.plan()[-1].end_ns <= single.end_ns


@given(worlds())
def test_a_single_chunk_is_the_smallest_group_that_none_improves_on_enough(world: World) -> None:
    (single,) = world.plan(chunked=False)
    best, chosen = None, 0
    for size in world.sizes:
        choice = Cdsp(world.servers, {size: world.costs[size]}, chunked=False)
        (only,) = choice.plan(world.length, world.queue, 0.0)
        if best is None or only.end_ns < best * (1 - world.rate) - 1:
            best, chosen = only.end_ns, size
    assert len(single.members) == chosen
    assert same(single.end_ns, best or 0)


@given(worlds())
def test_a_rate_of_almost_one_gives_the_smallest_group(world: World) -> None:
    made = Cdsp(world.servers, world.costs)
    (only,) = made.plan(world.length, [0] * sum(world.servers), 0.999)
    assert len(only.members) == 1


def test_a_budget_that_does_not_pay_for_the_constant_part_is_no_chunk() -> None:
    costs = {1: StepCost.of_seconds(1.0, 1e-3, 0, 0), 2: StepCost.of_seconds(1.0, 5e-4, 0, 0)}
    made = Cdsp((2,), costs)
    assert len(made.plan(10_000, [0, S], 0.0)) == 1
    first, second = made.plan(10_000, [0, 3 * S], 0.0)
    assert (first.length, second.length) == (2000, 8000)
    assert second.begin_ns == 3 * S


@given(st.lists(st.integers(1, 50 * K), min_size=1, max_size=5), st.sampled_from(sorted(TABLE)))
def test_chunks_on_one_group_cost_their_constants_more(lengths: list[int], size: int) -> None:
    """T(L) + (n - 1) a, exactly, when c = 2d."""
    cost = TABLE[size]
    past, fixed = 0, 0
    for length in lengths:
        fixed += cost.a + length * (cost.b + cost.c * past + cost.d * length)
        past += length
    # Half a unit of the last place may be lost where c was rounded.
    slack = past * past
    whole = cost.a + past * (cost.b + cost.d * past)
    assert abs(fixed - whole - (len(lengths) - 1) * cost.a) <= slack


# --- §2.4 ----------------------------------------------------------------------------------------


class LookUp:
    """Table 1 itself: a prompt of one of its lengths, without history."""

    def __init__(self, size: int, length: int) -> None:
        self.in_ns = (TETRIS_TABLE_1[size][length] * S, 0.0, 0.0, 0.0)


def looked_up(length: int, sizes: tuple[int, ...]) -> Cdsp:
    return Cdsp((8, 8), {size: LookUp(size, length) for size in sizes}, chunked=False)


def test_the_second_example_of_too_much_parallelism() -> None:
    """32K then 16K tokens, all instances busy for a second: 1.53 and 1.84 s with 16 for the first,
    1.58 and 1.31 s with 8."""
    busy = [S] * 16
    for size, ends in ((16, (1.53, 1.84)), (8, (1.58, 1.31))):
        (first,) = looked_up(32, (size,)).plan(32, busy, 0.0)
        after = [first.end_ns if instance in first.members else S for instance in range(16)]
        (second,) = looked_up(16, (1, 2, 4, 8)).plan(16, after, 0.0)
        assert [round(chunk.end_ns / S, 2) for chunk in (first, second)] == list(ends)


def test_a_long_prompt_on_half_of_the_instances_takes_longer() -> None:
    """8 instances are busy with 16K tokens: 16 of them idle for 0.31 s, or 1.34 s more on 8."""
    busy = [int(0.31 * S)] * 8 + [0] * 8
    (wide,) = looked_up(128, (16,)).plan(128, busy, 0.0)
    (narrow,) = looked_up(128, (8,)).plan(128, busy, 0.0)
    assert (wide.begin_ns, narrow.begin_ns) == (int(0.31 * S), 0)
    assert round((narrow.end_ns - wide.end_ns) / S, 2) == 1.34


def test_the_same_prompt_in_two_chunks() -> None:
    """With fitted times: about 14,846 tokens on the idle half, then all of it: 2.500 s against
    2.556."""
    made = Cdsp((8, 8), TABLE)
    busy = [int(0.31 * S)] * 8 + [0] * 8
    first, second = made.plan(128 * K, busy, 0.0)
    assert abs(first.length - 14_846) <= 1
    assert first.length + second.length == 128 * K
    assert (len(first.members), len(second.members)) == (8, 16)
    assert abs(second.end_ns / S - 2.500) < 0.001
    single = Cdsp((8, 8), TABLE, chunked=False)
    (only,) = single.plan(128 * K, busy, 0.0)
    assert abs(only.end_ns / S - 2.556) < 0.001

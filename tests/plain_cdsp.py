"""Algs. 1-3 of Tetris §5.1 as they stand in the paper, corrected but not made fast.

Queue times shrink (Eq. 2) in states that are copied; there are no bounds and no memory. And all
chains of groups, tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf, isclose, sqrt

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

    def key(self, it: int) -> tuple[float, float, int]:
        return self.queue[it], self.first[it], it

    def within(self, group: Sequence[int]) -> Queues:
        servers = tuple(tuple(it for it in server if it in group) for server in self.servers)
        return replace(self, servers=tuple(filter(None, servers)))

    def later(self, elapsed: float) -> Queues:
        """Eq. 2."""
        return replace(self, queue={it: max(0.0, t - elapsed) for it, t in self.queue.items()})


@dataclass(frozen=True)
class Plan:
    ttft: float
    chunks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(tokens, group)."""


def get_group(pool: Queues, initial: Sequence[int], size: int) -> tuple[int, ...]:
    """GetGroup."""
    group = list(initial)
    near = [it for server in pool.servers if set(server) & set(group) for it in server]
    rest = sorted(set(near) - set(group), key=pool.key)
    group += rest[: size - len(group)]
    free = [sorted(it, key=pool.key) for it in pool.servers if not set(it) & set(group)]
    while missing := size - len(group):
        fitting = [it for it in free if len(it) >= missing]
        if fitting:
            group += min(fitting, key=lambda it: pool.key(it[missing - 1]))[:missing]
            break
        whole = min(free, key=lambda it: pool.key(it[-1]))
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
            ttft = max(pool.queue[it] for it in group) + self.took(size, past, left)
            if ttft < best * (1.0 - self.rate):
                best, chosen = ttft, group
        return best, chosen

    def chunk(
        self, left: int, past: int, held: tuple[int, ...], now: int, then: int, pool: Queues
    ) -> tuple[int, tuple[int, ...]]:
        """Alg. 3."""
        group = get_group(pool, held, now)
        following = get_group(pool, group, then)
        budget = max(pool.queue[it] for it in following) - max(pool.queue[it] for it in group)
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
        inside = [it for it in sizes if it <= len(group)]
        for now in inside:
            for then in inside:
                if now >= then:
                    continue
                length, group = self.chunk(left, past, held, now, then, pool)
                if not length:
                    continue
                elapsed = max(pool.queue[it] for it in group) + self.took(now, past, length)
                after = Plan(0.0)
                if length < left:
                    larger = [it for it in inside if it >= then]
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
    inside, pool = [it for it in sizes if it <= len(group)], pool.within(group)
    for size in inside:
        group = get_group(pool, held, size)
        queue = max(pool.queue[it] for it in group)
        yield Plan(queue + plain.took(size, past, left), ((left, group),))
    for now, then in combinations(inside, 2):
        length, group = plain.chunk(left, past, held, now, then, pool)
        if not 0 < length < left:
            continue
        elapsed = max(pool.queue[it] for it in group) + plain.took(now, past, length)
        larger = [it for it in inside if it >= then]
        rest = chains(plain, left - length, past + length, group, larger, pool.later(elapsed))
        for after in rest:
            yield Plan(elapsed + after.ttft, ((length, group), *after.chunks))


def same(one: float, other: float) -> bool:
    """Times that differ by rounding at most."""
    return isclose(one, other, rel_tol=1e-9, abs_tol=1.0)

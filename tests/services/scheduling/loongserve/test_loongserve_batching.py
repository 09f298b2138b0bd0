"""LoongServe's dynamic programming against brute force (§5.3)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csps.services.scheduling.policies.loongserve import batching
from csps.services.scheduling.policies.loongserve.batching import (
    MOST_INSTANCES,
    MOST_WORK,
    Batching,
    Objective,
    most_requests,
    plain,
    pruned,
)
from csps.services.scheduling.policies.loongserve.inputs import Eq7, PrefillModel

OBJECTIVES: tuple[Objective, ...] = ("normalised", "sum")
# LWM-7B on A800, tensor parallelism 2 (Fig. 3): linear and quadratic work shared by the group.
LWM = PrefillModel(lambda dop: Eq7(15e6 + 20e6 * (dop - 1), 3.22e4 / dop, 0.776 / dop))

lengths = st.lists(st.integers(10, 200_000), min_size=1, max_size=6)
slots = st.lists(st.integers(0, 210_000), min_size=1, max_size=5)


@st.composite
def models(draw: st.DrawFn) -> PrefillModel:
    """Coefficients that need not make sense."""
    lines = [
        Eq7(draw(st.floats(0, 1e9)), draw(st.floats(0, 1e5)), draw(st.floats(0, 10)))
        for _ in range(5)
    ]
    return PrefillModel(lambda dop: lines[dop - 1])


def cuts(total: int, parts: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut `total` things in a row into so many non-empty parts."""
    for inner in combinations(range(1, total), parts - 1):
        yield tuple(pairwise((0, *inner, total)))


def cost_of(
    parts: tuple[tuple[tuple[int, int], tuple[int, int]], ...],
    lengths_n: list[int],
    slots_n: list[int],
    model: PrefillModel,
    objective: Objective,
) -> float | None:
    """What a batching costs by the definition; None if a batch does not fit its instances."""
    total = 0.0
    for (first, stop), (begin, end) in parts:
        batch = lengths_n[first:stop]
        if sum(batch) > sum(slots_n[begin:end]):
            return None
        time_ns = model.ns(batch, end - begin)
        total += sum(time_ns if objective == "sum" else time_ns / length for length in batch)
    return total


def brute_force(
    lengths_n: list[int], slots_n: list[int], model: PrefillModel, objective: Objective
) -> float | None:
    """The least cost of all batchings that use the first instances, however many."""
    costs = [
        cost_of(tuple(zip(requests, instances, strict=True)), lengths_n, slots_n, model, objective)
        for used in range(1, len(slots_n) + 1)
        for parts in range(1, min(len(lengths_n), used) + 1)
        for requests in cuts(len(lengths_n), parts)
        for instances in cuts(used, parts)
    ]
    return min((cost for cost in costs if cost is not None), default=None)


def check_whole(found: Batching, requests: int, instances: int) -> None:
    """Every request once, in order; instances in order without gaps."""
    assert [batch.first for batch in found.batches] == [
        0,
        *(batch.stop for batch in found.batches[:-1]),
    ]
    assert [batch.begin for batch in found.batches] == [
        0,
        *(batch.end for batch in found.batches[:-1]),
    ]
    assert found.batches[-1].stop == requests
    assert found.batches[-1].end <= instances
    assert all(batch.first < batch.stop and batch.begin < batch.end for batch in found.batches)


@settings(max_examples=60, deadline=None)
@given(lengths, slots, models(), st.sampled_from(OBJECTIVES))
def test_is_what_brute_force_finds(
    lengths_n: list[int], slots_n: list[int], model: PrefillModel, objective: Objective
) -> None:
    lengths_n.sort(reverse=True)
    slots_n.sort(reverse=True)
    found = plain(lengths_n, slots_n, model, objective)
    best = brute_force(lengths_n, slots_n, model, objective)
    assert (found is None) == (best is None) == (sum(lengths_n) > sum(slots_n))
    if found is None or best is None:
        return
    check_whole(found, len(lengths_n), len(slots_n))
    assert found.cost == pytest.approx(best, rel=1e-9)
    parts = tuple(((batch.first, batch.stop), (batch.begin, batch.end)) for batch in found.batches)
    assert cost_of(parts, lengths_n, slots_n, model, objective) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_short_prompt_is_not_batched_with_a_long_one(objective: Objective) -> None:
    """The released code, whose bound is reversed, never splits."""
    found = plain([100_000, 500], [210_000] * 4, LWM, objective)
    assert found is not None
    assert [batch.stop - batch.first for batch in found.batches] == [1, 1]
    assert found.batches[0].end - found.batches[0].begin == 3


def test_the_two_objectives_differ() -> None:
    """Normalised, a few short prompts weigh more than a long one that waits for them."""
    differing = 0
    for short in range(1, 12):
        requests = [150_000, 40_000, *[300] * short]
        normalised, total = (
            plain(requests, [210_000] * 3, LWM, objective) for objective in OBJECTIVES
        )
        assert normalised is not None
        assert total is not None
        differing += normalised.batches != total.batches
    assert differing


@settings(max_examples=40, deadline=None)
@given(lengths, slots, models(), st.sampled_from(OBJECTIVES))
def test_pruning_is_never_better_and_fits(
    lengths_n: list[int], slots_n: list[int], model: PrefillModel, objective: Objective
) -> None:
    lengths_n.sort(reverse=True)
    slots_n.sort(reverse=True)
    found, best = (find(lengths_n, slots_n, model, objective) for find in (pruned, plain))
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        check_whole(found, len(lengths_n), len(slots_n))
        assert found.cost >= best.cost * (1 - 1e-12)


def test_pruning_by_equation_6_has_regret() -> None:
    """Eq. 6 is no theorem."""
    steps = [Eq7(1e6, 1e4, 0.0), Eq7(4e6, 2e3, 0.0), Eq7(9e6, 1e3, 0.0), Eq7(1e5, 9e2, 0.1)]
    model = PrefillModel(lambda dop: steps[dop - 1])
    worst = 0.0
    for seed in range(200):
        requests = sorted((17 + seed * 7919 * n % 9_973 for n in range(1, 7)), reverse=True)
        room = sorted((seed * 104_729 * n % 30_011 for n in range(1, 5)), reverse=True)
        found, best = pruned(requests, room, model), plain(requests, room, model)
        if found is not None and best is not None:
            worst = max(worst, found.cost / best.cost - 1)
    assert worst > 0


@pytest.mark.parametrize("instances", [1, 4, 16, MOST_INSTANCES])
def test_a_round_is_bounded(instances: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its input: each cost is computed once, and looked at in one pass of numpy's."""
    tables = Mock(wraps=batching._Costs.of_instances)
    monkeypatch.setattr(batching._Costs, "of_instances", lambda *inputs: tables(*inputs))
    count = most_requests(instances)
    requests = sorted((100 + 37 * n * n % 50_000 for n in range(count)), reverse=True)
    assert plain(requests, [10_000_000] * instances, LWM) is not None
    assert tables.call_count * (count + 1) ** 2 <= MOST_WORK

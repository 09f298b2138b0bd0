"""Steps around a ring have their rows in zigzag, whichever policy plans them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_view import Busy, Picture, plans, waiting
from property_examples import examples

from csps.protocols.core.placement import bounds_of, covers_once, tokens_on
from csps.services.scheduling.deciding.decisions import PlannedChunk, PlannedStep
from csps.services.scheduling.deciding.step_layout import in_zigzag, rows_of, span_of
from csps.services.scheduling.events.events import instance_id
from csps.services.scheduling.policies.registry import make_policy


def step_of(lengths: list[int], starts: list[int], cuts: list[int], strategy: str) -> PlannedStep:
    """Return a step of chunks that end where the batch is cut."""
    bounds = bounds_of(lengths)
    ends = sorted({bounds[-1], *(cut % bounds[-1] for cut in cuts)} - {0})
    chunks = [
        PlannedChunk(number, starts[number % len(starts)], stop - start)
        for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return PlannedStep(
        group=tuple(instance_id(1, index) for index in range(len(lengths))),
        bounds=bounds,
        chunks=tuple(chunks),
        strategy=strategy,
        predicted_ns=1,
    )


STEPS = (
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.integers(0, 500), max_size=3),
)


@settings(max_examples=examples(100))
@given(*STEPS)
def test_the_bounds_cut_all_chunks_laid_end_to_end(
    lengths: list[int], starts: list[int], cuts: list[int]
) -> None:
    step = step_of(lengths, starts, cuts, "ulysses")
    computes = [instance for instance, n in zip(step.group, lengths, strict=True) for _ in range(n)]
    for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
        here, computes = computes[: chunk.length], computes[chunk.length :]
        found = {position: row.instance for row in rows for position in row.span.positions}
        assert covers_once(span_of(chunk), rows)
        assert found == dict(enumerate(here, chunk.start))


@settings(max_examples=examples(100))
@given(*STEPS)
def test_everyone_computes_as_much_of_each_chunk_as_the_bounds_say(
    lengths: list[int], starts: list[int], cuts: list[int]
) -> None:
    before = step_of(lengths, starts, cuts, "ring_q")
    after = in_zigzag(before)
    assert after.bounds == before.bounds
    for chunk, cut, rows in zip(after.chunks, rows_of(before), rows_of(after), strict=True):
        assert covers_once(span_of(chunk), rows)
        assert tokens_on(rows) == tokens_on(cut)
    assert in_zigzag(after) == after
    alone = in_zigzag(step_of(lengths, starts, cuts, "ulysses"))
    assert not any(chunk.rows for chunk in alone.chunks)


@pytest.mark.parametrize("policy", ["fixed_sp", "csps", "tetris", "context_parallel"])
@pytest.mark.parametrize("strategy", ["ring_kv", "ring_q"])
def test_policies_lay_them_out(policy: str, strategy: str) -> None:
    options = {
        "fixed_sp": {"sp": 2},
        "csps": {"spt_tokens": 500, "short_tokens": 100},
        "context_parallel": {"short_tokens": 100},
    }
    cls = f"{strategy}/exact"
    picture = Picture([waiting(1, 1000, cls=cls)], [Busy(), Busy()])
    (plan,) = plans(list(picture.ask(make_policy(policy, options.get(policy)))))
    (step,) = plan.steps
    (chunk,) = step.chunks
    assert (step.strategy, len(step.group)) == (strategy, 2)
    spans = [(row.instance, row.start, row.stop) for row in chunk.rows]
    first, second = step.group
    assert spans == [(first, 0, 250), (first, 750, 1000), (second, 250, 500), (second, 500, 750)]


def test_tetris_stripes_them_where_it_is_told_to() -> None:
    picture = Picture([waiting(1, 1000, cls="ring_kv/exact")], [Busy(), Busy()])
    (plan,) = plans(list(picture.ask(make_policy("tetris", {"layout": "striped"}))))
    ((chunk,),) = [step.chunks for step in plan.steps]
    assert [(row.start, row.stop, row.step) for row in chunk.rows] == [(0, 999, 2), (1, 1000, 2)]

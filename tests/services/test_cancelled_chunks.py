"""A step without its cancelled sequences, against positions one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.router.lowering import without_cancelled
from csps.services.scheduling.deciding.step_layout import rows_of

INSTANCES = 4


@st.composite
def steps(draw: st.DrawFn) -> PrefillStep:
    """Return a step of several sequences, each of which has its history on some instance."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    starts = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    cuts = draw(st.lists(st.integers(0, sum(lengths)), min_size=1, max_size=INSTANCES - 1))
    bounds = (0, *sorted(cuts), sum(lengths))
    group = tuple(range(len(bounds) - 1))
    holders = [draw(st.sampled_from(group)) for _ in lengths]
    return PrefillStep(
        step_id=1,
        group=group,
        bounds=bounds,
        chunks=tuple(
            PrefillChunk(
                sequence_id=number,
                start=start,
                length=length,
                history=(KvSlice(holder, 0, start),) if start else (),
            )
            for number, (start, length, holder) in enumerate(
                zip(starts, lengths, holders, strict=True), 1
            )
        ),
    )


def computed(step: PrefillStep) -> dict[tuple[int, int], int]:
    """Return the instance that computes each position of each sequence."""
    return {
        (chunk.sequence_id, position): row.instance
        for chunk, rows in zip(step.chunks, rows_of(step), strict=True)
        for row in rows
        for position in row.span.positions
    }


@given(step=steps(), data=st.data())
def test_others_are_computed_where_they_were_with_their_own_history(
    step: PrefillStep, data: st.DataObject
) -> None:
    numbers = [chunk.sequence_id for chunk in step.chunks]
    cancelled = data.draw(st.sets(st.sampled_from(numbers)))
    rest, idle = without_cancelled(step, cancelled, placements={})
    left = {key: at for key, at in computed(step).items() if key[0] not in cancelled}
    assert list(rest.chunks) == [it for it in step.chunks if it.sequence_id not in cancelled]
    assert not rest.chunks or computed(rest) == left
    if cancelled:
        holders = {part.instance for chunk in rest.chunks for part in chunk.history}
        needed = set(left.values()) | holders
        assert set(rest.group) == needed
        assert set(idle) == set(step.group) - needed

"""Shares that say the same in other spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import LAYOUTS, KvSlice, Span, place, same_placement, within

placements = st.builds(
    lambda layout, length, parts: place(range(parts), LAYOUTS[layout](length, parts)),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 60),
    st.integers(1, 4),
)


@given(slices=placements, cut=st.integers(0, 60), data=st.data())
def test_as_whole_as_in_two_pieces(
    slices: tuple[KvSlice, ...], cut: int, data: st.DataObject
) -> None:
    stop = max(kv_slice.stop for kv_slice in slices)
    chunks = [*within(slices, Span(0, min(cut, stop))), *within(slices, Span(min(cut, stop), stop))]
    chunks = data.draw(st.permutations(chunks))
    assert same_placement(slices, chunks)
    assert same_placement(chunks, slices)


@given(slices=placements, data=st.data())
def test_not_with_a_position_elsewhere_or_of_another_origin(
    slices: tuple[KvSlice, ...], data: st.DataObject
) -> None:
    stop = max(kv_slice.stop for kv_slice in slices)
    position = data.draw(st.integers(0, stop - 1))
    (moved,) = within(slices, Span(position, position + 1))
    rest = [*within(slices, Span(0, position)), *within(slices, Span(position + 1, stop))]
    assert same_placement(slices, [*rest, moved])
    elsewhere = KvSlice(moved.instance + 1, position, position + 1)
    stranger = KvSlice(moved.instance, position, position + 1, source=7)
    for other in ([*rest, elsewhere], [*rest, stranger], rest):
        assert not same_placement(slices, other)
        assert not same_placement(other, slices)

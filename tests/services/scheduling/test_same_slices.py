"""Shares that say the same in other spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import LAYOUTS, KvSlice, Span, place
from csps.services.scheduling.events.slices import same_placement, within

placements = st.builds(
    lambda layout, length, parts: place(range(parts), LAYOUTS[layout](length, parts)),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 60),
    st.integers(1, 4),
)


@given(shares=placements, cut=st.integers(0, 60), data=st.data())
def test_as_whole_as_in_two_pieces(
    shares: tuple[KvSlice, ...], cut: int, data: st.DataObject
) -> None:
    stop = max(share.stop for share in shares)
    chunks = [*within(shares, Span(0, min(cut, stop))), *within(shares, Span(min(cut, stop), stop))]
    chunks = data.draw(st.permutations(chunks))
    assert same_placement(shares, chunks)
    assert same_placement(chunks, shares)


@given(shares=placements, data=st.data())
def test_not_with_a_position_elsewhere_or_of_another_origin(
    shares: tuple[KvSlice, ...], data: st.DataObject
) -> None:
    stop = max(share.stop for share in shares)
    position = data.draw(st.integers(0, stop - 1))
    (moved,) = within(shares, Span(position, position + 1))
    rest = [*within(shares, Span(0, position)), *within(shares, Span(position + 1, stop))]
    assert same_placement(shares, [*rest, moved])
    elsewhere = KvSlice(moved.instance + 1, position, position + 1)
    stranger = KvSlice(moved.instance, position, position + 1, source=7)
    for other in ([*rest, elsewhere], [*rest, stranger], rest):
        assert not same_placement(shares, other)
        assert not same_placement(other, shares)

"""Shares that say the same in other spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.placement import LAYOUTS
from csps.protocols.span import Span
from csps.services.scheduling.commands import Share
from csps.services.scheduling.shares import laid_out, same, within

placements = st.builds(
    lambda layout, length, parts: laid_out(range(parts), LAYOUTS[layout](length, parts)),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 60),
    st.integers(1, 4),
)


@given(shares=placements, cut=st.integers(0, 60), data=st.data())
def test_as_whole_as_in_two_pieces(
    shares: tuple[Share, ...], cut: int, data: st.DataObject
) -> None:
    stop = max(it.stop for it in shares)
    pieces = [*within(shares, Span(0, min(cut, stop))), *within(shares, Span(min(cut, stop), stop))]
    pieces = data.draw(st.permutations(pieces))
    assert same(shares, pieces)
    assert same(pieces, shares)


@given(shares=placements, data=st.data())
def test_not_with_a_position_elsewhere_or_of_another_origin(
    shares: tuple[Share, ...], data: st.DataObject
) -> None:
    stop = max(it.stop for it in shares)
    position = data.draw(st.integers(0, stop - 1))
    (moved,) = within(shares, Span(position, position + 1))
    rest = [*within(shares, Span(0, position)), *within(shares, Span(position + 1, stop))]
    assert same(shares, [*rest, moved])
    elsewhere = Share(moved.instance + 1, position, position + 1)
    stranger = Share(moved.instance, position, position + 1, origin=7)
    for other in ([*rest, elsewhere], [*rest, stranger], rest):
        assert not same(shares, other)
        assert not same(other, shares)

"""Things are cut into parts of one size, give or take one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import even_share


@given(total=st.integers(0, 100), parts=st.integers(1, 9))
def test_even_shares_cover_everything_and_differ_by_one(total: int, parts: int) -> None:
    slices = [even_share(total, parts, index) for index in range(parts)]
    assert [position for share in slices for position in share] == list(range(total))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1

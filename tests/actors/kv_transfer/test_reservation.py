"""A reservation counts promised KV, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_ends import LAYERS, header, reservation

from csps.actors.comm.layout import name_digest
from csps.protocols.core.errors import TransferError
from csps.protocols.core.placement import Span


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": name_digest("a former epoch")},
        {"layer": LAYERS},
        {"layer": -1},
        {"span": Span(start=0, stop=11)},
        {"span": Span(start=12, stop=14)},
        {"span": Span(start=8, stop=22)},  # two spans of the share and what is between them
        {"span": Span(start=5, stop=5)},
        {"heads": range(2, 5)},
        {"heads": range(1, 3)},
        {"heads": range(3, 3)},
        {"kept": 5},
    ],
    ids=str,
)
def test_kv_that_was_not_promised_is_refused(wrong: dict[str, Any]) -> None:
    reserved = reservation((Span(start=0, stop=10), Span(start=20, stop=25)))
    promised = reserved.missing
    with pytest.raises(TransferError):
        reserved.accept(header(**wrong))
    assert reserved.missing == promised


@pytest.mark.parametrize(
    "again",
    [{}, {"span": Span(start=9, stop=10)}, {"heads": range(3, 4)}, {"span": Span(start=4, stop=6)}],
    ids=str,
)
def test_nothing_is_counted_twice_however_it_is_cut(again: dict[str, Any]) -> None:
    reserved = reservation((Span(start=0, stop=10),))
    reserved.accept(header())
    with pytest.raises(TransferError, match="repeats KV that was received before"):
        reserved.accept(header(**again))


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from((1, 1, 2, 3, 4))),
        max_size=20,
    )
)
def test_a_span_is_counted_exactly_if_none_of_its_positions_has_arrived(
    spans: list[tuple[int, int, int]],
) -> None:
    reserved = reservation((Span(0, 45),), layers=1)
    arrived: set[int] = set()
    for start, extent, step in spans:
        span = Span(start, start + extent, step)
        if arrived.isdisjoint(span.positions):
            reserved.accept(header(span=span))
            arrived.update(span.positions)
        else:
            with pytest.raises(TransferError, match="repeats KV that was received before"):
                reserved.accept(header(span=span))
    assert reserved.missing == 2 * (45 - len(arrived))


@pytest.mark.parametrize("kept", [None, 5])
def test_all_of_a_layer_comes_whole_or_all_of_it_narrowed(kept: int | None) -> None:
    """Heads that lie side by side in a pool cannot be read if only some of them are complete."""
    reserved = reservation((Span(start=0, stop=10),), kept_only=True)
    reserved.accept(header(heads=range(2, 3), kept=kept))
    reserved.accept(header(layer=1, kept=None if kept else 5))
    with pytest.raises(TransferError, match="which the sequence does not expect there"):
        reserved.accept(header(heads=range(3, 4), kept=None if kept else 5))
    reserved.accept(header(heads=range(3, 4), kept=kept))
    assert reserved.missing == 0


@given(
    cuts=st.sets(st.integers(1, 29)),
    order=st.randoms(use_true_random=False),
    spans=st.sampled_from([((0, 30),), ((0, 10), (10, 30)), ((5, 9), (0, 2), (20, 21))]),
)
def test_a_reservation_is_complete_exactly_when_all_of_it_was_received(
    cuts: set[int], order: Any, spans: tuple[tuple[int, int], ...]
) -> None:
    reserved = reservation(tuple(Span(start=start, stop=stop) for start, stop in spans))
    parts = [
        header(layer=layer, span=Span(start=start, stop=stop), heads=range(head, head + 1))
        for begin, end in spans
        for start, stop in pairwise(sorted({begin, end, *(c for c in cuts if begin < c < end)}))
        for layer in range(LAYERS)
        for head in range(2, 4)
    ]
    order.shuffle(parts)
    for part in parts:
        assert reserved.missing
        reserved.accept(part)
    assert reserved.missing == 0

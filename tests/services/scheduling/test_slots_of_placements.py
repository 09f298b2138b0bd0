"""Slots that a placement needs, against sets of positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import LAYOUTS, KvSlice, place
from csps.services.scheduling.state.ledger import coming_slots, decode_slots

INSTANCES = 4


class Placement(NamedTuple):
    """Placement of a sequence for decoding."""

    slices: tuple[KvSlice, ...]
    master: int
    answer: tuple[KvSlice, ...]


@st.composite
def laid(draw: st.DrawFn, start: int, stop: int, source: int = 0) -> tuple[KvSlice, ...]:
    """Return slices of all these positions, in some layout on some instances."""
    group = draw(st.permutations(range(INSTANCES)))[: draw(st.integers(1, INSTANCES))]
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](stop - start, len(group))
    slices = place(group, layout, start=start)
    return tuple(KvSlice.of(part.instance, part.span, source) for part in slices if part.tokens)


@st.composite
def placements(draw: st.DrawFn, cached: int, prompt: int, output: int) -> Placement:
    """Return a placement of a prompt behind a cached prefix, and of its answer."""
    reused = draw(laid(0, cached, source=99)) if cached else ()
    rest = draw(laid(cached, prompt))
    answer = draw(laid(prompt, prompt + output)) if draw(st.booleans()) else ()
    return Placement((*reused, *rest), draw(st.integers(0, INSTANCES - 1)), answer)


def stored(slices: Iterable[KvSlice]) -> dict[int, set[int]]:
    """Return the positions that each instance stores for the sequence itself."""
    found: dict[int, set[int]] = defaultdict(set)
    for part in slices:
        if not part.source:
            found[part.instance] |= set(part.span.positions)
    return found


def all_stored(placement: Placement, prompt: int, output: int) -> dict[int, set[int]]:
    """Return the positions of prompt and answer that each instance stores."""
    found = stored((*placement.slices, *placement.answer))
    if not placement.answer:
        found[placement.master] |= set(range(prompt, prompt + output))
    return found


SIZES = st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 20))


@given(sizes=SIZES, data=st.data())
def test_reservation_has_a_slot_for_each_position_that_nobody_has_cached(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    cached, rest, output = sizes
    prompt = cached + rest
    placement = data.draw(placements(cached, prompt, output))
    named = {placement.master} | {part.instance for part in (*placement.slices, *placement.answer)}
    expected = all_stored(placement, prompt, output)
    assert decode_slots(placement, output) == {
        instance: len(expected[instance]) for instance in named
    }


@given(sizes=SIZES, data=st.data())
def test_move_needs_a_slot_for_each_position_that_is_not_there_yet(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    _, prompt, output = sizes
    before, after = (data.draw(placements(0, prompt, output)) for _ in range(2))
    if not after.answer:
        after = after._replace(answer=(KvSlice(after.master, prompt, prompt + output),))
    sequence = cast(
        Any,
        SimpleNamespace(
            slices=before.slices,
            answer=before.answer,
            master_id=before.master,
            answer_span=(prompt, prompt + output),
        ),
    )
    present, wanted = (all_stored(placement, prompt, output) for placement in (before, after))
    coming = coming_slots(sequence, after)
    for instance in range(INSTANCES):
        assert coming.get(instance, 0) == len(wanted[instance] - present[instance])

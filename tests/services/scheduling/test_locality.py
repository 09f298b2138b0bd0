"""Places near each other, against a search of all that would do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from locality_reference import near_places

from csps.protocols.core.topology import Location, Topology

PLACES = st.builds(Location, *[st.integers(0, last) for last in (1, 2, 1)])


@given(st.dictionaries(PLACES, st.integers(0, 3), max_size=7), st.integers(1, 12))
def test_never_on_more_racks_servers_or_places_than_needed(
    room: dict[Location, int], wanted: int
) -> None:
    enough = [
        places
        for count in range(1, len(room) + 1)
        for places in combinations(room, count)
        if sum(room[place] for place in places) >= wanted
    ]
    chosen = near_places(room, wanted)
    if chosen is None:
        assert not enough
        return
    assert spread(chosen) == min(map(spread, enough))
    left_over = sum(room[place] for place in chosen) - wanted
    assert 0 <= left_over < min(room[place] for place in chosen)


def spread(places: Sequence[Location]) -> tuple[int, int]:
    """Racks and servers."""
    return len({place.rack for place in places}), len({place.server_id for place in places})


@pytest.mark.parametrize(
    ("ids", "wanted", "chosen"),
    [
        (["0-1-0", "0-0-0", "0-0-1"], 1, ["0-1-0"]),
        (["0-1-0", "0-0-0", "0-1-1", "0-0-1"], 2, ["0-1-0", "0-1-1"]),
        (["0-1-0", "0-0-0", "0-0-1", "0-1-1"], 2, ["0-0-0", "0-0-1"]),
        (["0-2-0", "0-0-0", "0-1-0", "0-1-1"], 3, ["0-1-0", "0-1-1", "0-2-0"]),
        (["1-0-0", "0-0-0", "1-1-0", "1-2-0", "0-0-1", "0-1-0"], 3, ["0-0-0", "0-0-1", "0-1-0"]),
    ],
)
def test_of_equally_near_ones_the_preferred(ids: list[str], wanted: int, chosen: list[str]) -> None:
    room = dict.fromkeys(Topology.of(ids).locations, 1)
    assert near_places(room, wanted) == list(Topology.of(chosen).locations)


def test_rather_few_places_than_preferred_ones() -> None:
    room = {"0-1-0": 4, "0-0-0": 3, "0-0-1": 3, "0-0-2": 3, "0-1-1": 3}
    places = {Location.parse(text): slots for text, slots in room.items()}
    assert near_places(places, 7) == list(Topology.of(["0-1-0", "0-1-1"]).locations)


def test_rather_few_racks_than_full_servers() -> None:
    ids = [f"{rack}-0-{gpu}" for rack in (1, 2) for gpu in range(3)]
    ids += [f"0-{server}-{gpu}" for server in (0, 1) for gpu in range(2)]
    chosen = near_places(dict.fromkeys(Topology.of(ids).locations, 1), 7)
    assert chosen is not None
    assert spread(chosen) == (2, 3)

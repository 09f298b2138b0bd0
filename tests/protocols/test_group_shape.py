"""Shapes of groups, as formulas and tables use them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.topology import GroupShape, Location, Topology

PLACES = st.builds(Location, *[st.integers(0, last) for last in (2, 2, 3)])


def test_instances_are_counted_by_server() -> None:
    places = [Location.parse(text) for text in ("0-0-0", "0-0-3", "0-1-0", "1-1-0", "1-1-1")]
    shape = GroupShape.of(places, 2)
    assert shape == GroupShape((2, 1, 2), 2, racks=(2, 1))
    assert shape.places == ("0-0-0", "0-0-1", "0-1-0", "1-0-0", "1-0-1")
    assert (shape.sp, shape.ranks) == (5, 10)
    assert shape.instance_servers == (0, 0, 1, 2, 2)
    assert shape.rank_servers == (0, 0, 0, 0, 1, 1, 2, 2, 2, 2)
    assert GroupShape.of(places[:1], 1) == GroupShape((1,), 1)


@given(st.sets(PLACES, min_size=1), st.integers(1, 4))
def test_servers_are_those_of_the_topology(found: set[Location], tp: int) -> None:
    places = sorted(found)
    shape = GroupShape.of(places, tp)
    assert shape.servers == tuple(map(len, Topology(tuple(places)).servers))
    assert shape.sp == len(places) == len(shape.instance_servers)
    for place, server in zip(places, shape.instance_servers, strict=True):
        for other, other_server in zip(places, shape.instance_servers, strict=True):
            assert (place.server_id == other.server_id) == (server == other_server)
    assert len(shape.rank_servers) == shape.ranks == tp * shape.sp


@given(st.sets(PLACES, min_size=1), st.integers(1, 4))
def test_a_shape_s_places_have_its_levels_and_its_shape(found: set[Location], tp: int) -> None:
    topology = Topology(tuple(sorted(found)))
    shape = GroupShape.of(topology.locations, tp)
    assert Topology.of(shape.places).granularities == topology.granularities
    assert GroupShape.of(Topology.of(shape.places).locations, tp) == shape
    assert shape.racks == (tuple(len(servers) for servers in by_rack(topology)) or ())


def by_rack(topology: Topology) -> list[set[int]]:
    """Return the servers of each rack; none if there is one rack."""
    servers: dict[int, set[int]] = {}
    for place in topology.locations:
        servers.setdefault(place.rack, set()).add(place.server)
    return list(servers.values()) if len(servers) > 1 else []

from __future__ import annotations

import pytest

from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Location, Topology


def test_an_id_is_rack_server_and_gpu() -> None:
    assert Location.parse("0-3-2") == Location(0, 3, 2)
    assert str(Location.parse("10-0-123456789")) == "10-0-123456789"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0-1",
        "0-1-2-3",
        "0-1-",
        "0--1-2",
        "a-1-2",
        "0-11-010",
        "0-1-²",
        "0-1-2\n",
        "0-0-" + "9" * 10,
    ],
)
def test_an_invalid_id_is_refused(text: str) -> None:
    """The paper's binary ids among them: 0-11-010 is 0-3-2."""
    with pytest.raises(ConfigError, match="not a Rack-Server-GPU id; allowed are three decimal"):
        Location.parse(text)


def test_placement_is_in_numerical_order_of_ids() -> None:
    topology = Topology.of(["0-10-0", "0-9-1", "1-0-0", "0-9-0"])
    assert topology.order == (3, 1, 0, 2)
    assert topology.subset(topology.order).servers == (range(2), range(2, 3), range(3, 4))


def test_levels_are_the_finest_ones_and_all() -> None:
    topology = Topology.of(["0-0-0", "0-0-1", "0-1-0", "1-0-0", "1-1-0"])
    single = tuple(range(place, place + 1) for place in range(5))
    servers = (range(2), range(2, 3), range(3, 4), range(4, 5))
    racks = (range(3), range(3, 5))
    everything = (range(5),)
    assert topology.levels(1) == (everything,)
    assert topology.levels(2) == (single, everything)
    assert topology.levels(3) == (single, servers, everything)
    assert topology.levels(4) == (single, servers, racks, everything)


@pytest.mark.parametrize(
    ("ids", "levels"),
    [
        (["0-0-0"], 1),
        (["0-0-0", "0-0-1", "0-0-2"], 2),  # one server
        (["0-0-0", "0-1-0", "0-2-0"], 2),  # one GPU each
        (["0-0-0", "0-0-1", "0-1-0"], 3),
        (["0-0-0", "0-1-0", "1-0-0"], 3),  # servers are SPTs
        (["0-0-0", "0-0-1", "1-0-0"], 3),  # racks are servers
    ],
)
def test_levels_beyond_the_topology_are_refused(ids: list[str], levels: int) -> None:
    topology = Topology.of(ids)
    assert len(topology.levels(levels)) == levels
    for count in (0, levels + 1):
        with pytest.raises(ConfigError, match=f"must be 1 to {levels} here .*, not {count}"):
            topology.levels(count)


@pytest.mark.parametrize(
    ("ids", "tp", "what"),
    [
        (["0-0-0", "0-0-1"], 1, "2 locations for a gang of 4 ranks; allowed is one"),
        (["0-0-0", "0-0-1", "0-0-2", "0-0-3", "0-0-4"], 1, "5 locations for a gang of 4 ranks"),
        (["0-0-0", "0-0-1", "0-0-0", "0-0-3"], 1, "puts both 0 and 2 at 0-0-0; allowed is one"),
        (["0-0-0", "0-0-1", "0-0-2", "0-0-x"], 1, "'0-0-x' is not a Rack-Server-GPU id"),
        (["0-0-0", "0-0-1", "0-1-0", "0-2-0"], 2, "rank 2 is at 0-1-0 and rank 3 at 0-2-0"),
        (["0-0-0", "1-0-0", "1-0-1", "1-0-2"], 2, "ranks 0 to 1 are one instance, but rank 0"),
    ],
)
def test_invalid_locations_of_a_gang_are_refused(ids: list[str], tp: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Topology.of_gang(ids, ranks=4, tp=tp)


def test_instances_may_stand_on_several_servers_each_on_one() -> None:
    ids = ["0-1-0", "0-1-1", "0-0-0", "0-0-1"]
    assert Topology.of_gang(ids, ranks=4, tp=2) == Topology.of(ids)


def test_an_empty_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one location"):
        Topology.of([])

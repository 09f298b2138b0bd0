from __future__ import annotations

import pytest

from csps.protocols.errors import ConfigError
from csps.protocols.topology import Location, Topology


def test_the_papers_binary_id_is_a_place() -> None:
    assert Location.parse("0-11-010", "binary") == Location(0, 3, 2) == Location.parse("0-3-2")


@pytest.mark.parametrize("text", ["0-1", "0-1-2-3", "0-1-", "0--1-2", "a-1-2", "0-11-010", "0-1-²"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a Rack-Server-GPU id; allowed are three decimal"):
        Location.parse(text)


def test_binary_ids_have_binary_digits() -> None:
    with pytest.raises(ConfigError, match="allowed are three binary numbers like 0-11-010"):
        Location.parse("0-3-2", "binary")


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
    ("entries", "what"),
    [
        ([(0, "0-0-0"), (1, "0-0-1"), (1, "0-0-2")], "names rank 1 twice: 0-0-1 and 0-0-2"),
        ([(0, "0-0-0"), (1, "0-0-1")], "misses rank 2 of 0 to 2"),
        ([(0, "0-0-0"), (1, "0-0-1"), (3, "0-0-2")], "names rank 3; allowed are 0 to 2"),
        ([(0, "0-0-0"), (1, "0-0-1"), (2, "0-0-0")], "puts both 0 and 2 at 0-0-0"),
        ([], "misses rank 0"),
    ],
)
def test_a_topology_names_every_rank_once(entries: list[tuple[int, str]], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Topology.of_ranks(entries, ranks=3)


def test_entries_may_come_in_any_order() -> None:
    topology = Topology.of_ranks([(1, "0-0-1"), (0, "0-0-0")], ranks=2)
    assert topology == Topology.of(["0-0-0", "0-0-1"])


def test_an_empty_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one location"):
        Topology.of([])

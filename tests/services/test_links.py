"""Links between all pairs of ranks: which are measured, by whom, and what follows from them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from measured_rows import add_phases, link_rows

from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.protocols.core.errors import ConfigError, FaultError
from csps.protocols.gang.members import GangMembers, RankAddress
from csps.services.deployments.configurator import make_rules
from csps.services.measured.identity import identity_of
from csps.services.measured.measured_groups import (
    MeasuredGroups,
    MeasuredLinks,
    gang_places,
    kind_of,
    link_ratio,
)
from csps.services.profiling.links import LOOPBACK, LocalLinkProbe, measure_links, ranks_here
from csps.services.profiling.server_links import _placed
from csps.services.settings.credentials import ClusterSecret
from csps.services.settings.settings import Settings

PLACES = ["0-0-0", "0-0-1", "0-1-2", "0-1-3"]
SIZES = (8, 65_536)


@pytest.fixture
def settings(tiny_llama: Path, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "model": str(tiny_llama),
            "scaling_information_base": str(tmp_path / "sib.sqlite"),
            "prefill": {"instances": 4},
            "topology": {"link_ratio": 3.0},
        }
    )


# --- measuring ----------------------------------------------------------------------------------


class ScriptedProbe:
    """Prints what it was given, and then has ended."""

    def __init__(self, lines: Sequence[object]) -> None:
        self.lines = [json.dumps(line) for line in lines]
        self.started: tuple[int, Sequence[str]] | None = None
        self.stopped = False

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        self.started = gpu, arguments

    async def line(self) -> str:
        return self.lines.pop(0) if self.lines else ""

    async def stop(self) -> None:
        self.stopped = True


async def test_pairs_come_in_order_and_half_the_shortest_round_is_the_way_back() -> None:
    medians = {pair: 0.5 + index for index, pair in enumerate(combinations(range(3), 2))}
    probes = [
        ScriptedProbe(
            [
                *(["there:1"] if rank == 0 else []),
                *(
                    [[median, median, 9.0], [2 * median] * 3]
                    for pair, median in medians.items()
                    if pair[1] == rank
                ),
            ]
        )
        for rank in range(3)
    ]
    found = {}

    def record_pair(sender: int, receiver: int, seconds: dict[int, float]) -> None:
        found[sender, receiver] = seconds

    await measure_links(probes, ["a", "a", "b"], SIZES, record_pair)
    assert list(found) == list(medians)
    assert found == {
        pair: {8: median / 2, 65_536: median * 3 / 2} for pair, median in medians.items()
    }
    # GPUs count from 0 on each machine.
    assert [probe.started[0] for probe in probes if probe.started] == [0, 1, 0]
    assert [probe.started[1][3] for probe in probes if probe.started] == ["-", "there:1", "there:1"]


async def test_an_end_that_ends_ends_all_and_what_was_measured_is_kept() -> None:
    probes = [ScriptedProbe(["there:1"]), ScriptedProbe([[[1.0], [2.0]]]), ScriptedProbe([])]
    found = []
    with pytest.raises(FaultError, match="rank 2 "):
        await measure_links(probes, ["a"] * 3, SIZES, lambda *pair: found.append(pair[:2]))
    assert found == [(0, 1)]
    assert all(probe.stopped for probe in probes)


@pytest.mark.slow  # four processes that load torch; two are in the command's own test
async def test_real_ranks_measure_all_their_pairs() -> None:
    found: dict[tuple[int, int], dict[int, float]] = {}

    def record_pair(sender: int, receiver: int, seconds: dict[int, float]) -> None:
        found[sender, receiver] = seconds

    secret = ClusterSecret(b"of these probes")
    probes = [LocalLinkProbe("cpu", 0.0, secret) for _ in range(4)]
    await measure_links(probes, [LOOPBACK] * 4, SIZES, record_pair)
    assert list(found) == list(combinations(range(4), 2))
    assert all(seconds[8] > 0 for seconds in found.values())
    assert all(
        probe._process is not None and probe._process.returncode is not None for probe in probes
    )


# --- which ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "ranks"),
    [
        ((), ["0-0-0", "0-0-1", "0-0-2", "0-0-3"]),
        (("1-0-4", "1-0-5", "1-1-0", "1-1-1"), ["1-0-4", "1-0-5"]),
        (("1-0-4", "1-1-5", "1-2-0", "1-3-1"), ["1-0-0", "1-0-1"]),
    ],
)
def test_without_a_running_server_those_of_one_machine_are_measured(
    settings: Settings, named: tuple[str, ...], ranks: list[str]
) -> None:
    topology = settings.topology.model_copy(update={"prefill": named})
    assert ranks_here(settings.model_copy(update={"topology": topology})) == ranks


GANG = GangMembers(
    gang_id="g",
    ranks=tuple(
        RankAddress(rank=rank, host=f"10.0.0.{1 + rank // 2}", port=1) for rank in range(4)
    ),
)
NODES = [
    {
        "NodeID": f"n{server}",
        "NodeManagerAddress": f"10.0.0.{1 + server}",
        "Labels": {"csps.io/server": f"0-{server}"},
    }
    for server in range(2)
]


def test_a_running_servers_ranks_are_where_they_listen(settings: Settings) -> None:
    found = _placed(GANG, settings, NODES)
    assert [rank.location for rank in found] == PLACES
    assert [rank.node_id for rank in found] == ["n0", "n0", "n1", "n1"]
    with pytest.raises(ConfigError, match=r"address 10\.0\.0\.2 of rank 2"):
        _placed(GANG, settings, [NODES[0], {**NODES[1], "NodeManagerAddress": "10.0.0.9"}])


# --- what follows -------------------------------------------------------------------------------


def add_links(settings: Settings, *pairs: tuple[str, str, float]) -> ScalingInformationBase:
    path = Path(settings.scaling_information_base)
    base = ScalingInformationBase.create(path, identity_of(settings))
    for sender, receiver, s_per_byte in pairs:
        for row in link_rows(sender, receiver, s_per_byte=s_per_byte):
            base.add(row)
    return base


def test_the_settings_ratio_is_for_links_that_nobody_has_measured(settings: Settings) -> None:
    assert link_ratio(settings) == 3.0
    with add_links(settings, (*PLACES[:2], 1e-9)) as base:
        links = MeasuredLinks.read(base, settings)
        assert links.between.bytes_per_s == pytest.approx(links.inside.bytes_per_s / 3)
        assert link_ratio(settings) == pytest.approx(3.0)
    with add_links(settings, (*PLACES[1:3], 25e-9)) as base:
        links = MeasuredLinks.read(base, settings)
        assert links.inside.bytes_per_s == pytest.approx(1e9)
        assert links.between.bytes_per_s == pytest.approx(4e7)
        assert link_ratio(settings) == pytest.approx(25.0)
    assert make_rules(settings)._link_ratio == link_ratio(settings)


def test_ranks_on_as_many_servers_have_no_links_inside(settings: Settings) -> None:
    with add_links(settings, (*PLACES[1:3], 25e-9)) as base:
        links = MeasuredLinks.read(base, settings)
    assert links.inside == links.between
    assert link_ratio(settings) == 1.0


def test_another_machines_links_say_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_links(settings, (*PLACES[:2], 1e-9), (*PLACES[1:3], 25e-9)).close()
    monkeypatch.setattr(os, "cpu_count", lambda: 99)
    assert link_ratio(settings) == 3.0


def test_the_gang_lies_where_its_links_were_measured(settings: Settings) -> None:
    pairs = [(a, b, 1e-9) for a, b in combinations(PLACES, 2)]
    before = [(a, b, 1e-9) for a, b in combinations([f"0-9-{rank}" for rank in range(4)], 2)]
    with add_links(settings, *before, *pairs) as base:
        assert gang_places(base, settings) == PLACES
        topology = settings.topology.model_copy(update={"prefill": tuple(reversed(PLACES))})
        named = settings.model_copy(update={"topology": topology})
        assert gang_places(base, named) == [*reversed(PLACES)]


def test_one_machines_ranks_stand_for_those_that_nobody_has_seen(settings: Settings) -> None:
    with add_links(settings, (*PLACES[:2], 1e-9)) as base:
        assert gang_places(base, settings) == [f"0-0-{rank}" for rank in range(4)]


def test_pairs_are_told_apart_by_their_servers() -> None:
    assert kind_of("0-1-0", "0-1-12") == "inside"
    assert kind_of("0-1-0", "0-12-0") == "between"
    assert kind_of("0-1-0", "1-1-0") == "racks"


def test_links_between_racks_are_told_apart_from_those_between_servers(settings: Settings) -> None:
    planted = [(*PLACES[:2], 1e-9), (*PLACES[1:3], 25e-9), (PLACES[0], "1-0-4", 50e-9)]
    with add_links(settings, *planted) as base:
        add_phases(base)
        links = MeasuredLinks.read(base, settings)
        group = MeasuredGroups.read(base, settings).of_places([*PLACES[:3], "1-0-4"])
    assert links.racks.bytes_per_s == pytest.approx(2e7)
    seconds_sr = group.wiring.seconds_per_byte_sr
    assert seconds_sr[0].tolist() == pytest.approx([0.0, 1e-9, 25e-9, 50e-9])
    assert seconds_sr[3].tolist() == pytest.approx([50e-9, 50e-9, 50e-9, 0.0])
    assert link_ratio(settings) == pytest.approx(25.0)


def test_links_between_racks_count_where_each_rack_has_one_server(settings: Settings) -> None:
    with add_links(settings, (*PLACES[:2], 1e-9), (PLACES[0], "1-0-4", 50e-9)) as base:
        links = MeasuredLinks.read(base, settings)
    assert links.between == links.racks
    assert link_ratio(settings) == pytest.approx(50.0)


def test_unmeasured_links_between_racks_are_as_those_between_servers(settings: Settings) -> None:
    with add_links(settings, (*PLACES[:2], 1e-9), (*PLACES[1:3], 25e-9)) as base:
        links = MeasuredLinks.read(base, settings)
    assert links.racks == links.between != links.inside

"""Cluster files: what they say is what is simulated, and what they cannot say is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_tables import TETRIS_TABLE_1

from csps.actors.kv_cache.kv_pool import KvPool
from csps.configurator.costs.cost_table import CostTable, stored
from csps.configurator.costs.latency import LatencyKey, StepCost
from csps.configurator.costs.latency_tables import LOONGSERVE_LWM_7B_A800, SHIPPED
from csps.configurator.model.scaling_information_base import (
    FitRow,
    Identity,
    ScalingInformationBase,
)
from csps.loadgen.simulator.cluster_file import (
    CLUSTERS,
    Arrangement,
    load_cluster,
    parse_cluster,
    read_gpus,
)
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

SMALL: dict[str, Any] = {
    "servers": [
        {"count": 2, "instances": 2, "permissions": ["prefill"], "kv_slots": 1000},
        {"rack": 1, "instances": 1, "tp": 4, "permissions": ["decode"], "kv_slots": 2000},
    ],
    "links": {"between": {"gbps": 8, "latency_us": 5, "shared": True}},
    "latency": {"steps": {1: [0.1, 1e-3, 0, 0]}, "decode": {1: [0.01, 0, 0]}},
    "gaps_us": {"step": 3, "front": 4},
}


def test_servers_become_gangs_with_places() -> None:
    model = parse_cluster(SMALL, name="small")
    places = [instance.location for instance in model.prefill.instances]
    assert places == ["0-0-0", "0-0-1", "0-1-0", "0-1-1"]
    assert (model.decode.tp, model.decode.kv_slots) == (4, (2000,))
    assert model.between is not None
    assert (model.between.bytes_per_s, model.between.latency_ns) == (10**9, 5000)
    assert model.inside is None
    assert (model.step_gap_ns, model.front_ns) == (3000, 4000)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_kv_is_counted_as_a_pool_keeps_it(kv_dtype: str) -> None:
    """What ranks exchange to compute a step is in the model's type."""
    shape = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "layers": 3}
    section = {**shape, "intermediate": 512, "kv_dtype": kv_dtype}
    model = parse_cluster({**SMALL, "model": section}, name="small")
    pool = KvPool(
        layers=3,
        slots=1,
        kv_heads=2,
        head_dim=32,
        dtype=torch.bfloat16,
        device="cpu",
        eight_bits=kv_dtype == "int8",
    )
    assert model.kv_bytes_per_token == pool.k.nbytes + pool.v.nbytes
    assert model.token_bytes.queries == 3 * 8 * 32 * 2
    assert model.token_bytes.kv == 3 * 2 * 2 * 32 * 2


def test_links_between_racks_are_those_between_servers_unless_the_file_gives_them() -> None:
    plain = parse_cluster(SMALL, name="small")
    links = {**SMALL["links"], "racks": {"gbps": 0.8, "latency_us": 50}}
    model = parse_cluster({**SMALL, "links": links}, name="small")
    near, *_, far = plain.prefill.instances
    (other,) = plain.decode.instances
    assert plain.link(near, far) == plain.link(near, other) == ("between", plain.between)
    assert model.link(near, far) == ("between", plain.between)
    kind, link = model.link(near, other)
    assert link is not None
    assert (kind, link.bytes_per_s, link.latency_ns) == ("racks", 10**8, 50_000)
    assert dict(model.table.links)["racks"].predict_ns(10**8) == pytest.approx(1e9 + 50_000)


def test_ranks_of_an_elastic_gang_may_share_the_cores_of_their_server() -> None:
    server = {"instances": 4, "permissions": ["prefill", "decode"], "kv_slots": 9, "cores": 2}
    steps, decode = {4: [0, 1e-6, 0, 0]}, {4: [0, 0, 0]}
    data = {"servers": [server], "latency": {"steps": steps, "decode": decode}}
    model = parse_cluster(data, name="shared")
    assert model.shares_cores
    assert [instance.cores for instance in model.prefill.instances] == [2] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": {}}, "unknown key 'link'; did you mean 'links'?"),
        ({"gaps_us": {"stepp": 1}}, "gaps_us: unknown key 'stepp'; did you mean 'step'?"),
        ({"latency": {"decode": {1: [0, 0, 0]}}}, "one of steps, published, sib, table"),
        ({"latency": {"published": "tetris"}}, "allowed: loongserve-lwm-7b-a800, tetris-llama3"),
        ({"latency": {"steps": {1: [0, 0, 0, 0]}}}, "no latencies of decode with tp=4"),
        ({"servers": SMALL["servers"][:1]}, "the decode gang has no instances"),
        ({"servers": []}, "servers"),
        (
            {"servers": [{**server, "cores": 2} for server in SMALL["servers"]]},
            "ranks of an elastic",
        ),
        ({"max_positions": 0}, "max_positions"),
    ],
)
def test_an_invalid_cluster_file_is_rejected_with_its_key(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_cluster({**SMALL, **change}, name="small")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_latencies_come_from_a_profile_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "sib.sqlite"
    identity = Identity(
        weights="w", dtype="d", device="elsewhere", cores=1, torch="0", ranks_per_core=1.0
    )
    table = LOONGSERVE_LWM_7B_A800
    with ScalingInformationBase.create(path, identity) as base:
        fit = FitRow(name="latency", digest=table.digest, canonical=table.canonical, date="now")
        base.add(fit)
    data = {**SMALL, "latency": {"sib": str(path), "decode": {1: [0.01, 0, 0]}}}
    with pytest.raises(ConfigError, match="with tp=1"):
        parse_cluster(data, name="small")
    servers = [{**SMALL["servers"][0], "tp": 2}, SMALL["servers"][1]]
    model = parse_cluster({**data, "servers": servers}, name="small")
    assert model.table.step(1, 2) == table.step(1, 2)
    missing = {**data, "latency": {"sib": str(tmp_path / "none")}}
    with pytest.raises(ConfigError, match="there is no"):
        parse_cluster(missing, name="small")


@pytest.mark.parametrize(("strategy", "token_s"), [("ring_kv", 2e-3), ("ulysses", 0.5e-3)])
def test_a_step_takes_what_was_measured_with_its_strategy(strategy: str, token_s: float) -> None:
    """The file has times of one instance, two of which take half as long for a token."""
    model = parse_cluster(SMALL, name="small")
    ring = LatencyKey(strategy="ring_kv", sp=2, tp=1), StepCost.of_seconds(0.1, 2e-3, 0, 0)
    model = replace(model, table=replace(model.table, steps=(*model.table.steps, ring)))
    step = PrefillStep(
        step_id=1,
        group=(0, 1),
        bounds=(0, 50, 100),
        chunks=(PrefillChunk(1, 0, 100),),
        strategy=strategy,
    )
    assert model.step_ns(step) == round((0.1 + 100 * token_s) * 1e9) + model.step_gap_ns


def test_latencies_are_those_that_a_router_has_learned(tmp_path: Path) -> None:
    (tmp_path / "learned").write_bytes(stored(CostTable(latencies=SHIPPED)))
    servers = [SMALL["servers"][0], {**SMALL["servers"][1], "tp": 1}]
    data = {"servers": servers, "latency": {"table": str(tmp_path / "learned")}}
    assert parse_cluster(data, name="learned").table.steps == SHIPPED.steps
    for damage in (b"", b"no table"):
        (tmp_path / "learned").write_bytes(damage)
        with pytest.raises(ConfigError, match="is not a cost table of a router's decision log"):
            parse_cluster(data, name="learned")


def test_a_missing_cluster_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tetris-16'"):
        load_cluster("tetris16")
    broken = tmp_path / "broken.yaml"
    broken.write_text("servers: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_cluster(str(broken))


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_named_cluster_can_be_loaded(path: Path) -> None:
    gangs = Arrangement.parse("4x2") if read_gpus(path.stem) else None
    model = load_cluster(path.stem, gangs)
    assert model.table.step(1, model.prefill.tp).predict_ns(1000) > 0


def test_tetris_16_has_the_times_of_table_1() -> None:
    table = load_cluster("tetris-16").table
    for sp, row in TETRIS_TABLE_1.items():
        for kilotokens, seconds in row.items():
            predicted = table.step(sp).predict_ns(kilotokens * 1024) / 1e9
            assert predicted == pytest.approx(seconds, rel=0.07)

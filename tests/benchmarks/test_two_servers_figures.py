"""The pure parts of the two-server benchmark, and that the whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import prefill_variants
import pytest
import two_servers
from prefill_variants import BASELINE, CsaOptions, Variant, all_variants, select

from csps.protocols.core.errors import ConfigError

BENCHMARK = Path(two_servers.__file__)
FIGURES = {"model": "m", "tokens": 1, "rate": "r", "between_mb": 8.0, "attention_cpu_s": 2.0}


def row(variant: str, **figures: float) -> dict[str, object]:
    return {**FIGURES, "variant": variant, "ttft_s": 4.0, "communication_s": 1.0, **figures}


def test_a_place_is_a_length_at_a_rate() -> None:
    place = two_servers.Place.parse("16384@800mbit", "1ms")
    assert (place.tokens, place.rate) == (16_384, "800mbit")
    assert (place.link.rate_bits, place.link.delay_s) == (800e6, 1e-3)


def test_there_are_twelve_variants_and_the_baseline_is_the_first() -> None:
    names = [variant.name for variant in all_variants()]
    assert len(set(names)) == 12
    assert names[0] == BASELINE.name == "sp_ntp/exact/unpipelined"


def test_a_part_of_a_name_selects() -> None:
    assert {v.strategy for v in select(["hierarchical"])} == {"sp_tp_hierarchical"}
    with pytest.raises(ValueError, match="no variant is named like 'ring'"):
        select(["ring"])


@pytest.mark.parametrize("variant", list(all_variants())[1:], ids=lambda v: v.name)
def test_pairs_of_variants_differ_in_overlap_alone(variant: Variant) -> None:
    plans = [
        Variant(strategy=variant.strategy, csa=variant.csa, pipelined=pipelined)._plan(
            two_servers.LOCATIONS, 4, CsaOptions()
        )
        for pipelined in (False, True)
    ]
    assert plans[0].layer_groups == plans[1].layer_groups
    assert [plan.pipelined for plan in plans] == [False, True]


def test_hidden_is_what_overlap_saves_of_the_same_variants_communication() -> None:
    rows = [
        row("a/unpipelined", communication_s=4.0),
        row("a/pipelined", communication_s=1.0),
        row("b/pipelined", communication_s=1.0),
    ]
    assert [row["hidden"] for row in two_servers.with_hidden(rows)] == [0.0, 0.75, None]


def test_rows_are_compared_with_the_baseline_of_their_place() -> None:
    rows = [row(BASELINE.name), row("x", ttft_s=1.0, between_mb=2.0), row("y") | {"rate": "other"}]
    of_x = two_servers.to_baseline(rows)[1]
    assert (of_x["variant"], of_x["ttft_s"], of_x["between_mb"]) == ("x", 0.25, 0.25)
    assert len(two_servers.to_baseline(rows)) == 2


def test_an_earlier_result_of_another_plan_is_refused(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"csa": {"levels": 2}, "rows": [], "accuracy": []}))
    with pytest.raises(SystemExit, match="of another plan"):
        two_servers._earlier([earlier], plan())


def plan() -> two_servers.Plan:
    return two_servers.Plan(
        models=("needle",),
        places=(),
        variants=tuple(prefill_variants.all_variants()),
        rounds=0,
        questions=0,
        accuracy_lengths=(),
        csa=CsaOptions(),
        timelines=None,
    )


def test_levels_and_micro_partitions_that_differ_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="micro_partitions of 3 levels; 2 levels need 2"):
        select(["sp_ntp/csa/pipelined"])[0].plan(
            two_servers.LOCATIONS, layers=4, options=CsaOptions(levels=2)
        )


@pytest.mark.slow
@pytest.mark.testbed
@pytest.mark.timeout(400)
def test_the_whole_runs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARK), "--smoke", "--models", "needle", "--json", str(path)]
    subprocess.run(command, check=True, timeout=360, capture_output=True)
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 12
    assert {row["kind"] for row in result["accuracy"]} == {"single", "multi_key", "two_hop"}

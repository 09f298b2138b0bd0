"""What a cluster carries, how many are needed, and what is counted on the way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from csps.loadgen.simulator.capacity_command import cells_of, main
from csps.loadgen.simulator.simulate import main as simulate_main
from csps.loadgen.workloads.request import (
    ConversationTurns,
    FittedRequests,
    WorkloadRequest,
    converse,
)
from csps.loadgen.workloads.traces import write_trace
from csps.protocols.core.errors import ConfigError

S = 1_000_000_000
SP16 = ["--cluster", "tetris-16", "--policy", "fixed_sp", "--option", "sp=16"]
BATCH = ["--option", "max_batch=4096"]


def trace(tmp_path: Path, count: int, gap_s: float, tokens: int = 32_768) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [
        WorkloadRequest(arrival_ns=round(n * gap_s * S), input_length=tokens, output_length=1)
        for n in range(count)
    ]
    write_trace(requests, path)
    return path


def test_cells_for_a_trace_are_those_that_arithmetic_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One group of 16 takes 0.562 s for a prompt: four a second need three cells, and no wait is
    left when they are dealt in turns."""
    words = ["--trace", str(trace(tmp_path, 60, 0.25)), "--goodput", "ttft:600", "--jobs", "1"]
    assert main(["cells", *SP16, *BATCH, *words]) == 0
    assert "fixed_sp: 3 cells, 54 instances, 100.0% within SLO" in capsys.readouterr().out


def test_the_highest_rate_of_evenly_spaced_prompts_is_that_of_their_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trace", str(trace(tmp_path, 100, 1.0)), "--goodput", "ttft:2000", "--jobs", "1"]
    out = tmp_path / "results"
    more = ["--tolerance", "0.01", "--attainment", "1", "--result-dir", str(out)]
    assert main(["highest", *SP16, *BATCH, *words, *more]) == 0
    (path,) = out.iterdir()
    result = json.loads(path.read_text())
    # 100 prompts of 0.5616 s; the last one may wait 1.44 s behind the ones before.
    assert result["request_rate"] == pytest.approx(1 / (0.5616 - 1.4384 / 99), rel=0.012)
    assert result["slo_attainment"] == 1.0


def test_rates_of_several_policies_in_processes(tmp_path: Path) -> None:
    words = ["--cluster", "a800-8", "--workload", "sharegpt", "--requests", "9", "--jobs", "2"]
    policies = ["--policy", "vllm_like", "--policy", "loongserve"]
    out, alone = tmp_path / "results", tmp_path / "alone"
    ends = ["--rates", "1,4", "--result-dir", str(out)]
    assert main(["rates", *policies, *words, *ends]) == 0
    ends = ["--rates", "1,4", "--result-dir", str(alone)]
    assert main(["rates", *policies, *words, *ends, "--jobs", "1"]) == 0
    assert len(list(out.iterdir())) == 4
    for path in out.iterdir():
        one, other = (json.loads((folder / path.name).read_text()) for folder in (out, alone))
        assert one | {"date": ""} == other | {"date": ""}


def test_nothing_to_keep_is_a_mistake(tmp_path: Path) -> None:
    words = ["--trace", str(trace(tmp_path, 3, 1.0)), "--jobs", "1"]
    with pytest.raises(ConfigError, match="nothing to keep"):
        main(["highest", *SP16, *words])


def test_conversations_stay_in_their_cell() -> None:
    first = [WorkloadRequest(arrival_ns=n, input_length=5, output_length=1) for n in range(20)]
    requests = FittedRequests(requests=tuple(converse(first, ConversationTurns(count=3))), cut=0)
    parts = list(cells_of(requests, 3))
    homes = Counter(
        (request.conversation, cell) for cell, part in enumerate(parts) for request in part.requests
    )
    assert set(homes.values()) == {3}
    assert max(len(part.requests) for part in parts) - min(len(p.requests) for p in parts) <= 3


def test_mechanisms_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """60 prompts on one group of 16: 60 steps, no move, and the group is busy while it computes."""
    path = tmp_path / "result.json"
    words = ["--trace", str(trace(tmp_path, 60, 1.0)), "--json", str(path)]
    page = tmp_path / "page.html"
    assert simulate_main([*SP16, *BATCH, *words, "--html", str(page)]) == 0
    result = json.loads(path.read_text())
    mechanisms = result["mechanisms"]
    assert mechanisms["steps_by_instances"] == {"16": 60}
    assert mechanisms["steps_by_prompts"] == {"1": 60}
    assert mechanisms["moves"] == 0
    assert result["prefill_utilization"] == pytest.approx(
        0.5616 * 60 / result["duration"], rel=0.02
    )
    use = result["kv_use"]
    assert max(use["prefill"]) == pytest.approx(32_768 / (16 * 400_000), rel=1e-3)
    assert len(use["times_s"]) == len(use["prefill"]) == len(use["decode"]) <= 600
    assert "60 on 16" in capsys.readouterr().out
    assert "KV slots in use" in page.read_text()


def test_tetris_chunks_and_loongserves_moves_are_counted(tmp_path: Path) -> None:
    found = {}
    for name, cluster in (("tetris", "tetris-16"), ("loongserve", "a800-8")):
        path = tmp_path / f"{name}.json"
        words = ["--policy", name, "--cluster", cluster, "--workload", "l-eval", "--rate", "3"]
        options = ["--option", "improvement_rate=0.05"] if name == "tetris" else []
        assert simulate_main([*words, *options, "--requests", "60", "--json", str(path)]) == 0
        found[name] = json.loads(path.read_text())["mechanisms"]
    assert len(found["tetris"]["steps_by_instances"]) > 1
    assert found["loongserve"]["moves"] > 0
    assert found["loongserve"]["moved_tokens"] > 0

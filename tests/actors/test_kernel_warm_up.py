"""A rank compiles every variant of its kernels before anybody can reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gang_driver import SECRET, GangPlan
from test_launch_logs import STRATEGIES
from tiny_checkpoints import make_checkpoint

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import HeadSplit, query_groups
from csps.actors.comm.rendezvous import host_store
from csps.actors.worker import rank as rank_module
from csps.actors.worker.rank import Rank
from csps.actors.worker.rank_config import RankConfig
from csps.actors.worker.router_connection import RpcThread

RECORD = Path(__file__).with_name("record_variants.py")
HEADS = {"hidden_size": 160, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 16}
"""Heads that four members split into 3, 3, 2 and 2, across their KV heads."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategies", "window"),
    [
        pytest.param(["ulysses", "ring_q"], None, id="two"),
        pytest.param(list(STRATEGIES), None, id="all", marks=pytest.mark.slow),
        pytest.param(["by name"], 20, id="window", marks=pytest.mark.slow),
    ],
)
def test_no_step_and_no_iteration_needs_a_variant_that_is_not_warm(
    strategies: list[str], window: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "model").mkdir()
    family = "mistral" if window else "llama"
    config = {"sliding_window": window} if window else {}
    model = make_checkpoint(tmp_path / "model", family, num_hidden_layers=2, **HEADS, **config)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(RECORD.parent)])
    done = subprocess.run(
        [sys.executable, RECORD, model, *strategies],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    recorded = json.loads(done.stdout)
    needed, warm = recorded["needed"], recorded["warm"]
    assert needed.keys() <= warm.keys()
    for kernel, variants in needed.items():
        assert set(variants) <= set(warm[kernel]), kernel
    groups = len(query_groups(10, 2, 4))
    assert len(warm["_attention_kernel"]) == (6 if window else 4) * (groups + 1), (
        "short and long, with positions and without, and with a window; and chunks, of one group"
    )
    assert len(warm["_column_sums_kernel"]) == 2 * groups


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (10, 2), (3, 1), (8, 8), (12, 4)])
def test_groups_are_those_of_any_split(heads: int, kv_heads: int) -> None:
    """Against each query head's KV head, head by head."""
    expected = set()
    for parts in range(1, 7):
        split = HeadSplit(heads=heads, kv_heads=kv_heads, parts=parts)
        for part in range(parts):
            own = range(heads)[split.queries(part)]
            readers = [head // (heads // kv_heads) for head in own]
            counts = [readers.count(key) for key in sorted(set(readers))]
            if counts:
                expected |= {counts[0]} if len(set(counts)) == 1 else set(counts)
    assert query_groups(heads, kv_heads, 6) == expected


def test_kernels_are_compiled_before_the_rank_can_be_reached(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    start = RpcThread.start

    def warm(engine: Engine) -> None:
        order.append("warm")

    def served(thread: RpcThread, *arguments: object) -> tuple[str, int]:
        order.append("served")
        return start(thread, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_module, "warm_up", warm)
    monkeypatch.setattr(RpcThread, "start", served)
    plan = GangPlan(model_dir=str(tiny_llama), role="elastic", instances=1)
    rank = Rank(
        RankConfig(**plan.rank_fields(0)), secret=SECRET, store=host_store("127.0.0.1", SECRET)
    )
    try:
        rank.start()
    finally:
        rank.close()
    assert order == ["warm", "served"]

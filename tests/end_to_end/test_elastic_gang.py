"""A cell with one elastic gang, deployed through Serve."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from deployed import DEADLINE_S, POLL_S, deployed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_elastic_gang_comes_up_alone_and_is_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    elastic = {"instances": 2, "kv_slots": 4096}
    scheduling = {"policy": "chunked_prefill", "token_budget": 128}
    with deployed(tiny_llama, tmp_path, elastic=elastic, scheduling=scheduling) as server:
        before = server.pids("ElasticGang")
        assert len(before) == 2
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.gauge("ready") == 1
        server.kill_replica("ElasticGang")
        deadline = time.monotonic() + DEADLINE_S
        while server.gauge("gangs_lost_total") < 1:
            assert time.monotonic() < deadline, "nobody has noticed"
            time.sleep(POLL_S)
        server.wait_ready()
        assert not server.pids("ElasticGang") & before
        server.assert_all_slots_free()

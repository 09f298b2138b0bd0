"""The whole Ray Serve deployment on two Ray nodes, one on each server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed import iproute, ray_cluster
from testbed.claim import files_of
from testbed.link import Link
from testbed.network import Server, Testbed, two_servers

from csps.configurator.model.scaling_information_base import LinkRow, ScalingInformationBase
from csps.services.measured.measured_groups import BETWEEN, INSIDE, gang_places
from csps.services.settings.settings import Settings

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(400)]

KINDS = (INSIDE, BETWEEN)
SETTINGS = Settings.model_validate({"prefill": {"instances": 4}})
Csps = Callable[..., str]
ASK = """
import json, httpx
url, prompt = "{url}/v1/completions", "The cat saw the dog. " * 700
body = dict(model="needle", prompt=prompt, max_tokens=3, temperature=0)
answer = httpx.post(url, json=body, timeout=120)
print(json.dumps([answer.status_code, answer.json()["usage"]["completion_tokens"]]))
"""


@pytest.fixture(scope="module")
def deployed() -> Iterator[tuple[Testbed, str]]:
    with two_servers(Link.parse("800mbit")) as bed:
        yield bed, ray_cluster.start(bed)
    assert not any(iproute.exists(namespace) for namespace in bed.namespaces)


@pytest.fixture(scope="module")
def csps(deployed: tuple[Testbed, str]) -> Csps:
    """Run `csps` with the deployed configuration on server 0."""
    bed, _ = deployed
    config, environment = files_of(bed.name) / "config.yaml", ray_cluster.environment(bed)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "csps.cli", *words, "--config", str(config)]
        return subprocess.run(
            bed.servers[0].command(*command),
            env={**os.environ, **environment},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    return run


def _replicas(server: Server, deployment: str) -> int:
    processes = []
    for pid in iproute.pids(server.namespace):
        with open(f"/proc/{pid}/cmdline") as file:
            processes.append(file.read())
    return sum(f"ServeReplica:csps:{deployment}" in process for process in processes)


def test_prefill_ranks_are_split_over_the_servers(deployed: tuple[Testbed, str]) -> None:
    bed, _ = deployed
    assert [_replicas(server, "PrefillGang") for server in bed.servers] == [2, 2]


def test_the_server_answers_across_the_link(deployed: tuple[Testbed, str]) -> None:
    bed, url = deployed
    before = bed.traffic()
    ask = bed.servers[0].command(sys.executable, "-c", ASK.format(url=url))
    status, tokens = json.loads(iproute.run(*ask))
    assert (status, tokens) == (200, 3)
    assert (bed.traffic() - before).between_bytes > 1e6


def test_links_are_measured_between_all_pairs_of_ranks(csps: Csps, tmp_path: Path) -> None:
    sib = tmp_path / "sib.sqlite"
    printed = csps("profile", "links", "--quick", "--sib", str(sib))
    assert "between servers" in printed
    base = ScalingInformationBase.read(sib, None)
    assert base is not None
    with base:
        rows = base.rows(LinkRow)
        assert (
            len({gang_place.rpartition("-")[0] for gang_place in gang_places(base, SETTINGS)}) == 2
        )
    pairs = {
        kind: {(row.sender, row.receiver) for row in rows if row.kind == kind} for kind in KINDS
    }
    assert [len(pairs[kind]) for kind in KINDS] == [2, 4]
    longest = max(row.bytes for row in rows)
    # Never faster than the link; how slow it may get depends on what else the machine does.
    assert all(
        row.bytes / row.seconds < 1.15e8
        for row in rows
        if row.kind == BETWEEN and row.bytes == longest
    )

"""The whole Ray Serve deployment on two Ray nodes, one on each server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from testbed import iproute, ray_cluster
from testbed.link import Link
from testbed.network import Server, Testbed, two_servers

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(400)]

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


def _replicas(server: Server, deployment: str) -> int:
    processes = []
    for pid in iproute.pids(server.namespace):
        with open(f"/proc/{pid}/cmdline") as file:
            processes.append(file.read())
    return sum(f"ServeReplica:csps:{deployment}" in process for process in processes)


def test_prefill_ranks_are_split_over_the_servers(deployed: tuple[Testbed, str]) -> None:
    bed, _ = deployed
    assert [_replicas(server, "PrefillGang") for server in bed.servers] == [2, 2]


def test_it_answers_across_the_link(deployed: tuple[Testbed, str]) -> None:
    bed, url = deployed
    before = bed.traffic()
    ask = bed.servers[0].command(sys.executable, "-c", ASK.format(url=url))
    status, tokens = json.loads(iproute.run(*ask))
    assert (status, tokens) == (200, 3)
    assert (bed.traffic() - before).between_bytes > 1e6

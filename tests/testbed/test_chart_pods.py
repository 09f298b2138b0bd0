"""The chart's pods as processes on two servers of a testbed, started as KubeRay starts them: which
ports they open, that HAProxy answers in each, and what the death of the head pod's processes does.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "helm"))

from rendered_chart import Manifest, Rendered, container, environment, render
from testbed import iproute
from testbed.claim import files_of
from testbed.link import Link
from testbed.network import Server, Testbed, two_servers

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(1500)]

DEADLINE_S = 600.0
POLL_S = 0.5
ASK_S = 60.0
VALUES = {
    "elastic": {"instances": 2, "kvSlots": 8192},
    "scheduling": {"policy": "chunked_prefill"},
    "auth": {"requireApiKey": False},  # its file would lie in /etc
    "networkPolicy": {"monitoring": [{"namespaceSelector": {}}]},
}
OPERATOR_FLAGS = "--metrics-export-port=8080 --dashboard-agent-listen-port=52365 --block"
"""Flags that KubeRay adds to those of `rayStartParams`."""
API, DASHBOARD = 8000, 8265
LISTENING = re.compile(r"^LISTEN +\d+ +\d+ +(\S+):(\d+) ", re.MULTILINE)


@dataclass
class Pod:
    """Processes of one pod: those in the network namespace of a server."""

    server: Server
    group: Manifest
    folder: Path
    start_options: str
    secrets: dict[str, str]
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Run the init containers, then Ray."""
        for one in self.group["template"]["spec"]["initContainers"]:
            assert "env" not in one, "HAProxy's does without"
            subprocess.run(self._words(one["command"]), check=True)
        params = [f"--{name}={value}" for name, value in self.group["rayStartParams"].items()]
        line = " ".join(["ray", "start", self.start_options, *params, OPERATOR_FLAGS])
        with (self.folder / "ray.log").open("ab") as log:
            self._started.append(
                subprocess.Popen(
                    self.server.command("bash", "-c", line),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _words(self, command: list[str]) -> list[str]:
        return [self._here(word) if word != "python" else sys.executable for word in command]

    def _here(self, text: str) -> str:
        return text.replace("/run/csps", str(self.folder))

    def _environment(self) -> dict[str, str]:
        given = {
            name: self._here(str(variable["value"]))
            for name, variable in environment(self.group).items()
            if "value" in variable
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, **given, **self.secrets, "PATH": path}

    def listening(self, *, outside: bool) -> set[int]:
        """Return ports that others reach; or those that only the pod itself does."""
        said = iproute.run(*self.server.command("ss", "-Hltn"))
        sockets = [(host.strip("[]"), int(port)) for host, port in LISTENING.findall(said)]
        return {port for host, port in sockets if host.startswith(("127.", "::1")) != outside}

    def programs(self) -> list[str]:
        """Return the names of its processes."""
        names = []
        for pid in iproute.pids(self.server.namespace):
            with suppress(OSError):  # it has ended
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        return names

    def kill(self) -> None:
        """Kill all of its processes."""
        while pids := iproute.pids(self.server.namespace):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        for process in self._started:
            process.wait(ASK_S)
        self._started.clear()


@dataclass
class Cell:
    """One release of the chart."""

    rendered: Rendered
    head: Pod
    worker: Pod
    token: str

    def start(self) -> None:
        """Start both pods, and deploy as the operator does."""
        self.head.start()
        eventually("no dashboard", lambda: self.ask(self.head, "/api/version", port=DASHBOARD))
        self.worker.start()
        deployed = self.ask(
            self.head,
            "/api/serve/applications/",
            port=DASHBOARD,
            method="PUT",
            json=yaml.safe_load(self.rendered.serve_config_text),
        )
        assert deployed is not None
        assert deployed.is_success, deployed.text
        for pod in (self.head, self.worker):
            eventually("never healthy", lambda pod=pod: self.ask(pod, "/health"))

    def ask(
        self, pod: Pod, path: str, *, port: int = API, method: str = "GET", **more: Any
    ) -> httpx.Response | None:
        """Ask a pod from the other one; None if it is not there, or not ready."""
        other = self.worker if pod is self.head else self.head
        with iproute.entered(other.server.namespace):
            try:
                answer = httpx.request(
                    method,
                    f"http://{pod.server.address}:{port}{path}",
                    headers={"Authorization": f"Bearer {self.token}"},
                    timeout=ASK_S,
                    trust_env=False,
                    **more,
                )
            except httpx.TransportError:
                return None
        return None if answer.status_code in (404, 503) else answer

    def answers(self, pod: Pod) -> bool:
        """Return whether a completion comes through a pod's HAProxy."""
        body = {"model": "needle", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = self.ask(pod, "/v1/completions", method="POST", json=body)
        return answer is not None and answer.json()["usage"]["completion_tokens"] == 3


def eventually(what: str, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := found()):
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)
    return result


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with two_servers(Link.parse("800mbit")) as bed:
        made = pods_of(bed)
        try:
            made.start()
            yield made
        finally:
            for pod in (made.head, made.worker):
                pod.kill()
                shutil.rmtree(pod.folder)


def pods_of(bed: Testbed) -> Cell:
    rendered = render(VALUES)
    folder = files_of(bed.name)
    folder.mkdir(mode=0o700)
    head, worker = bed.servers
    token = secrets.token_hex(32)
    shared = {"CSPS_CLUSTER_SECRET": secrets.token_hex(32), "RAY_AUTH_TOKEN": token}
    temporary = f"--temp-dir={folder}"

    def pod(name: str, server: Server, options: str) -> Pod:
        own = f"{options} --node-ip-address={server.address} {temporary}"
        # Ray puts a node's id into the path of HAProxy's sockets, which must be short.
        short = Path(tempfile.mkdtemp(prefix="pod-", dir="/tmp"))
        return Pod(server, rendered.groups[name], short, own, shared)

    return Cell(
        rendered,
        pod("head", head, "--head"),
        pod("elastic", worker, f"--address={head.address}:6379"),
        token,
    )


def rule_ports(rule: Manifest) -> set[int]:
    return {port["port"] for port in rule.get("ports", ())}


def test_the_policy_names_the_ports_that_processes_open(cell: Cell) -> None:
    inside, clients, operator, monitoring = cell.rendered.of_kind("NetworkPolicy")["spec"][
        "ingress"
    ]
    assert rule_ports(inside) == set(), "all, because most are the system's choice"
    for pod in (cell.head, cell.worker):
        reached, own = pod.listening(outside=True), pod.listening(outside=False)
        named = {port["containerPort"] for port in container(pod.group)["ports"]}
        assert named <= reached
        assert rule_ports(clients) | rule_ports(monitoring) <= reached
        assert {8404, 9101} <= own, "HAProxy's counters"
        assert not {8404, 9101} & reached
        others = reached - rule_ports(clients) - rule_ports(operator) - rule_ports(monitoring)
        assert others, "such as those of ranks, which only the release's own pods reach"
        probes = container(pod.group)["livenessProbe"], container(pod.group)["readinessProbe"]
        assert {probe["httpGet"]["port"] for probe in probes} <= reached | {"serve"}
    assert rule_ports(operator) <= cell.head.listening(outside=True)
    assert "from" not in clients
    assert rule_ports(clients) == {API}


def test_haproxy_answers_in_every_pod(cell: Cell) -> None:
    for pod in (cell.head, cell.worker):
        assert "haproxy" in pod.programs()
        assert cell.answers(pod)
    metrics = cell.ask(cell.head, "/metrics")
    assert metrics is not None, "a scraper in another pod"
    assert "csps:ready" in metrics.text


def test_a_cell_comes_back_after_the_death_of_its_head_pod(cell: Cell) -> None:
    """As docs/operations.md says: nothing answers, Ray ends in the other pods, and a start like the
    first one serves again.
    """
    began = time.monotonic()
    cell.head.kill()
    assert cell.ask(cell.head, "/health") is None
    assert not cell.answers(cell.worker)
    eventually("ranks outlive their head", lambda: "raylet" not in cell.worker.programs())
    ended = time.monotonic()
    cell.worker.kill()  # the kubelet restarts a container whose `ray start --block` has ended
    cell.start()
    print(f"ranks ended {ended - began:.0f} s after the head, served again {served(began):.0f} s")
    assert all(cell.answers(pod) for pod in (cell.head, cell.worker))


def served(began: float) -> float:
    return time.monotonic() - began

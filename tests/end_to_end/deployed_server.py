"""The whole server on a Ray of its own, as `csps serve` starts it, and ways to look inside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx
import yaml
from free_ports import free_port

from csps.cli import main
from csps.protocols.core.errors import FaultError
from csps.protocols.gang.messages import RankDescription, RankStats
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import unpack
from csps.services.launch import ray_head
from csps.services.launch.deploy_config import DeployConfig, read_config
from csps.services.launch.ray_head import RayHead, session_of
from csps.services.launch.serve_command import APPLICATIONS_PATH, deploy, wait_ready
from csps.services.settings.credentials import SECRET_VARIABLE

SECRET = "known to the tests and the server"
RPC_DEADLINE_S = 60.0
DEADLINE_S = 120.0
POLL_S = 0.05
MODEL = "tiny"
CONFIG = "config.yaml"
LISTENS = "0A"

T = TypeVar("T")

_VIEW_GANGS = """
import dataclasses, json, sys
import ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for _ in sys.stdin:
    registry = serve.get_deployment_handle("Registry", "csps")
    view = registry.wait_change.remote(-1).result(timeout_s=float(sys.argv[2]))[1]
    print(json.dumps(dataclasses.asdict(view)), flush=True)
"""


class Registry:
    """A reader of the server's registry in a long-lived Ray process, because its start takes
    seconds.
    """

    def __init__(self, head: RayHead) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _VIEW_GANGS, head.address, str(DEADLINE_S)],
            env=head.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rank_addresses(self) -> list[tuple[str, int]]:
        """Return the rank addresses of all complete gangs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        line = next(line for line in self._process.stdout if line.startswith("{"))
        gangs = [gang for gang in json.loads(line).values() if gang is not None]
        return [(rank["host"], rank["port"]) for gang in gangs for rank in gang["ranks"]]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A running server."""

    config: DeployConfig
    head: RayHead
    run_dir: Path
    registry: Registry

    def redeploy(self, *, runtime_env: dict[str, Any] | None = None, **args: Any) -> Deployed:
        """Redeploy with other settings or another environment; return the server with them."""
        (application,) = self.config.data["applications"]
        changed = {**application, "args": {**application["args"], **args}}
        if runtime_env is not None:
            changed["runtime_env"] = runtime_env
        data = {**self.config.data, "applications": [changed]}
        config = _read(self.run_dir, data, self.config.port)
        # `serve deploy` sends the same, after it has imported Ray.
        self.head.put(APPLICATIONS_PATH, config.data, timeout_s=DEADLINE_S).raise_for_status()
        return replace(self, config=config)

    @property
    def url(self) -> str:
        return self.config.url

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Return Serve's own description of a deployment's processes."""
        url = f"{self.head.dashboard}/api/serve/applications/"
        answer = httpx.get(url, headers=self.head.headers, timeout=RPC_DEADLINE_S).json()
        replicas: list[dict[str, Any]] = answer["applications"]["csps"]["deployments"][deployment][
            "replicas"
        ]
        return [replica for replica in replicas if replica["state"] == "RUNNING"]

    def pids(self, deployment: str) -> set[int]:
        """Return the running processes of a deployment."""
        return {replica["pid"] for replica in self.replicas(deployment)}

    def ranks(self) -> list[RankDescription]:
        """Return what the ranks of all complete gangs say of themselves."""
        return self._answers(self.registry.rank_addresses(), "describe", RankDescription)

    def rank_pids(self) -> dict[int, int]:
        """Return the processes of a server's only gang, by their ranks."""
        return {rank.rank: rank.pid for rank in self.ranks()}

    def kv_used(self, besides: int) -> dict[int, int]:
        """Return the slots that are taken on each rank of a server's only gang but one, which may
        stand still.
        """
        addresses = self.registry.rank_addresses()
        del addresses[besides]
        return {
            answer.rank: answer.kv_used for answer in self._answers(addresses, "stats", RankStats)
        }

    def kill_replica(self, deployment: str, index: int = -1) -> None:
        """Kill one process of a deployment with SIGKILL, as soon as Serve knows of one that
        lives.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with suppress(IndexError, ProcessLookupError):
                os.kill(self.replicas(deployment)[index]["pid"], signal.SIGKILL)
                return
            assert time.monotonic() < deadline, f"{deployment} has no running replica"
            time.sleep(POLL_S)

    def listening(self, program: str) -> list[str]:
        """Return the listening addresses of processes of this name, in the notation of
        `/proc/net/tcp`.
        """
        pids = [pid for pid in session_of(self.head.pid) if name_of(pid) == program]
        sockets = {os.readlink(file) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [row[1] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets]

    def gauge(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series that have these labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=RPC_DEADLINE_S).text.splitlines()
        series = [line for line in lines if line.startswith(f"csps:{name}{{")]
        for label, value in labels.items():
            series = [line for line in series if f'{label}="{value}"' in line]
        return sum(float(line.split()[-1]) for line in series)

    def wait_gauge(self, name: str, at_least: float, **labels: str) -> None:
        """Wait until the metric has risen to a value."""
        otherwise = f"csps:{name} stays below {at_least}"
        self._wait(lambda: self.gauge(name, **labels) >= at_least, otherwise)

    def wait_zero(self, name: str) -> None:
        """Wait until the metric is zero, because the router may learn of an end after its
        client.
        """
        self._wait(lambda: self.gauge(name) == 0, f"csps:{name} stays above zero")

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, otherwise
            time.sleep(POLL_S)

    def wait_replaced(self, deployment: str, pids: set[int]) -> None:
        """Wait until as many other processes run in place of these."""

        def replaced() -> bool:
            with suppress(KeyError):  # after a redeployment, Serve knows of none at first
                now = self.pids(deployment)
                return now.isdisjoint(pids) and len(now) == len(pids)
            return False

        self._wait(replaced, f"{deployment} is not replaced")
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until `/health` reports ready."""
        wait_ready(self.config, self.head, say=print, deadline_s=DEADLINE_S)

    def assert_only_cache_left(self) -> None:
        """Assert that every rank of all gangs becomes idle, by asking the ranks, and that to the
        router all slots are free but those of cached KV.

        A gang that has just lost a rank is still being replaced, perhaps by one on other ports, so
        a rank that does not answer is looked up again.
        """
        deadline = time.monotonic() + DEADLINE_S
        busy: object = "no rank was asked"
        while time.monotonic() < deadline:
            try:
                busy = self._busy(deadline)
            except FaultError as exc:
                busy = exc
            if not busy:
                return self.wait_zero("kv_cache_usage_perc")
            time.sleep(POLL_S)
        raise AssertionError(f"not all ranks are idle: {busy}")

    def _busy(self, deadline: float) -> list[RankStats]:
        """Return the ranks that are not idle at the deadline; none as soon as all are."""
        addresses = self.registry.rank_addresses()
        while True:
            stats = self._answers(addresses, "stats", RankStats)
            busy = [rank for rank in stats if rank.requests or rank.running or rank.waiting]
            if not busy or time.monotonic() > deadline:
                return busy
            time.sleep(POLL_S)

    def slots_taken(self) -> list[int]:
        """Return the slots that each gang has taken, cached KV included."""
        return [sum(rank.kv_used for rank in ranks) for ranks in self._stats_by_gang()]

    def slots(self) -> list[int]:
        """Return the slots that each gang has."""
        return [sum(rank.kv_slots for rank in ranks) for ranks in self._stats_by_gang()]

    def _stats_by_gang(self) -> list[list[RankStats]]:
        stats = self._answers(self.registry.rank_addresses(), "stats", RankStats)
        first = [at for at, rank in enumerate(stats) if rank.rank == 0]
        return [stats[begin:end] for begin, end in pairwise([*first, len(stats)])]

    def _answers(self, addresses: Sequence[tuple[str, int]], method: str, of: type[T]) -> list[T]:
        """Return the answers of ranks in their order."""
        tls = self.config.settings.load_tls()

        async def ask(host: str, port: int) -> T:
            client = await RpcClient.connect(
                host, port, secret=SECRET.encode(), name="test", deadline_s=RPC_DEADLINE_S, tls=tls
            )
            try:
                return unpack(of, await client.call(method, deadline_s=RPC_DEADLINE_S))
            finally:
                await client.close()

        async def ask_all() -> list[T]:
            return await asyncio.gather(*(ask(host, port) for host, port in addresses))

        return asyncio.run(ask_all())


@contextmanager
def deployed(model_dir: Path, run_dir: Path, **args: Any) -> Iterator[Deployed]:
    """Start Ray and the application, wait until ready, yield, and remove everything."""
    config = _read(run_dir, _config(model_dir, run_dir, args), free_port())
    with mock.patch.dict(os.environ, {SECRET_VARIABLE: SECRET}):
        head = ray_head.start_head(run_dir, num_cpus=2)
        try:
            deploy(config, head, run_dir)
            wait_ready(config, head, say=print)
            with _running(config, head, run_dir) as server:
                yield server
        finally:
            head.stop(grace_s=0)


@contextmanager
def _running(config: DeployConfig, head: RayHead, run_dir: Path) -> Iterator[Deployed]:
    with closing(Registry(head)) as registry:
        yield Deployed(config=config, head=head, run_dir=run_dir, registry=registry)


@contextmanager
def commands_in(folder: Path) -> Iterator[None]:
    """Return commands for `main` in this process, because importing Ray takes seconds."""
    with chdir(folder), mock.patch.dict(os.environ, {SECRET_VARIABLE: SECRET}):
        yield


@contextmanager
def replaced(model_dir: Path, folder: Path, port: int) -> Iterator[Deployed]:
    """Start the server of a folder by `csps serve`, or replace it."""
    try:
        with commands_in(folder):  # where what has no path of its own is looked for
            config = _read(folder, _config(model_dir, folder, {}), port)
            command = ["serve", "--no-demo", "--config", str(folder / CONFIG), "--port", str(port)]
            assert main(command) == 0
            head = ray_head.find_head(ray_head.RUN_DIR)
        assert head is not None
        with _running(config, head, folder) as server:
            yield server
    finally:
        stop_left(folder)


def stop_left(folder: Path) -> None:
    """End the server of a folder, if it still has one."""
    stop_head(folder / ray_head.RUN_DIR)


def stop_head(run_dir: Path) -> None:
    """End the Ray whose files are in a directory, if it still runs."""
    if (head := ray_head.find_head(run_dir)) is not None:
        head.stop(grace_s=0)
        ray_head.discard_head(run_dir)


def _read(run_dir: Path, data: dict[str, Any], port: int) -> DeployConfig:
    path = run_dir / CONFIG
    path.write_text(yaml.safe_dump(data))
    return read_config(path, port=port)


def _config(model_dir: Path, run_dir: Path, args: dict[str, Any]) -> dict[str, Any]:
    application = {
        "name": "csps",
        "route_prefix": "/",
        "import_path": "csps.services.app:build",
        "args": {
            "model": str(model_dir),
            "served_model_name": MODEL,
            "telemetry": {"spans_dir": str(run_dir / "traces")},
            "kv_reuse": {"max_share": 1.0},  # so that only requests make the cache give way
            **args,
        },
    }
    return {"proxy_location": "HeadOnly", "applications": [application]}


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def slowdown() -> float:
    """Return how much the machine's other load slows this test down, at least 1.

    It is wall-clock time over processor time of an interpreter that loads torch, like each rank.
    Call it while the server is idle, because the server's own load is no excuse.
    """
    before, began = os.times(), time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=4 * DEADLINE_S)
    took_s, after = time.monotonic() - began, os.times()
    used_s = sum(after[2:4]) - sum(before[2:4])
    return max(1.0, took_s / used_s)

"""The whole Ray Serve deployment over the two servers: a Ray head on one, a node on the other.

Ray's own `ray stop` would end every Ray on the machine. Processes here end with the namespaces,
when the bed goes down, or by their sessions if Ray does not become ready. Each node offers so few
CPUs that a prefill gang of four ranks must be split two and two, and has its Rack-Server id as the
node label `csps.io/server`. Ray chooses the node of each rank, so a topology in the settings could
only guess.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from csps.protocols.core.errors import DeadlineExceeded
from csps.services.launch.deploy_config import IMPORT_PATH, DeployConfig, read_config
from csps.services.launch.ray_head import RayHead
from csps.services.launch.serve_command import deploy, last_line, wait_ready
from testbed import iproute
from testbed.claim import files_of
from testbed.network import Server, Testbed, signals_held, termination_raises

GCS_PORT, DASHBOARD_PORT = 6399, 8265
"""Ports of the head. The namespace is its own, so no other Ray can have them."""
START_S = 90.0
"""Time limit of one `ray start`."""
OBJECT_STORE_BYTES = 128 * 2**20
NODE_CPUS, PREFILL_CPUS, DECODE_CPUS = 2, 0.9, 0.05
"""CPUs of a node and of ranks: a node holds two prefill ranks (1.8 of 2 CPUs) and never three."""
RANKS_PER_SERVER = 2
SPT_TOKENS = 1024
"""Small SPT, so that prompts of a few thousand tokens already use ranks of both servers."""
SERVER_LABEL = "csps.io/server"


@dataclass(frozen=True, kw_only=True)
class _Head(RayHead):
    """A head that is known by its namespace instead of a process."""

    namespace: str

    @property
    def alive(self) -> bool:
        """Return whether a process still runs there."""
        return bool(iproute.pids(self.namespace))


def start(
    bed: Testbed,
    *,
    model: str = "needle",
    port: int = 8000,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Start Ray on both servers, deploy, and wait until ready; return the URL for server 0.

    On failure nothing of it is left, and the bed is as it was.

    Args:
        settings: settings that replace or extend the testbed's.

    Raises:
        RuntimeError: Ray was already started in this bed, or does not start; the message has its
            last output.
        CspsError: the application cannot be deployed.
    """
    folder = _new_folder(bed)
    with _undone_on_failure(folder) as started:
        head = _head(bed, folder)
        _write_token(Path(head.token_file))
        for server in bed.servers:
            _start_node(server, head, folder, started)
        config = _config(folder, serve_config(bed, model=model, port=port, settings=settings or {}))
        # Ray's REST API and the server's own listen on server 0's loopback only.
        with iproute.entered(bed.servers[0].namespace):
            deploy(config, head, folder)
            wait_ready(config, head, say=print)
    return config.url


def environment(bed: Testbed) -> dict[str, str]:
    """Return the environment for commands to the bed's Ray cluster, if it has one."""
    folder = files_of(bed.name)
    head = _head(bed, folder)
    return {**_environment(head), "RAY_ADDRESS": head.address} if folder.is_dir() else {}


def _new_folder(bed: Testbed) -> Path:
    folder = files_of(bed.name)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise RuntimeError(
            f"Ray has been started in testbed {bed.name}; allowed is once, `down` ends it"
        ) from None
    return folder


@contextmanager
def _undone_on_failure(folder: Path) -> Iterator[list[_Node]]:
    """Yield a list of nodes to end if the block fails; other processes on the servers stay."""
    started: list[_Node] = []
    with termination_raises():
        try:
            yield started
        except BaseException:
            with signals_held():
                for node in started:
                    node.kill()
                shutil.rmtree(folder, ignore_errors=True)
            raise


@dataclass(frozen=True)
class _Node:
    """Processes that `ray start` leaves on a server: the session that it led."""

    head: RayHead
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill all of its processes and wait for their end."""
        replace(self.head, pid=self.process.pid).stop(grace_s=0)
        self.process.wait()


def _head(bed: Testbed, folder: Path) -> _Head:
    return _Head(
        namespace=bed.servers[0].namespace,
        pid=0,
        address=f"{bed.servers[0].address}:{GCS_PORT}",
        dashboard=f"http://127.0.0.1:{DASHBOARD_PORT}",
        token_file=str(folder / "token"),
        log_file=str(folder / "ray-0.log"),
        socket_dir=str(folder / "http-front"),
    )


def _write_token(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def _start_node(server: Server, head: RayHead, folder: Path, started: list[_Node]) -> None:
    name = f"ray start on server {server.index}"
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"),
        f"--node-ip-address={server.address}",
        f"--num-cpus={NODE_CPUS}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        # Not in /tmp/ray, which other Rays of this machine take for theirs.
        f"--temp-dir={folder}",
        f"--labels={SERVER_LABEL}=0-{server.index}",
        *(_head_options(head) if server.index == 0 else [f"--address={head.address}"]),
    ]
    log = folder / f"ray-{server.index}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_environment(head)},
            start_new_session=True,
        )
    started.append(_Node(head, process))
    try:
        status = process.wait(START_S)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(name, START_S) from None
    if status:
        raise RuntimeError(f"{name} failed: {last_line(log.read_text())}")


def _head_options(head: RayHead) -> list[str]:
    return [
        "--head",
        f"--port={head.address.rpartition(':')[2]}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={DASHBOARD_PORT}",
    ]


def _environment(head: RayHead) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": head.token_file,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _config(folder: Path, written: Mapping[str, Any]) -> DeployConfig:
    """Return the checked deployment settings as an operator would write them."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(written, sort_keys=False))
    return read_config(path)


def serve_config(
    bed: Testbed, *, model: str, port: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return two prefill ranks and one decode rank for each server, unless the settings differ or
    have an elastic gang."""
    servers = len(bed.servers)
    pair = {
        "prefill": {"instances": RANKS_PER_SERVER * servers, "num_cpus": PREFILL_CPUS},
        "scheduling": {"spt_tokens": SPT_TOKENS},
        "decode": {"instances": servers, "num_cpus": DECODE_CPUS},
    }
    args = {"model": model, **({} if "elastic" in settings else pair), **settings}
    application = {
        "name": "csps",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        # Prompts come again here, and are to be computed.
        "args": {"kv_reuse": {"enabled": False}, **args},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }

"""The whole Ray Serve deployment over the two servers: a Ray head on one, a node on the other.

Ray's own `ray stop` would end every Ray on the machine; what runs here ends with the namespaces,
when the bed goes down. Each node offers so few CPUs that a prefill gang of four ranks has to be
split two and two, and carries its Rack-Server id as the node label `csps.io/server`: which rank
lands on which node is Ray's choice, so a topology in the settings could only guess.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from csps.services.deploy_config import IMPORT_PATH, DeployConfig, read_config
from csps.services.ray_head import RayHead
from csps.services.serve_command import deploy, wait_ready
from testbed import iproute
from testbed.claim import files_of
from testbed.network import Server, Testbed

GCS_PORT, DASHBOARD_PORT = 6399, 8265
"""Of the head; the namespace is its own, so no other Ray can have them."""
START_S = 90.0
"""For one `ray start`."""
OBJECT_STORE_BYTES = 128 * 2**20
NODE_CPUS, PREFILL_CPUS, DECODE_CPUS = 2, 0.9, 0.05
"""A node holds two prefill ranks (1.8 of 2 CPUs) and never three."""
RANKS_PER_SERVER = 2
SPT_TOKENS = 1024
"""Small, so that prompts of a few thousand tokens already take ranks of both servers."""
SERVER_LABEL = "csps.io/server"


@dataclass(frozen=True, kw_only=True)
class _Head(RayHead):
    """A head that is known by its namespace and not by a process."""

    namespace: str

    @property
    def alive(self) -> bool:
        """Something still runs there."""
        return bool(iproute.pids(self.namespace))


def start(bed: Testbed, *, model: str = "needle", port: int = 8000) -> str:
    """Start Ray on both servers, deploy, wait until ready; returns the URL, seen from server 0.

    Raises:
        RuntimeError: Ray does not start; the message carries its last words.
        CspsError: the application cannot be deployed.
    """
    folder = files_of(bed.name)
    folder.mkdir(mode=0o700, exist_ok=True)
    head = _head(bed, folder)
    for server in bed.servers:
        _start_node(server, head, folder)
    config = _config(bed, folder, model, port)
    # Ray's REST API and the server's own listen on server 0's loopback only.
    with iproute.entered(bed.servers[0].namespace):
        deploy(config, head, folder)
        wait_ready(config, head, say=print)
    return config.url


def _head(bed: Testbed, folder: Path) -> _Head:
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    return _Head(
        namespace=bed.servers[0].namespace,
        pid=0,
        address=f"{bed.servers[0].address}:{GCS_PORT}",
        dashboard=f"http://127.0.0.1:{DASHBOARD_PORT}",
        token_file=str(token_file),
        log_file=str(folder / "ray-0.log"),
    )


def _start_node(server: Server, head: RayHead, folder: Path) -> None:
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
    log = Path(folder / f"ray-{server.index}.log")
    with log.open("wb") as output:
        done = subprocess.run(
            server.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_environment(head)},
            timeout=START_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"ray start on server {server.index} failed:\n{log.read_text()[-2000:]}")


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


def _config(bed: Testbed, folder: Path, model: str, port: int) -> DeployConfig:
    """The deployment as an operator would write it down, checked."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(serve_config(bed, model=model, port=port), sort_keys=False))
    return read_config(path)


def serve_config(bed: Testbed, *, model: str, port: int) -> dict[str, Any]:
    """Two prefill ranks and one decode rank for each server."""
    servers = len(bed.servers)
    args = {
        "model": model,
        "prefill": {
            "instances": RANKS_PER_SERVER * servers,
            "num_cpus": PREFILL_CPUS,
            "spt_tokens": SPT_TOKENS,
        },
        "decode": {"instances": servers, "num_cpus": DECODE_CPUS},
    }
    application = {
        "name": "csps",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": args,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }

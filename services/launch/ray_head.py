"""Start and stop a Ray head for one machine: loopback only, with a token, no usage reports.

Its leader (`ray_leader.py`) runs detached, and a state file remembers it. `csps stop` then ends the
processes of this server and of no other (`ray stop` would end every Ray on the machine).
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from csps.protocols.core.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.launch.reverse_proxy import REVERSE_PROXY_PORTS, reverse_proxy_environment

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RUN_DIR = Path("run")
"""Directory for the state of a server started from here: log, token, process id, traces."""
STATE_FILE = "ray.json"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
START_DEADLINE_S = 60.0
STOP_GRACE_S = 3.0
"""Time for Ray to end its processes. Ray itself needs two seconds; it would wait ten and more in
vain for processes that Serve leaves running."""
STOP_DEADLINE_S = 20.0
POLL_S = 0.2
POLL_TIMEOUT_S = 5.0
PORTS = range(20_000, 25_000)
"""Ports that neither Ray gives to workers, nor Serve to replicas, nor the system to connections: a
port found free here stays free for the seconds until Ray listens on it."""
OBJECT_STORE_BYTES = 128 * 2**20
"""Small, because tensors never go through Ray; its default is a third of the machine's memory."""
LEADER = "csps.services.launch.ray_leader"
"""Module of the leading process."""
NEEDED = ("raylet", "gcs_server")
FORCE_STOP = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_kill_worker_timeout_milliseconds": "500",
}
"""Serve kills a router that fails its health checks, and Ray waits half a second and not five for a
process to end before it sends SIGKILL. A frozen router cannot drain: its clients would wait for
`drain_s` to learn that their requests are lost. A frozen rank holds its GPU."""


def command_for(name: str) -> str:
    """Return what a user types for `csps NAME`: in a clone, the Makefile's target, because `csps`
    lies in an environment there that may not be active."""
    clone = Path(__file__).resolve().parents[2]
    in_clone = (clone / "Makefile").is_file() and clone == Path.cwd()
    return f"{'make' if in_clone else 'csps'} {name}"


@dataclass(frozen=True, kw_only=True)
class RayHead:
    """A running head."""

    pid: int
    """Process id of the leader of the session of all processes of this Ray."""
    address: str
    dashboard: str
    """URL of the REST API that deploys applications."""
    token_file: str
    log_file: str
    socket_dir: str
    """Directory of the reverse proxy's sockets; in /tmp, because a socket's path must be short."""

    @property
    def alive(self) -> bool:
        """True if the leading process runs and is the one that was started."""
        return LEADER.encode() in _proc_file(self.pid, "cmdline")

    @property
    def missing(self) -> list[str]:
        """Processes without which Ray deploys nothing, although requests may be answered."""
        names = {_proc_file(pid, "comm").strip().decode() for pid in session_of(self.pid)}
        return [name for name in NEEDED if name not in names]

    @property
    def left(self) -> bool:
        """True if any process of this head is left, even without the leading process.

        After a restart of the machine the process id may belong to another session. Processes of
        this head have the token file in their environment.
        """
        mark = f"{TOKEN_VARIABLE}={self.token_file}".encode()
        return any(mark in _proc_file(pid, "environ").split(b"\0") for pid in session_of(self.pid))

    def check_variable(self, name: str) -> None:
        """Compare an environment variable with the one that the head was started with.

        Raises:
            ConfigError: they differ. Processes of a head that runs never see the new value.
        """
        prefix, given = f"{name}=".encode(), os.environb.get(name.encode())
        variables = _proc_file(self.pid, "environ").split(b"\0")
        present = next((entry for entry in variables if entry.startswith(prefix)), None)
        if present != (None if given is None else prefix + given):
            raise ConfigError(
                f"{name} is not as it was when Ray was started, and a Ray that runs keeps the old "
                f"value: set it as before, or run `{command_for('stop')}` first"
            )

    def get(self, path: str, *, timeout_s: float) -> httpx.Response:
        """Send a GET to the dashboard's REST API."""
        return self._request("GET", path, timeout_s)

    def put(self, path: str, body: object, *, timeout_s: float) -> httpx.Response:
        """Send a PUT to the dashboard's REST API."""
        return self._request("PUT", path, timeout_s, json=body)

    def _request(self, method: str, path: str, timeout_s: float, **more: Any) -> httpx.Response:
        # Not through the environment's HTTP proxy, which may not reach this machine.
        return httpx.request(
            method,
            f"{self.dashboard}{path}",
            headers=self.headers,
            timeout=timeout_s,
            trust_env=False,
            **more,
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers for HTTP requests to the dashboard."""
        return {"Authorization": f"Bearer {Path(self.token_file).read_text().strip()}"}

    def environment(self) -> dict[str, str]:
        """Return the environment of processes that talk to this head."""
        return {**_environment(self.token_file), "RAY_ADDRESS": self.address}

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the head and all that it started; return when they are gone.

        Args:
            grace_s: time for Ray to end its processes in order; 0 kills them.

        Raises:
            DeadlineExceeded: processes are left even after they were killed.
        """
        _log.info("stopping Ray: pid %d, grace %.1f s", self.pid, grace_s)
        if grace_s > 0 and self.alive:
            os.kill(self.pid, signal.SIGTERM)
            _wait(lambda: not session_of(self.pid), grace_s)
        if not _wait(lambda: _all_killed(self.pid), STOP_DEADLINE_S):
            raise DeadlineExceeded("stopping Ray", STOP_DEADLINE_S)
        shutil.rmtree(self.socket_dir, ignore_errors=True)


def start_head(run_dir: Path, *, num_cpus: int | None = None) -> RayHead:
    """Start a head whose files lie in `run_dir`; return when it accepts connections.

    Raises:
        FaultError: Ray ended at once; the message names its log.
        DeadlineExceeded: it did not come up.
    """
    run_dir = run_dir.resolve()  # other processes have other working directories
    run_dir.mkdir(parents=True, exist_ok=True)
    token_file, log_file = run_dir / "ray-token", run_dir / "ray.log"
    _write_secret(token_file, secrets.token_hex(32))
    gcs_port, dashboard_port, *other_ports = _free_ports(5 + REVERSE_PROXY_PORTS)
    ray_ports, proxy_ports = other_ports[:3], other_ports[3:]
    command = _command(gcs_port, dashboard_port, ray_ports, num_cpus)
    socket_dir = tempfile.mkdtemp(prefix="csps-", dir="/tmp")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **_environment(str(token_file)),
                **FORCE_STOP,
                **reverse_proxy_environment(
                    run_dir, Path(socket_dir), ports=proxy_ports, host=LOOPBACK
                ),
            },
            start_new_session=True,
        )
    head = RayHead(
        pid=process.pid,
        address=f"{LOOPBACK}:{gcs_port}",
        dashboard=f"http://{LOOPBACK}:{dashboard_port}",
        token_file=str(token_file),
        log_file=str(log_file),
        socket_dir=socket_dir,
    )
    # Before anything can go wrong: `csps stop` must find it whatever happens to this process.
    (run_dir / STATE_FILE).write_text(json.dumps(asdict(head)))
    _log.info("started Ray: pid %d, GCS %s, log %s", head.pid, head.address, log_file)
    try:
        _wait_for_dashboard(head, process)
    except BaseException:
        head.stop()
        discard_head(run_dir)
        raise
    return head


def find_head(run_dir: Path) -> RayHead | None:
    """Return the head that an earlier command started, or None if nothing of it is left. Check
    `alive` before use."""
    try:
        head = RayHead(**json.loads((run_dir / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return head if head.left else None


def discard_head(run_dir: Path) -> None:
    """Delete the state of a head that has ended."""
    (run_dir / STATE_FILE).unlink(missing_ok=True)
    (run_dir / "ray-token").unlink(missing_ok=True)


def _command(
    gcs_port: int, dashboard_port: int, other_ports: list[int], num_cpus: int | None
) -> list[str]:
    client_port, agent_port, agent_grpc_port = other_ports
    options = {
        "node-ip-address": LOOPBACK,
        "port": gcs_port,
        "dashboard-host": LOOPBACK,
        "dashboard-port": dashboard_port,
        "ray-client-server-port": client_port,
        "dashboard-agent-listen-port": agent_port,
        "dashboard-agent-grpc-port": agent_grpc_port,
        "object-store-memory": OBJECT_STORE_BYTES,
        **({} if num_cpus is None else {"num-cpus": num_cpus}),
    }
    return [
        *[sys.executable, "-m", LEADER, "--head"],
        "--disable-usage-stats",
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def _environment(token_file: str) -> dict[str, str]:
    return {
        **os.environ,
        **_direct_loopback(os.environ),
        "RAY_AUTH_MODE": "token",
        TOKEN_VARIABLE: token_file,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default niceness is 15, for batch jobs; people wait for these workers.
        "RAY_worker_niceness": "0",
        # Without this variable, made for desktops, Ray replaces a loopback address with that of the
        # network interface. With it, all Ray's ports are bound to loopback. Ports on which Serve
        # replicas listen to each other are not, and need the token.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def _direct_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that exempt this machine's own addresses from an HTTP proxy."""
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY")
    hosts = ",".join([*([excepted] if excepted else []), LOOPBACK, "localhost"])
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _write_secret(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _free_ports(count: int) -> list[int]:
    """Find distinct ports of `PORTS` on which nobody listens.

    Raises:
        FaultError: fewer than `count` are free.
    """
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            found.append(port)
        if len(found) == count:
            return found
    raise FaultError(f"fewer than {count} of the ports {PORTS.start} to {PORTS.stop - 1} are free")


def _wait_for_dashboard(head: RayHead, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise FaultError(f"Ray did not start; see {head.log_file}")
        with suppress(httpx.TransportError):
            if head.get("/api/version", timeout_s=POLL_TIMEOUT_S).is_success:
                return
        time.sleep(POLL_S)
    raise DeadlineExceeded("starting Ray", START_DEADLINE_S)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _proc_file(pid: int, name: str) -> bytes:
    """Read a file of /proc; empty if the process is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _all_killed(session: int) -> bool:
    """Kill every process left; return True if none was. Call it again: a raylet replaces its
    workers."""
    left = session_of(session)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not left


def session_of(leader: int) -> list[int]:
    """List the processes of the session, without zombies."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "pid (name) state ppid pgrp session ...", and a name may hold anything.
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                pids.append(int(stat.parent.name))
    return pids

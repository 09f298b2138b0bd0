"""Processor time of the router's HTTP side for every streamed token, without an engine.

    python benchmarks/http_streaming.py [--streams 64] [--rate 5000] [--seconds 6] [--serve]

One process serves the API over an engine that generates a token for every stream at once, `rate` in
all, like a decode batch. This process reads the streams from raw sockets. The figure is the
server's processor time per token written while all streams ran, less that of the engine's stand-in
(`floor`: the same ticks without a client). With `--serve` the API runs inside Ray Serve behind
HAProxy, as deployed; otherwise behind uvicorn alone.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[1]
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
START_DEADLINE_S = 60.0
MAX_TOKENS = 60_000
"""Token limit that streams do not reach by themselves."""
SETTLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Server:
    """Address of the server, and the process that does the router's work."""

    host: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Return the processor time that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def main() -> None:
    args = _arguments()
    if args.child:
        return _serve_bare(args.child, args.rate, args.streams)
    with (_deployed if args.serve else _bare)(args) as server:
        floor = _measure_floor(server, args.seconds)
        with Readers(server, args.streams) as readers:
            figures = _measure(server, readers, args.seconds)
    per_token = (figures["cpu_s"] - floor * figures["wall_s"]) / figures["tokens"]
    report = {
        **figures,
        "tokens_per_s": figures["tokens"] / figures["wall_s"],
        "floor_cpu_share": floor,
        "us_per_token": 1e6 * per_token,
        "load": os.getloadavg()[0],
        "front": "haproxy and serve" if args.serve else "uvicorn",
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return None


def _measure_floor(server: Server, seconds: float) -> float:
    """Return the share of a processor that is used without clients."""
    time.sleep(SETTLE_S)
    began, cpu = time.monotonic(), server.cpu_s()
    time.sleep(seconds)
    return (server.cpu_s() - cpu) / (time.monotonic() - began)


def _measure(server: Server, readers: Readers, seconds: float) -> dict[str, float]:
    time.sleep(SETTLE_S)
    began, cpu, tokens, reads = time.monotonic(), server.cpu_s(), readers.tokens, readers.reads
    time.sleep(seconds)
    return {
        "wall_s": time.monotonic() - began,
        "cpu_s": server.cpu_s() - cpu,
        "tokens": readers.tokens - tokens,
        "reads": readers.reads - reads,
    }


class Readers:
    """Reads all streams on a thread and counts their events."""

    def __init__(self, server: Server, streams: int) -> None:
        self.tokens = 0
        self.reads = 0
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._sockets = [_ask(server) for _ in range(streams)]
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Readers:
        for connection in self._sockets:
            self._selector.register(connection, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        for connection in self._sockets:
            connection.close()

    def _read(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(timeout=1.0):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                assert data, "a stream has ended"
                self.tokens += data.count(b"data: {")
                self.reads += 1


def _ask(server: Server) -> socket.socket:
    """Send one request."""
    asked = {"model": "needle", "prompt": "Go.", "max_tokens": MAX_TOKENS, "stream": True}
    body = json.dumps(asked).encode()
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return connection


# --- the server ------------------------------------------------------------------------------


@contextmanager
def _bare(args: argparse.Namespace) -> Iterator[Server]:
    port = _free_port()
    child = ["--child", str(port), "--rate", str(args.rate), "--streams", str(args.streams)]
    process = subprocess.Popen([sys.executable, __file__, *child])
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        yield Server(host="127.0.0.1", port=port, pid=process.pid)
    finally:
        process.terminate()
        process.wait()


def _serve_bare(port: int, rate: float, streams: int) -> None:
    import uvicorn
    from scripted_streams import make_api

    api = make_api(rate=rate, streams=streams)
    uvicorn.run(api, port=port, log_level="error", access_log=False, lifespan="on")


@contextmanager
def _deployed(args: argparse.Namespace) -> Iterator[Server]:
    from csps.services.launch import ray_head

    with tempfile.TemporaryDirectory() as folder:
        head = ray_head.start_head(Path(folder), num_cpus=2)
        try:
            port = _free_port()
            config = _serve_config(port, args)
            path = Path(folder) / "serve.yaml"
            path.write_text(yaml.safe_dump(config))
            subprocess.run(
                [sys.executable, "-m", "ray.serve.scripts", "deploy", "--address",
                 head.dashboard, str(path)],
                env=head.environment(), check=True,
            )  # fmt: skip
            pid = int(_wait_for(f"http://127.0.0.1:{port}/metrics").split()[-1])
            yield Server(host="127.0.0.1", port=port, pid=pid)
        finally:
            head.stop(grace_s=0)


def _serve_config(port: int, args: argparse.Namespace) -> dict[str, object]:
    python_path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "src")])
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "scripted",
                "route_prefix": "/",
                "import_path": "scripted_streams:build",
                "args": {"rate": args.rate, "streams": args.streams, "one_loop": args.one_loop},
                "runtime_env": {"env_vars": {"PYTHONPATH": python_path}},
            }
        ],
    }


def _wait_for(url: str) -> str:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            answer = httpx.get(url, timeout=5.0)
            if answer.status_code == 200:
                return answer.text
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"{url} does not answer"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=5_000.0, help="tokens a second, in all")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--one-loop", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

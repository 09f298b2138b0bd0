"""Check of the testbed: throughput inside a server and across the link, and a round trip.

Expected on the development machine: more than 1 GB/s inside, and 0.097 GB/s across 800 Mbit/s (the
rest of 0.1 is TCP/IP headers).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from csps.services.settings.credentials import SECRET_VARIABLE
from testbed.network import Server, Testbed

PROBE = "csps.actors.link_probe"
PROBE_S = 120.0
"""Time limit for both ends of a probe to start, measure and end."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Throughput from one rank to another."""

    gb_per_s: float
    """Median over the rounds, 1e9 bytes of payload per second."""
    between_bytes: int
    """Bytes that crossed the link meanwhile."""
    inside_bytes: int


def check(bed: Testbed, *, megabytes: float = 64, rounds: int = 5) -> dict[str, Throughput]:
    """Measure throughput between two ranks of one server, and between ranks of the two."""
    here, there = bed.servers
    return {
        "inside": measure(bed, here, here, megabytes, rounds),
        "across": measure(bed, here, there, megabytes, rounds),
    }


def measure(
    bed: Testbed, source: Server, sink: Server, megabytes: float, rounds: int
) -> Throughput:
    """Send blocks from one server to another (or the same) and time each."""
    before = bed.traffic()
    seconds = _probe(source, sink, megabytes, rounds)
    moved = bed.traffic() - before
    return Throughput(
        gb_per_s=megabytes / 1e3 / statistics.median(seconds),
        between_bytes=moved.between_bytes,
        inside_bytes=moved.inside_bytes,
    )


def round_trip_s(source: Server, sink: Server) -> float:
    """Return the median time for one byte there and an answer back, link delays included."""
    return statistics.median(_probe(source, sink, 1e-6, 50))


def _probe(source: Server, sink: Server, megabytes: float, rounds: int) -> list[float]:
    """Return the seconds of each round."""
    sizes = (str(int(megabytes * 1e6)), str(rounds))
    first = _start(source, "0", "2", source.address, "-", *sizes)
    try:
        assert first.stdout is not None
        store_at = json.loads(first.stdout.readline())
        second = _start(sink, "1", "2", sink.address, store_at, *sizes)
        try:
            output, _ = second.communicate(timeout=PROBE_S)
            first.wait(PROBE_S)
        finally:
            second.kill()
    finally:
        first.kill()
        first.communicate()
    [seconds] = json.loads(output)
    return list(seconds)


def _start(server: Server, *arguments: str) -> subprocess.Popen[str]:
    command = server.command(sys.executable, "-m", PROBE, *arguments)
    environment = {**os.environ, SECRET_VARIABLE: "only for this measurement"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

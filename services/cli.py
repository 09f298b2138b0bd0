"""The `csps` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_CONFIG = Path("config.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; a mistake is one line on standard error and status 1."""
    from csps.protocols.errors import CspsError

    arguments, rest = _parser().parse_known_args(argv)
    if rest and arguments.command != "eval":
        _parser().error(f"unknown arguments: {' '.join(rest)}")
    try:
        return _run(arguments, rest)
    except CspsError as error:
        print(f"csps: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("csps: interrupted; `csps stop` ends what was started", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    # Imported by need: `--help` should not take the seconds that Ray and torch take to import.
    match arguments.command:
        case "serve":
            from csps.services.serve_command import READY_DEADLINE_S, serve

            serve(
                arguments.config,
                port=arguments.port,
                with_demo=not arguments.no_demo,
                ready_deadline_s=arguments.ready_timeout or READY_DEADLINE_S,
            )
        case "stop":
            from csps.services.serve_command import stop

            stop()
        case "demo":
            from csps.services.demo_command import demo
            from csps.services.deploy_config import read_config

            demo(read_config(arguments.config, port=arguments.port))
        case "check-config":
            from csps.services.serve_command import check_config

            check_config(arguments.config)
        case "eval":
            from csps.services.eval_command import main as evaluate

            return evaluate(rest)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="csps", description="Long-context LLM server.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start a server on this machine and ask it something")
    serve.add_argument("--no-demo", action="store_true", help="do not send a first request")
    serve.add_argument(
        "--ready-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long to wait until the server takes requests (default: 300)",
    )
    commands.add_parser("stop", help="drain and stop the server that was started from here")
    demo = commands.add_parser("demo", help="send a 16K-token question to the running server")
    check = commands.add_parser("check-config", help="check a configuration file")
    commands.add_parser("eval", help="accuracy on hidden facts", add_help=False)
    for command in (serve, demo, check):
        command.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    for command in (serve, demo):
        command.add_argument("--port", type=int, help="HTTP port, instead of the file's")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("expected a positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())

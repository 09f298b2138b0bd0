"""The command `csps bench`: load tests, the search for the highest rate, and reports."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from csps.protocols.core.command_line import CommandParser

COMMANDS = {
    "serve": "load test of an OpenAI-compatible server",
    "sweep": "the highest request rate that keeps the SLO",
    "report": "one HTML page of one or several results",
}


def bench(argv: Sequence[str]) -> int:
    """Run `csps bench serve`, `sweep` or `report`; each parses its own arguments."""
    parser = CommandParser(
        prog="csps bench",
        description="Load tests against service level objectives.",
        epilog="\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS))
    command = parser.parse_args(argv[:1]).command
    module = importlib.import_module(f"csps.loadgen.bench.{command}")
    status: int = module.main(argv[1:])
    return status

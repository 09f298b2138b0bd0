"""Dispatch the `csps` command to the package that holds each subcommand.

A subcommand is a function `(argv) -> int | None` that parses its own arguments. Only the requested
one is imported: `csps --help` does not wait seconds for Ray or torch, and a command works even if
another one's libraries are missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csps import __version__

MISUSED = 2
"""Exit status if no command was named, as in argparse."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""

Main = Callable[[Sequence[str]], int | None]
"""Type of a subcommand; None means success."""


@dataclass(frozen=True)
class Subcommand:
    """Location of a subcommand, and its line of help."""

    module: str
    """Module below `csps`."""
    function: str
    help: str

    def load(self) -> Main:
        """Import the module and return the function."""
        main: Main = getattr(importlib.import_module(f"csps.{self.module}"), self.function)
        return main


COMMANDS = {
    "serve": Subcommand("services.launch.commands", "serve", "start a server on this machine"),
    "stop": Subcommand(
        "services.launch.commands", "stop", "drain and stop the server started from here"
    ),
    "demo": Subcommand(
        "services.launch.commands", "demo", "send a 16K-token question to the server"
    ),
    "ask": Subcommand(
        "services.launch.ask_command", "ask", "ask the server a question, about a text or not"
    ),
    "chat": Subcommand("services.launch.ask_command", "chat", "talk to the server"),
    "init": Subcommand(
        "services.launch.init_command", "init", "write a configuration with every setting"
    ),
    "check-config": Subcommand(
        "services.launch.commands", "check_config", "check a configuration, and say what fits"
    ),
    "collect-env": Subcommand(
        "services.launch.collect_env", "collect_env", "print what a bug report needs"
    ),
    "bench": Subcommand("loadgen.commands", "bench", "run load tests against SLOs, and report"),
    "simulate": Subcommand(
        "loadgen.simulator.simulate", "main", "run a scheduling policy on a simulated cluster"
    ),
    "capacity": Subcommand(
        "loadgen.simulator.capacity_command",
        "main",
        "find the load that hardware carries, or the hardware for a load",
    ),
    "plan": Subcommand(
        "loadgen.planner.command",
        "main",
        "find the best configuration for an objective, and say why",
    ),
    "rates": Subcommand(
        "loadgen.simulator.rates_command",
        "main",
        "compute the improvement rates of the policy tetris",
    ),
    "profile": Subcommand(
        "services.profiling.command", "main", "measure the times of steps and links"
    ),
    "train": Subcommand(
        "services.profiling.train", "main", "learn how much accuracy sparse attention loses"
    ),
    "trace": Subcommand(
        "services.launch.trace_command",
        "main",
        "traced requests, and how they spent their time",
    ),
    "top": Subcommand("services.launch.top_command", "main", "what the server does now"),
    "eval": Subcommand("services.evaluation.command", "main", "measure accuracy on hidden facts"),
}
"""Subcommands in the order in which `--help` lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; report an error as one line on standard error and status 1."""
    from csps.protocols.core.errors import CspsError

    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _parser().print_help()
        return MISUSED
    command = COMMANDS[_parser().parse_args(words[:1]).command]
    # Last, so that it hides nothing: for a policy of one's own, `module:Class`.
    sys.path.append(str(Path.cwd()))
    try:
        return command.load()(words[1:]) or 0
    except CspsError as error:
        print(f"csps: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        from csps.services.launch import ray_head

        runs = ray_head.find_head(ray_head.RUN_DIR) is not None
        hint = "; a server runs, `csps stop` ends it" if runs else ""
        print(f"\ncsps: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    from csps.protocols.core.command_line import CommandParser

    width = max(map(len, COMMANDS))
    listed = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser = CommandParser(
        prog="csps",
        description="Long-context LLM server.",
        epilog="\n".join(["commands (each has its own --help):", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"csps {__version__}")
    parser.add_argument("command", type=_command, help="one of those below")
    return parser


def _command(name: str) -> str:
    from csps.protocols.core.errors import abridged, nearest

    if name not in COMMANDS:
        raise argparse.ArgumentTypeError(
            f"unknown command {abridged(name)}{nearest(name, COMMANDS)}"
        )
    return name


if __name__ == "__main__":
    sys.exit(main())

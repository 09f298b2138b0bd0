"""Parse the arguments of `csps serve`, `stop`, `demo` and `check-config`.

Each command imports its implementation when it runs: `csps serve --help` must not wait seconds for
Ray and torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from csps.protocols.core.command_line import CommandParser
from csps.services.launch.serve_options import add_options, as_parsed


def serve(argv: Sequence[str]) -> None:
    """Start a server on this machine."""
    parser = CommandParser(
        prog="csps serve",
        description="Start a server on this machine, and ask the included model something.",
        epilog="Command lines of `vllm serve` are understood: an option without a meaning here is "
        "named with the reason.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--no-demo", action="store_true", help="do not send a first request")
    parser.add_argument(
        "--block",
        action="store_true",
        help="stay in the foreground; a signal drains and stops the server",
    )
    parser.add_argument(
        "--ready-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long to wait until the server takes requests (default: 300)",
    )
    arguments = parser.parse_args(as_parsed(argv))
    from csps.services.launch.asked_server import asked, gpus_here, serves_shipped_model
    from csps.services.launch.serve_command import READY_DEADLINE_S
    from csps.services.launch.serve_command import serve as start

    wanted = asked(arguments, gpus=gpus_here())
    for note in wanted.notes:
        print(f"  {note}")
    wanted.give_keys()
    config = wanted.read(download=True)
    start(
        config,
        with_demo=not arguments.no_demo and serves_shipped_model(config.settings),
        ready_deadline_s=arguments.ready_timeout or READY_DEADLINE_S,
        block=arguments.block,
    )


def stop(argv: Sequence[str]) -> None:
    """Drain and stop the server that was started from this directory."""
    _parser("stop", "Drain and stop the server that was started from here.").parse_args(argv)
    from csps.services.launch.serve_command import stop as end

    end()


def demo(argv: Sequence[str]) -> None:
    """Send a 16K-token question to the running server."""
    parser = _parser("demo", "Send a 16K-token question to the running server.")
    parser.add_argument("--config", type=Path, help="default: that of the server started from here")
    parser.add_argument("--port", type=int, help="HTTP port, instead of the configuration's")
    arguments = parser.parse_args(argv)
    from csps.services.launch.ask_command import running_config
    from csps.services.launch.demo_command import demo as ask

    ask(running_config(arguments.config, port=arguments.port))


def check_config(argv: Sequence[str]) -> None:
    """Report if a configuration can be deployed."""
    parser = CommandParser(
        prog="csps check-config", description="Check a configuration.", allow_abbrev=False
    )
    add_options(parser)
    parser.add_argument(
        "--hardware", metavar="COUNTxGPU", help="plan for GPUs that are not here, such as 8xH100"
    )
    arguments = parser.parse_args(as_parsed(argv))
    from csps.services.launch.asked_server import asked, gpus_here
    from csps.services.launch.serve_command import check_config as check
    from csps.services.planning.hardware import named_hardware

    hardware = None if arguments.hardware is None else named_hardware(arguments.hardware)
    wanted = asked(arguments, gpus=gpus_here() if hardware is None else hardware.count)
    wanted.give_keys()
    check(wanted.read(download=False), wanted.config, hardware)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return CommandParser(prog=f"csps {name}", description=description)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("expected a positive number of seconds")
    return seconds

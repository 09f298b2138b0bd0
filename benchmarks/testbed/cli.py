"""Command line of the testbed.

    python benchmarks/testbed up [--rate 800mbit] [--delay 0.2ms]    prints the bed's name
    python benchmarks/testbed list
    python benchmarks/testbed exec SERVER COMMAND…                   on server 0 or 1
    python benchmarks/testbed rate 2gbit
    python benchmarks/testbed check                                  throughput inside and across
    python benchmarks/testbed ray-up                                 the server, over two Ray nodes
    python benchmarks/testbed down                                   every bed without an owner

`exec`, `rate`, `check` and `ray-up` take `--bed NAME` where more than one is up. `down` takes
whatever `up` made and whatever a killed benchmark left; a running benchmark's bed stays.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from testbed import iproute, ray_cluster
from testbed.check import check, round_trip_s
from testbed.claim import BedInUseError, claimed
from testbed.link import UNLIMITED, Link
from testbed.network import Testbed, down, up


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = _parser().parse_args(arguments)
    try:
        iproute.require()
        status: int | None = args.run(args)
    except (ValueError, RuntimeError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testbed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("up", help="make a bed")
    make.add_argument("--rate", default="800mbit", help=f"kbit, mbit, gbit, or {UNLIMITED}")
    make.add_argument("--delay", default="0ms", help="one way: us, ms, s")
    make.set_defaults(run=_up)
    commands.add_parser("list", help="names of beds").set_defaults(run=_list)
    commands.add_parser("down", help="take beds down").set_defaults(run=_down)
    inside = commands.add_parser("exec", help="run a command on a server")
    inside.add_argument("server", type=int, choices=(0, 1))
    inside.add_argument("command", nargs=argparse.REMAINDER)
    rate = commands.add_parser("rate", help="change the link's rate")
    rate.add_argument("rate")
    measure = commands.add_parser("check", help="measure throughput and round trip")
    ray = commands.add_parser("ray-up", help="deploy on two Ray nodes")
    ray.add_argument("--model", default="needle", help="checkpoint directory or shipped model")
    ray.add_argument("--port", type=int, default=8000, help="of the API, on server 0")
    ray.add_argument("--settings", type=Path, metavar="FILE", help="YAML, beside the testbed's")
    for command, run in ((inside, _exec), (rate, _rate), (measure, _check), (ray, _ray_up)):
        command.add_argument("--bed", help="name, where several are up")
        command.set_defaults(run=run)
    return parser


def _up(args: argparse.Namespace) -> None:
    print(up(Link.parse(args.rate, args.delay)).name)


def _list(_args: argparse.Namespace) -> None:
    for name in claimed():
        print(name)


def _down(_args: argparse.Namespace) -> None:
    for name in claimed():
        with suppress(BedInUseError):
            down(name)
            print(name, "is gone")


def _exec(args: argparse.Namespace) -> None:
    bed = _bed(args)
    command = bed.servers[args.server].command(*args.command)
    os.execvpe(command[0], command, {**os.environ, **ray_cluster.environment(bed)})


def _rate(args: argparse.Namespace) -> None:
    _bed(args).set_rate(Link.parse(args.rate).rate_bits)


def _check(args: argparse.Namespace) -> None:
    bed = _bed(args)
    for where, result in check(bed).items():
        print(
            f"{where:7} {result.gb_per_s:6.3f} GB/s   on the link {result.between_bytes:>11,} B"
            f"   inside {result.inside_bytes:>11,} B"
        )
    print(f"round trip across {1e3 * round_trip_s(*bed.servers):.3f} ms")


def _ray_up(args: argparse.Namespace) -> None:
    settings = {} if args.settings is None else yaml.safe_load(args.settings.read_text())
    url = ray_cluster.start(_bed(args), model=args.model, port=args.port, settings=settings)
    print(f"{url} on server 0; ask it with `testbed exec 0 curl {url}/health`")


def _bed(args: argparse.Namespace) -> Testbed:
    """Return the bed that is meant; ValueError when that is not clear."""
    names = list(claimed())
    if args.bed is not None and args.bed not in names:
        raise ValueError(f"there is no testbed {args.bed}; there are {names}")
    if args.bed is None and len(names) != 1:
        raise ValueError(f"say which testbed with --bed: there are {names}")
    return Testbed(args.bed or names[0])

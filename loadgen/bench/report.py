"""The command `csps bench report`: results on one HTML page, and as PNG files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from csps.loadgen.report.page import draw_all, write_page
from csps.loadgen.results.result import Result, read_result
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError

PNG_DPI = 130


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    arguments = parse(argv)
    results = sorted(map(read_result, _paths(arguments.results)), key=_by_label_and_rate)
    write_page(results, arguments.output, arguments.title)
    print(f"report: {arguments.output}")
    if arguments.png_dir:
        arguments.png_dir.mkdir(parents=True, exist_ok=True)
        for name, _, figure in draw_all(results):
            figure.savefig(arguments.png_dir / f"{name}.png", dpi=PNG_DPI)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = CommandParser(
        prog="csps bench report", description="One self-contained HTML page of one or more results."
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files, or folders of them")
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("report.html"), help="default: %(default)s"
    )
    parser.add_argument("--title", default="Load test", help="of the page")
    parser.add_argument("--png-dir", type=Path, metavar="DIR", help="write the plots here as well")
    return parser.parse_args(argv)


def _by_label_and_rate(result: Result) -> tuple[str, float]:
    """Return a sort key that puts runs without a rate (no load, closed loop) first."""
    rate = result["request_rate"]
    return result["label"], 0.0 if isinstance(rate, str) else rate


def _paths(given: Sequence[Path]) -> list[Path]:
    """Return the files, with folders replaced by their JSON files in order of name.

    Raises:
        ConfigError: there is no file.
    """
    paths = [
        file
        for path in given
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    if not paths:
        raise ConfigError(f"no JSON file in {', '.join(map(str, given))}")
    return paths

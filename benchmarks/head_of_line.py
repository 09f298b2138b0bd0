"""Short requests that arrive while a long prefill holds every prefill rank.

    python benchmarks/head_of_line.py [--long 32768] [--short 200] [--json FILE]

Measures, on one deployed server: the short requests' TTFT when it is idle, the long request's
TTFT alone, then both together, a new short request a second after the last one was answered.
`bound_s` is three times the idle TTFT plus the time of one layer; `growth_s` is what the long
request took longer, to be compared with the work of the short ones, `short_work_s`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import report
import wide_checkpoint
from deployed import deployed

from csps.loadgen.streaming_client import Timed, stream

PAUSE_S = 1.0
"""Between short requests: arrivals that do not follow the long request's layers."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint.make(Path(folder) / "wide")
        settings = {
            "model": str(model),
            "served_model_name": "wide",
            "prefill": {"instances": 2, "spt_tokens": args.long // 2},
        }
        with deployed(settings) as url, httpx.Client(base_url=url) as client:
            rows = [_round(client, url, args, seed) for seed in range(args.rounds + 1)][1:]
    middle = sorted(rows, key=lambda row: row["short_busy_s"])[len(rows) // 2]
    report.publish({"benchmark": "head_of_line", "median_round": middle}, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    return report.with_json_option(parser).parse_args()


def _round(client: httpx.Client, url: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    idle = [_ask(client, args.short, seed * 100 + i).ttft_s for i in range(7)]
    alone = _ask(client, args.long, seed * 100 + 50)
    together, busy = _together(client, url, args, seed)
    # The last layer computes single rows; the others share the time.
    layer_s = alone.extra["timings"]["prefill_s"] / (wide_checkpoint.LAYERS - 1)
    idle_s, busy_s = statistics.median(idle), statistics.median(busy)
    return {
        "short_idle_s": idle_s,
        "short_busy_s": busy_s,
        "shorts": len(busy),
        "layer_s": layer_s,
        "bound_s": 3 * idle_s + layer_s,
        "long_alone_s": alone.ttft_s,
        "long_busy_s": together.ttft_s,
        "growth_s": together.ttft_s - alone.ttft_s,
        "short_work_s": sum(idle) / len(idle) * len(busy),
    }


def _together(
    client: httpx.Client, url: str, args: argparse.Namespace, seed: int
) -> tuple[Timed, list[float]]:
    """The long request's answer and the TTFTs of the short ones sent meanwhile."""
    result: list[Timed] = []

    def ask_long() -> None:
        with httpx.Client(base_url=url) as own:
            result.append(_ask(own, args.long, seed * 100 + 51))

    thread = threading.Thread(target=ask_long)
    thread.start()
    busy = []
    time.sleep(PAUSE_S)
    while thread.is_alive():
        asked = _ask(client, args.short, seed * 100 + 60 + len(busy)).ttft_s
        if thread.is_alive():
            busy.append(asked)
        time.sleep(PAUSE_S)
    thread.join()
    return result[0], busy


def _ask(client: httpx.Client, tokens: int, seed: int) -> Timed:
    body = {
        "model": "wide",
        "prompt": wide_checkpoint.prompt(tokens, seed=seed),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "csps": {"explain": True},
    }
    return stream(client, "/v1/completions", body)


if __name__ == "__main__":
    main()

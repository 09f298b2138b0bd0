"""Short requests that arrive while a long prefill occupies every prefill rank.

    python benchmarks/head_of_line.py [--long 32768] [--short 200] [--json FILE]

Measures, on one deployed server and in rounds: the short requests' TTFT on an idle server, the long
request's TTFT alone, and both together. Short requests arrive at random and do not wait for one
another, so they meet the long one at any point of its layers.

`short_busy_s` should stay below `bound_s`, three times the idle TTFT plus the time of one layer.
`growth_s`, the extra time of the long request, should stay below `short_work_s`, the work of the
short ones. Read the growth beside `alone_spread_s`, the spread of the long request alone, and
beside `yielded_s`, the time for which the slower prefill rank was preempted by short requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import report
import wide_checkpoint
from deployed import deployed
from streaming_client import Timed, stream

GAP_S = 2.0
"""Mean gap between arrivals of short requests."""
IDLE_REQUESTS = 7
MAX_UNDER_WAY = 64


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint.make(Path(folder) / "wide")
        settings = {
            "model": str(model),
            "served_model_name": "wide",
            "prefill": {"instances": 2},
            "scheduling": {"spt_tokens": args.long // 2},
        }
        with deployed(settings) as url, httpx.Client(base_url=url) as client:
            _round(client, args, 0)
            rounds = [_round(client, args, seed) for seed in range(1, args.rounds + 1)]
    rows, busy_s = [row for row, _ in rounds], [s for _, busy in rounds for s in busy]
    report.publish({"benchmark": "head_of_line", **_summary(rows, busy_s)}, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    return report.with_json_option(parser).parse_args()


def _round(
    client: httpx.Client, args: argparse.Namespace, seed: int
) -> tuple[dict[str, Any], list[float]]:
    """Return a row of the table, and the TTFT of every short request that met the long one."""
    draw = random.Random(seed)
    idle_s = [_ask(client, args.short, draw).ttft_s for _ in range(IDLE_REQUESTS)]
    alone = _ask(client, args.long, draw)
    together, busy = _together(client, args, draw)
    busy_s = [answer.ttft_s for answer in busy]
    row = {
        "short_idle_s": statistics.median(idle_s),
        "shorts": len(busy),
        "short_busy_s": statistics.median(busy_s),
        "short_work_s": statistics.mean(idle_s) * len(busy),
        "long_alone_s": alone.ttft_s,
        "long_busy_s": together.ttft_s,
        # The last layer computes single rows; the others share the time.
        "layer_s": alone.extra["timings"]["prefill_s"] / (wide_checkpoint.LAYERS - 1),
        "yielded_s": together.extra["timings"]["yielded_s"],
    }
    return row, busy_s


def _together(
    client: httpx.Client, args: argparse.Namespace, draw: random.Random
) -> tuple[Timed, list[Timed]]:
    """Return the long request's answer and those of the short requests sent meanwhile."""
    with ThreadPoolExecutor(MAX_UNDER_WAY) as pool:
        long = pool.submit(_ask, client, args.long, random.Random(draw.random()))
        short = []
        while not wait([long], timeout=draw.expovariate(1 / GAP_S)).done:
            short.append(pool.submit(_ask, client, args.short, random.Random(draw.random())))
        return long.result(), [task.result() for task in short]


def _ask(client: httpx.Client, tokens: int, draw: random.Random) -> Timed:
    body = {
        "model": "wide",
        "prompt": wide_checkpoint.prompt(tokens, seed=draw.randrange(2**32)),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "csps": {"explain": True},
    }
    return stream(client, "/v1/completions", body)


def _summary(rows: list[dict[str, Any]], busy_s: list[float]) -> dict[str, Any]:
    """Return the figures over all rounds."""
    middle = {
        name: statistics.median(row[name] for row in rows)
        for name in ("short_idle_s", "layer_s", "long_alone_s", "yielded_s", "short_work_s")
    }
    alone_s = [row["long_alone_s"] for row in rows]
    return {
        **middle,
        "shorts": len(busy_s),
        "short_busy_s": statistics.median(busy_s),
        "short_busy_max_s": max(busy_s),
        "bound_s": 3 * middle["short_idle_s"] + middle["layer_s"],
        "growth_s": statistics.median(row["long_busy_s"] - row["long_alone_s"] for row in rows),
        "alone_spread_s": max(alone_s) - min(alone_s),
    }


if __name__ == "__main__":
    main()

"""Check the configurator against measurements and against an exhaustive search.

    python benchmarks/configurator.py lookup
    python benchmarks/configurator.py oracle [--planted] [--cluster FILE] [--instances 2 4]
    python benchmarks/configurator.py starts [--planted] [--cluster FILE] [--instances 2 4]
    sudo python benchmarks/configurator.py simulator --sib FILE [--cluster FILE] [--rate 800mbit]
        [--lengths 4096 8192 16384] [--configurations 72] [--rounds 3] [--measured FILE]
    python benchmarks/configurator.py live --base-url URL [--length 32768] [--rounds 7]

Each part takes less than eight minutes. `--json FILE` stores its rows; `configurator_table.py`
makes one table of them with the targets.

`lookup` measures processor time of a look-up in a cost table whose buckets have all options.
`oracle` and `starts` are in `configurator_oracle.py`, `simulator` in `configurator_simulator.py`.
`live` asks a server that was profiled and trained, with requests of each kind in turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report
from configurator_oracle import oracle, starts
from configurator_simulator import simulator
from report import Section

from csps.configurator.costs.cost_table import Allowed, Bucket, CostTable
from csps.configurator.costs.latency_tables import SHIPPED
from csps.configurator.search.space import LOSSES, TIMES
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import BOUNDED, Objective, RequestClass, option_name
from csps.protocols.core.topology import GroupShape

LOOKUPS = 20_000
UNPIPELINED: dict[str, Any] = {
    "attention": "csa", "strategy": "ntp", "levels": 1, "drop_ratio": 0, "pipelined": False,
}  # fmt: skip
"""Exact SP-NTP that waits for every exchange."""


def main() -> int:
    """Measure and publish; return the exit status."""
    arguments = _arguments()
    rows, result = arguments.section(arguments)
    report.publish({"benchmark": f"configurator {arguments.what}", **result}, rows, arguments.json)
    return 0


# --- look-up -----------------------------------------------------------------------------------


def lookup(arguments: argparse.Namespace) -> Section:
    """Measure microseconds of processor time with an option for each bound in every bucket."""
    shape, length = GroupShape((2, 2)), 32_768
    sparse = [
        Allowed(
            option_name("csa", CsaSettings(drop_ratios=((share,),))),
            round(1000 * share),
            100 * number,
        )
        for number, share in enumerate(np.linspace(0.99, 0.1, len(LOSSES) + len(TIMES)).tolist())
    ]
    bucket = Bucket(BOUNDED, shape, length.bit_length() - 1)
    table = CostTable(latencies=SHIPPED, buckets={bucket: (Allowed("ulysses"), *sparse)})
    rows = []
    for objective in (
        Objective(max_accuracy_loss=0.01),
        Objective(kind="accuracy", max_ttft_ms=5_000.0),
    ):
        cls = RequestClass(objective=objective).key
        table.best(cls, shape, 0, length)
        begin = time.process_time()
        for waited_ns in range(LOOKUPS):
            table.best(cls, shape, 0, length, waited_ns)
        took_us = (time.process_time() - begin) / LOOKUPS * 1e6
        rows.append({"objective": objective.kind, "options": 1 + len(sparse), "us": took_us})
    return rows, {}


# --- a server ----------------------------------------------------------------------------------


def live(arguments: argparse.Namespace) -> Section:
    """Measure bounds on the loss in turns, then bounds on TTFT relative to exact attention."""
    with httpx.Client(base_url=arguments.base_url, timeout=300.0) as client:
        ask = _Asker(client, arguments.length, arguments.pause)
        wishes = {
            "unpipelined": UNPIPELINED,
            "exact": {"attention": "exact"},
            **{f"loss {bound:g}": {"max_accuracy_loss": bound} for bound in (0.0, 0.01, 0.05)},
        }
        rows = ask.by_turns(wishes, arguments.rounds)
        exact_ms = 1000 * next(row["ttft_s"] for row in rows if row["wish"] == "exact")
        bounds = {share: share * exact_ms for share in (0.6, 0.8, 1.0, 1.3)}
        timed = {
            f"ttft {share:g}": {"objective": "accuracy", "max_ttft_ms": bound}
            for share, bound in bounds.items()
        }
        rows += ask.by_turns(timed, arguments.rounds)
    return rows, {"length": arguments.length}


class _Asker:
    """Sends prompts without common text, one at a time."""

    def __init__(self, client: httpx.Client, length: int, pause_s: float) -> None:
        self._client, self._length, self._pause_s = client, length, pause_s
        self._model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._draw = random.Random(time.time_ns())

    def by_turns(self, wishes: dict[str, dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
        """Return a row for each wish; the first round fills the cost table."""
        answers_by_wish: dict[str, list[dict[str, Any]]] = {name: [] for name in wishes}
        for number in range(rounds + 1):
            for name, wish in wishes.items():
                answer = self._ask(wish)
                if number:
                    answers_by_wish[name].append(answer)
            if not number:
                time.sleep(self._pause_s)  # the configurator answers in the background
        return [self._row(name, wishes[name], answers) for name, answers in answers_by_wish.items()]

    def _ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": [self._draw.randrange(10, 250) for _ in range(self._length)],
            "max_tokens": 1,
            "temperature": 0,
            "csps": {"explain": True, **wish},
        }
        explained: dict[str, Any] = (
            self._client.post("/v1/completions", json=body).raise_for_status().json()
        )
        return explained["csps"]

    def _row(
        self, name: str, wish: dict[str, Any], answers: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        ttfts = [answer["timings"]["ttft_s"] for answer in answers]
        plan = answers[-1]["plan"]
        bound_ms = wish.get("max_ttft_ms")
        return {
            "wish": name,
            "ttft_s": statistics.median(ttfts),
            "predicted_s": plan["predicted_ttft_ms"] / 1000,
            "strategy": plan["strategy"],
            "loss": plan["predicted_accuracy_loss"],
            "said_met": plan["bounds_met"],
            "kept": None
            if bound_ms is None
            else sum(1000 * ttft <= bound_ms for ttft in ttfts) / len(ttfts),
        }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sections = {
        "lookup": lookup,
        "oracle": oracle,
        "starts": starts,
        "simulator": simulator,
        "live": live,
    }
    parser.add_argument("what", choices=sections)
    here = Path(__file__).with_name("needle-two-servers.yaml")
    parser.add_argument("--cluster", default=str(here), help="a file as `csps plan` takes it")
    parser.add_argument("--planted", action="store_true", help="a loss that makes bounds bind")
    parser.add_argument("--sib", type=Path, default=Path("run/scaling-information-base.sqlite"))
    parser.add_argument("--pause", type=float, default=30.0, help="s, for the configurator")
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--configurations", type=int, default=72)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measured", type=Path, help="rows of an earlier run of `simulator`")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--length", type=int, default=32_768)
    arguments = report.with_json_option(parser).parse_args()
    arguments.section = sections[arguments.what]
    return arguments


if __name__ == "__main__":
    sys.exit(main())

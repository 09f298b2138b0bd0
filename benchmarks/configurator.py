"""Check the configurator against measurements and against an exhaustive search.

    python benchmarks/configurator.py lookup
    python benchmarks/configurator.py oracle [--planted] [--cluster FILE] [--instances 2 4]
    python benchmarks/configurator.py starts [--planted] [--cluster FILE] [--instances 2 4]
    sudo python benchmarks/configurator.py simulator --sib FILE [--cluster FILE] [--rate 800mbit]
        [--lengths 4096 8192 16384] [--configurations 72] [--rounds 3] [--measured FILE]
    python benchmarks/configurator.py live --base-url URL [--lengths 8192 16384 32768] [--rounds 7]

Each part takes less than eight minutes. `--json FILE` stores its rows; `configurator_table.py`
makes one table of them with the targets.

`lookup` measures processor time of a look-up in a cost table whose buckets have all options.
`oracle` and `starts` are in `configurator_oracle.py`, `simulator` in `configurator_simulator.py`.
`live` asks a server that was profiled and trained, with requests of each kind in turns. What the
bound of 0 chose is asked for unpipelined, too, so that dropping and overlap can be told apart.
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
BOUNDS = (0.0, 0.01, 0.05)
"""Bounds on the loss."""
SHARES = (0.6, 0.8, 1.0, 1.3, 1.6, 2.0)
"""Bounds on TTFT, as shares of exact attention's."""


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
    runs: list[dict[str, Any]] = []
    with httpx.Client(base_url=arguments.base_url, timeout=300.0) as client:
        for length in arguments.lengths or (8_192, 16_384, 32_768):
            ask = _Asker(client, length, arguments.pause)
            runs += ask.by_turns(
                {
                    "unpipelined": UNPIPELINED,
                    "exact": {"attention": "exact"},
                    **{f"loss {bound:g}": {"max_accuracy_loss": bound} for bound in BOUNDS},
                },
                arguments.rounds,
                waiting="loss 0",
            )
            exact_ms = 1000 * median_of(runs, length, "exact")
            timed = {
                f"ttft {share:g}": {"objective": "accuracy", "max_ttft_ms": share * exact_ms}
                for share in SHARES
            }
            runs += ask.by_turns(timed, arguments.rounds)
    return live_rows(runs), {"runs": runs}


def median_of(runs: Sequence[dict[str, Any]], length: int, wish: str) -> float:
    """Return the median TTFT of a wish in seconds."""
    return statistics.median(
        run["ttft_s"] for run in runs if (run["tokens"], run["wish"]) == (length, wish)
    )


def live_rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each length and wish: medians, and the share of bounds kept."""
    rows = []
    for tokens, wish in dict.fromkeys((run["tokens"], run["wish"]) for run in runs):
        found = [run for run in runs if (run["tokens"], run["wish"]) == (tokens, wish)]
        *_, last = found
        bounded = [run for run in found if run["bound_s"] is not None]
        rows.append(
            {
                "tokens": tokens,
                "wish": wish,
                "ttft_s": median_of(runs, tokens, wish),
                "predicted_s": statistics.median(run["predicted_s"] for run in found),
                **{key: last[key] for key in ("strategy", "levels", "ratio", "pipelined", "loss")},
                "said_met": last["said_met"],
                "kept": sum(run["ttft_s"] <= run["bound_s"] for run in bounded) / len(bounded)
                if bounded
                else None,
            }
        )
    return rows


class _Asker:
    """Sends prompts without common text, one at a time."""

    def __init__(self, client: httpx.Client, length: int, pause_s: float) -> None:
        self._client, self._length, self._pause_s = client, length, pause_s
        self._model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._draw = random.Random(time.time_ns())

    def by_turns(
        self, wishes: dict[str, dict[str, Any]], rounds: int, waiting: str | None = None
    ) -> list[dict[str, Any]]:
        """Return a run for each answer but the first round's, which fills the cost table.

        Args:
            waiting: wish whose choice is asked for unpipelined as well, if it drops tokens.
        """
        for wish in wishes.values():
            self._ask(wish)
        time.sleep(self._pause_s)  # the configurator answers in the background
        if waiting is not None and (csa := self._ask(wishes[waiting])["plan"]["csa"]):
            wishes = {**wishes, f"{waiting}, unpipelined": _unpipelined(csa)}
        return [
            self._run(name, wish, self._ask(wish))
            for _ in range(rounds)
            for name, wish in wishes.items()
        ]

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

    def _run(self, name: str, wish: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        plan = answer["plan"]
        csa, bound_ms = plan["csa"], wish.get("max_ttft_ms")
        return {
            "tokens": self._length,
            "wish": name,
            "ttft_s": answer["timings"]["ttft_s"],
            "predicted_s": plan["predicted_ttft_ms"] / 1000,
            "bound_s": None if bound_ms is None else bound_ms / 1000,
            "strategy": plan["strategy"],
            "levels": csa and csa["levels"],
            "ratio": csa and _ratio(csa),
            "pipelined": csa and csa["pipelined"],
            "loss": plan["predicted_accuracy_loss"],
            "said_met": plan["bounds_met"],
            "reason": plan["reason"],
        }


def _ratio(csa: dict[str, Any]) -> float:
    """Return the largest drop ratio of level 2; 0 if there is no such level."""
    ratios = [group["drop_ratios"] for group in csa["layer_groups"]]
    return max((max(of_levels[0]) for of_levels in ratios if of_levels), default=0.0)


def _unpipelined(csa: dict[str, Any]) -> dict[str, Any]:
    """Return the request for a plan's largest ratio in all layers, without overlap."""
    return {
        "attention": "csa",
        "strategy": "ntp",
        "levels": csa["levels"],
        "drop_ratio": _ratio(csa),
        "importance_layer": csa["importance_layer"],
        "importance_window": csa["importance_window"],
        "pipelined": False,
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
    arguments = report.with_json_option(parser).parse_args()
    arguments.section = sections[arguments.what]
    return arguments


if __name__ == "__main__":
    sys.exit(main())

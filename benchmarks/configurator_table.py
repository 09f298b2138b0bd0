"""One table of the configurator's targets and measurements.

    python benchmarks/configurator_table.py FILE...

FILEs are results of `configurator.py --json`, in any order. The loss of accuracy is that of the
regressor shipped for the included model. `--json FILE` stores the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import report
from configurator_simulator import pipelined

from csps.configurator.regressors.accuracy import shipped_accuracy
from csps.models.checkpoints.checkpoint import weights_digest
from csps.services.settings.settings import shipped_models

SAME = 0.03
"""Relative difference below which medians count as equal."""
FASTER = {16_384: 1.6, 32_768: 1.8}
"""Aim of a bound of 0 by length: times as fast as exact attention that waits."""
Result = Mapping[str, Any]


class Aim(NamedTuple):
    """A row of the table."""

    what: str
    measured: str
    aim: str
    reached: bool | None = None
    """True if the target is reached. None: no target."""


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    arguments = report.with_json_option(parser).parse_args()
    aims = [*_accuracy(), *table([json.loads(file.read_text()) for file in arguments.files])]
    rows = [aim._asdict() for aim in aims]
    report.publish({"benchmark": "configurator table"}, rows, arguments.json)
    return int(any(aim.reached is False for aim in aims))


def table(results: Sequence[Result]) -> Iterator[Aim]:
    """Return the rows of stored results of `configurator.py`."""
    for result in results:
        yield from _SECTIONS[result["benchmark"].removeprefix("configurator ")](result)


def _accuracy() -> Iterator[Aim]:
    model = shipped_accuracy(weights_digest(shipped_models() / "needle"))
    assert model is not None, "nothing ships of the included model"
    held = model.description.held_out
    yield _at_most("F_Ad, held-out mean error", held["mean_absolute_error"], 0.015, "{:.3f}")
    right = held["right_side_beyond_interval"]
    yield Aim("F_Ad, right side of the bound", f"{right:.1%}", "98.0%", right >= 0.98)


def _lookup(result: Result) -> Iterator[Aim]:
    for row in result["rows"]:
        yield _at_most(f"a look-up, {row['objective']}, us", row["us"], 50, "{:.0f}")


def _oracle(result: Result) -> Iterator[Aim]:
    for kind in result["summary"]:
        about = f"against the Oracle, {result['losses']} losses, {kind['objective']}"
        yield _at_most(f"{about}, median", kind["worse_median"], 0.01, "{:.1%}")
        yield _at_most(f"{about}, P95", kind["worse_p95"], 0.03, "{:.1%}")


def _starts(result: Result) -> Iterator[Aim]:
    for of_start in result["summary"]:
        about = f"from {of_start['start']}, {result['losses']} losses, {of_start['objective']}"
        yield Aim(f"{about}, median", f"{of_start['worse_median']:.1%}", "")
        yield Aim(f"{about}, P95", f"{of_start['worse_p95']:.1%}", "")


def _simulator(result: Result) -> Iterator[Aim]:
    summary = result["summary"]
    about = f"simulator, error over {summary['configurations']} configurations"
    yield _at_most(f"{about}, median", summary["median_error"], 0.1, "{:.1%}")
    yield Aim(f"{about}, P95", f"{summary['p95_error']:.1%}", "")
    for row in pipelined(result["rows"]):
        kind = "sparse" if row["drops"] else "exact"
        about = f"pipelined / not, {kind} {row['strategy']}, {row['tokens']} tokens"
        yield Aim(about, f"{row['measured']:.2f}", f"predicted {row['predicted']:.2f}")
    for row in summary.get("auto", ()):
        about = f"what auto takes / exact whole, {row['tokens']} tokens ({row['option']})"
        if row["measured"] is None:
            yield Aim(about, f"predicted {row['predicted']:.2f}", "")
        else:
            yield _at_most(about, row["measured"], 1 + SAME, "{:.2f}")


def _live(result: Result) -> Iterator[Aim]:
    # Before lengths were asked in one run, a result had one.
    by_length: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        by_length[row["tokens"] if "tokens" in row else result["length"]].append(row)
    for length, rows in by_length.items():
        taken = {row["wish"]: row["ttft_s"] for row in rows}
        bounds = [taken[f"loss {bound:g}"] for bound in (0.0, 0.01, 0.05)]
        ordered = all(later <= (1 + SAME) * sooner for sooner, later in pairwise(bounds))
        figures = ", ".join(f"{bound:.2f} s" for bound in bounds)
        about = f"{length} tokens"
        yield Aim(f"TTFT of {about}, loss 0, 0.01, 0.05", figures, "does not rise", ordered)
        yield _at_most(f"bound 0 / exact, {about}", bounds[0] / taken["exact"], 1 + SAME, "{:.2f}")
        times, aim = taken["unpipelined"] / bounds[0], FASTER.get(length)
        yield Aim(
            f"bound 0, times as fast as exact unpipelined, {about}",
            f"{times:.2f}",
            "" if aim is None else f"{aim:.2f}",
            None if aim is None else times >= aim,
        )
        if (waiting := taken.get("loss 0, unpipelined")) is not None:
            overlap = f"{waiting / bounds[0]:.2f}"
            yield Aim(f"of it by overlap rather than dropping, {about}", overlap, "")
        for row in rows:
            if row["kept"] is not None:
                kept = row["kept"]
                yield Aim(f"{row['wish']}, bound kept, {about}", f"{kept:.0%}", "95%", kept >= 0.95)


def _at_most(what: str, measured: float, aim: float, form: str) -> Aim:
    return Aim(what, form.format(measured), form.format(aim), measured <= aim)


_SECTIONS: dict[str, Callable[[Result], Iterator[Aim]]] = {
    "lookup": _lookup,
    "oracle": _oracle,
    "starts": _starts,
    "simulator": _simulator,
    "live": _live,
}

if __name__ == "__main__":
    sys.exit(main())

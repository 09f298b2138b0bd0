"""Writes docs/reliability.md from the rows of `make campaign`.

    python benchmarks/reliability.py            # write the page
    python benchmarks/reliability.py --check    # exit with 1 if it differs from the rows

A line of the page stands for all trials of one fault on one target; `tests/campaign` makes the
rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "reliability.jsonl"
PAGE = ROOT / "docs" / "reliability.md"

Row = dict[str, Any]

_HEAD = """\
# Reliability

`make campaign` breaks deployed servers on purpose: it kills, freezes and cuts off their processes,
and breaks single connections. A trial puts a server into a state, applies a fault, and judges what
its clients see. [`benchmarks/reliability.py`](../benchmarks/reliability.py) writes this page from
the rows in [`reliability.jsonl`](../benchmarks/results/reliability.jsonl); each row has its trial's
time, commit and load.

```console
make campaign                       # whatever has no row yet; at most four hours
make campaign ARGS="--list"         # what would run
make campaign ARGS="--only freeze"  # trials with this in their name
make campaign-short                 # two minutes, as in continuous integration; keeps no rows
python benchmarks/reliability.py    # write this page
```

During a trial, a short request is sent four times a second, and `/health` is asked as often.
Streams bring the server into the state: *queued* behind others, in *prefill*, with KV in
*transfer*, in *decode*, or *piggybacked* on decode iterations; on an elastic gang, to one of its
[changes](metrics.md#elastic-gangs). *Parsing* sends large bodies after the fault. Prompts and seeds
are fixed.

A *black hole* swallows all packets of a connection and of those that try to replace it, *one way*
those that arrive at the named process, *one way back* those that it sends. A *reset* ends a
connection at both ends. *Loss* drops one packet in a hundred. *Delay* drops all packets for a tenth
of a second, again and again, so that TCP sends them again. *Slow* connections send 256 KiB a
second.

Other trials break nothing from outside. *Malformed input* sends requests, frames and headers that
are wrong; *cancel at random* has clients leave at any moment, over ranks in one process; *same seed
again* compares tokens and log-probabilities between policies, placements, batches and attempts.
*Soak* loads a server for ten minutes while processes are killed, and compares what it holds before
and afterwards. *Overload* sends more than a server can take: ten times the rate, from clients that
share its processors, so goodput is compared per processor that they leave; ten thousand slow
clients; bodies of 30 MB; and a key that floods, beside one that uses little.

| column | |
|---|---|
| trials | trials of this fault, over all states and seeds |
| requests | requests, or malformed inputs, that were judged |
| wrong | answers with another token than transformers', whole or in part |
| errors | requests with a [documented error](api.md#status-codes) or a lost connection |
| lost slots | KV slots that neither a request nor the prefix cache has afterwards |
| recovery | worst time until an answer is right and not late: from the fault, or from its end |
| aim | longest recovery on an idle machine |
| load | highest load average of these trials, which counts processes at idle priority too |

"""

_COLUMNS = (
    "fault",
    "hits",
    "states",
    "trials",
    "requests",
    "wrong",
    "errors",
    "lost slots",
    "recovery",
    "aim",
    "load",
    "command: `make campaign ARGS=…`",
)


def read_rows(file: Path = ROWS) -> list[Row]:
    """Return the newest row of each trial, in the order of the file."""
    newest: dict[str, Row] = {}
    if file.exists():
        for line in filter(None, file.read_text().splitlines()):
            row = json.loads(line)
            newest.pop(row["trial"], None)
            newest[row["trial"]] = row
    return list(newest.values())


def page(rows: Sequence[Row]) -> str:
    """Return the page for these rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["fault"], row["target"])):
        groups.setdefault((row["fault"], row["target"]), []).append(row)
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_cells(*of, group)) for of, group in groups.items()]
    missed = [row for row in rows if row["missed"]]
    text = _HEAD + _totals(rows) + "\n" + "\n".join(lines) + "\n"
    if missed:
        text += "\n## Missed\n\n" + "".join(map(_missed, missed))
    return text


def _totals(rows: Sequence[Row]) -> str:
    if not rows:
        return "No trial has a row yet.\n"
    commits = sorted({row["commit"] for row in rows})
    shown = ", ".join(f"`{commit}`" for commit in commits)
    times = sorted(row["at"][:10] for row in rows)
    days = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    wrong, lost = (sum(row[name] for row in rows) for name in ("wrong", "lost_slots"))
    lies = sum(row["green_lies"] for row in rows)
    good = sum(not row["missed"] for row in rows)
    return (
        f"**{len(rows)} trials, {good} without anything missed**: {wrong} wrong answers, "
        f"{lost} lost slots, {lies} requests that failed while `/health` was green. "
        f"Measured {days} on {shown}.\n"
    )


def _cells(fault: str, target: str, rows: Sequence[Row]) -> Iterable[str]:
    recovered = [row["recovery_s"] for row in rows if row["recovery_s"] is not None]
    aims = [row["recovery_limit_s"] for row in rows if row["recovery_limit_s"] is not None]
    name = "/".join(part.replace(" ", "-") for part in (fault, target) if part)
    yield fault
    yield target or "-"
    yield ", ".join(dict.fromkeys(row["state"] for row in rows if row["state"])) or "-"
    yield str(len(rows))
    for column in ("tries", "wrong", "documented", "lost_slots"):
        yield f"{sum(row[column] for row in rows):,}"
    yield f"{max(recovered):.1f} s" if recovered else "-"
    yield f"{min(aims):.0f} s" if aims else "-"
    yield f"{max(max(row['load']) for row in rows):.1f}"
    yield f'`"--again --only {name}/"`' if target else f'`"--again --only {name}"`'


def _missed(row: Row) -> str:
    reasons = "; ".join(reason.replace("\n", " ")[:200] for reason in row["missed"])
    return f"- `{row['trial']}` (load {max(row['load']):.1f}): {reasons}\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/reliability.md from its rows.")
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(arguments)
    text = page(read_rows())
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A trial of the campaign, and how to add one.

Every trial takes a deployed server, puts it into a state, applies a fault, judges what clients saw,
and undoes the fault. To add trials, put a file `NAME_trials.py` beside this one with a list:

    def run(bench: Bench, trial: Trial) -> Outcome:
        server = bench.server(trial.server)     # started, or the one of the trial before
        ...                                     # apply the fault; undo it in `finally`
        return Outcome(tries=1_000, wrong=0, documented=3)

    TRIALS = [
        Trial(fault="fuzz", target="HTTP bodies", seed=seed, server="pair", run=run, about_s=40)
        for seed in (1, 2)
    ]

`make campaign ARGS="--list"` shows it, `make campaign ARGS="--only fuzz"` runs it. Afterwards the
runner asks whether the pool's slots came back (`lost_slots`) and writes one row. `bench.oracle` has
the right tokens, `bench.disturbed` runs a fault under probes and streams and fills the `Outcome`.
A trial without `server` starts what it needs by itself.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from campaign_bench import Bench

SCALE = float(os.environ.get("CSPS_CAMPAIGN_SCALE", "1"))
"""Length of soaks and overloads, as a part of the real one, for trying them out."""
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PRODUCT = ("actors", "configurator", "kernels", "models", "protocols", "services", "src")
"""Folders that a row is about: with other sources, a trial is run again."""


@dataclass(kw_only=True)
class Outcome:
    """What clients saw, and what was left behind."""

    tries: int = 1
    """Requests or inputs of which each could have gone wrong."""
    wrong: int = 0
    """Answers with another token than the oracle's."""
    documented: int = 0
    """Requests that ended with an error of docs/api.md, or a connection that its process lost."""
    undocumented: list[str] = field(default_factory=list)
    """Requests that ended in any other way."""
    lost_slots: int = 0
    """KV slots that neither a request nor the prefix cache has at the end. The runner counts
    them."""
    green_lies: int = 0
    """Requests that failed although `/health` had been green since the fault."""
    recovery_s: float | None = None
    """Time from the fault to the next right answer."""
    missed: list[str] = field(default_factory=list)
    """Other expectations that did not hold, each as a phrase."""
    measured: dict[str, float] = field(default_factory=dict)
    """Further figures, for the row."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial. `name` is its identity in the rows."""

    fault: str
    target: str = ""
    """What the fault hits."""
    state: str = ""
    """What requests are doing meanwhile."""
    seed: int = 0
    server: str | None = None
    """Key of `campaign_bench.SERVERS`."""
    run: Callable[[Bench, Trial], Outcome]
    recovery_limit_s: float | None = None
    """Longest recovery on a machine that has nothing else to do."""
    about_s: float = 30.0
    """Expected duration, by which `--budget` chooses."""
    limit_s: float = 300.0
    """Time after which the trial is given up, and fails."""
    quick: bool = False
    """True if it belongs to the two-minute form."""

    @property
    def name(self) -> str:
        parts = (self.fault, self.target, self.state, self.server or "", str(self.seed))
        return "/".join(part.replace(" ", "-") for part in parts if part)

    @property
    def definition(self) -> str:
        """Digest of the file that defines the trial: with another one it is run again."""
        path = Path(self.run.__code__.co_filename)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def all_trials() -> list[Trial]:
    """Return the trials of all `*_trials.py` files, those of one server together."""
    files = sorted(path.stem for path in HERE.glob("*_trials.py"))
    trials = [trial for file in files for trial in importlib.import_module(file).TRIALS]
    names = [trial.name for trial in trials]
    assert len(set(names)) == len(names), f"two trials have one name: {sorted(names)}"
    return by_server(trials)


def by_server(trials: Sequence[Trial]) -> list[Trial]:
    """Order trials so that each server is started once; quick ones come first."""
    servers = list(dict.fromkeys(trial.server or "" for trial in trials))
    return sorted(trials, key=lambda trial: (servers.index(trial.server or ""), not trial.quick))


@cache
def product_digest() -> str:
    """Digest of the product's sources, so that a row names what it was measured on even where
    nothing was committed."""
    digest = hashlib.sha256()
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]

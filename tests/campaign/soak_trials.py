"""Trials of mixed load for minutes: everything at the end is as at the start."""

from __future__ import annotations

import asyncio

from campaign_bench import PROBE, PROBE_TOKENS, Bench
from campaign_trial import SCALE, Outcome, Trial
from soak_load import SoakLoad, files_of, holdings, leaks

SOAK_S = 600.0 * SCALE
WARM_UP_S, KILL_EVERY_S = 15.0, (15.0, 40.0)
SHORT_S, SHORT_WARM_UP_S = 4.0, 1.0
"""Seconds of it in the two-minute form, in which nobody is killed."""
SERVERS = ("pair", "fixed groups", "rings", "chunks", "piggybacking", "elastic")
"""A server of each policy."""


def run(bench: Bench, trial: Trial) -> Outcome:
    """Load a server and kill its processes, and compare what it holds before and afterwards."""
    seconds, warm_up_s, kill_every_s = SOAK_S, WARM_UP_S, None if trial.quick else KILL_EVERY_S
    if trial.quick:
        seconds, warm_up_s = SHORT_S, SHORT_WARM_UP_S
    server, expected = bench.server(trial.server), bench.oracle.text(PROBE, PROBE_TOKENS)

    def load(seed: int) -> SoakLoad:
        return SoakLoad(
            server, seed=seed, probe=PROBE, expected=expected, probe_tokens=PROBE_TOKENS
        )

    asyncio.run(load(1_000 + trial.seed).run(warm_up_s))
    server.assert_only_cache_left()
    before, files = holdings(server), files_of(server)
    soak = load(trial.seed)
    asyncio.run(soak.run(seconds, kill_every_s))
    server.wait_ready()
    server.assert_only_cache_left()
    found = soak.found
    outcome = Outcome(
        tries=found.requests.total(),
        wrong=found.wrong,
        documented=found.requests.pop("documented", 0),
        undocumented=found.undocumented,
        missed=leaks(before, files, server),
    )
    outcome.measured = {"seconds": seconds}
    outcome.measured |= {name.replace(" ", "_"): n for name, n in found.requests.items()}
    outcome.measured |= {f"killed_{name}": n for name, n in found.killed.items()}
    after = holdings(server)
    outcome.measured |= {
        f"{name}_grew_mib": (after[name].resident_bytes - held.resident_bytes) >> 20
        for name, held in before.items()
        if name in after
    }
    return outcome


TRIALS = [
    Trial(fault="soak", target="short", seed=1, server="pair", run=run, about_s=8, limit_s=400,
          quick=True),
    *(
        Trial(fault="soak", target="mixed load", seed=1, server=name, run=run,
              about_s=SOAK_S + 60, limit_s=SOAK_S + 700)
        for name in SERVERS
    ),
]  # fmt: skip

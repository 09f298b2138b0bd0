"""Connections that break: each kind, in each way."""

from __future__ import annotations

from contextlib import AbstractContextManager

from broken_connections import FAULTS, KINDS, Topology
from campaign_bench import Bench
from campaign_trial import Outcome, Trial
from deployed_server import Deployed

FOR_GOOD = ("black hole", "one way", "one way back")
LASTS_S = 6.0
"""Time for which a connection is only bad."""
CUT_S, ANY_S = 15.0, 20.0


def run(bench: Bench, trial: Trial) -> Outcome:
    """Break the connections of a kind, those of one rank if the target names it."""
    kind, _, rank = trial.target.partition(" of ")
    gang, _, index = rank.rpartition(" ")

    def aimed(server: Deployed) -> AbstractContextManager[object]:
        topology = Topology(server)
        pid = topology.rank(gang, int(index)).pid if gang else None
        return FAULTS[trial.fault](topology, kind, pid)

    lasts_s = None if trial.fault in (*FOR_GOOD, "reset") else LASTS_S
    return bench.disturbed(trial, aimed, may_fail=kind == "http", lasts_s=lasts_s)


RANKED = ("rpc", "log", "mesh", "store")
QUICK = ("reset", "kv", "decode")


def _all() -> list[Trial]:
    targets = [
        *(f"{kind} of {role} 0" for kind in RANKED for role in ("prefill", "decode")),
        *(kind for kind in KINDS if kind not in RANKED),
    ]
    return [
        Trial(
            fault=fault,
            target=target,
            state=state,
            server="pair",
            run=run,
            recovery_limit_s=CUT_S,
            about_s=22.0,
            quick=(fault, target, state) == QUICK,
        )
        for target in targets
        for fault in FAULTS
        for state in ("decode", "prefill")
    ]


TRIALS = _all()

"""Connections that break: each kind, in each way."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager, suppress

from broken_connections import FAULTS, KINDS, Topology
from campaign_bench import Bench
from campaign_trial import Outcome, Trial
from deployed_server import DEADLINE_S, Deployed

from csps.protocols.core.errors import FaultError

FOR_GOOD = ("black hole", "one way", "one way back")
RENEWED = ("mesh", "store")
POLL_S = 0.2
LASTS_S = 6.0
"""Time for which a connection is only bad."""
CUT_S, ANY_S = 15.0, 20.0


def renew(server: Deployed, kind: str, role: str, index: int) -> None:
    """Make a rank's connections anew if an earlier trial's fault has ended them for good: nobody
    uses the store of a gang that is formed, and on one machine decode ranks exchange little over
    their mesh."""
    if kind not in RENEWED or _is_there(server, kind, role, index):
        return
    os.kill(Topology(server).rank(role, index).pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while not _is_there(server, kind, role, index):
        assert time.monotonic() < deadline, f"no {kind} connection of {role} {index} comes back"
        time.sleep(POLL_S)
    server.wait_ready()


def _is_there(server: Deployed, kind: str, role: str, index: int) -> bool:
    # While a gang is replaced, its ranks do not answer, are missing, or end meanwhile.
    with suppress(FaultError, OSError, StopIteration, AssertionError):
        topology = Topology(server)
        return bool(topology.connections(kind, topology.rank(role, index).pid))
    return False


def run(bench: Bench, trial: Trial) -> Outcome:
    """Break the connections of a kind, those of one rank if the target names it."""
    kind, _, rank = trial.target.partition(" of ")
    gang, _, index = rank.rpartition(" ")

    def aimed(server: Deployed) -> AbstractContextManager[object]:
        topology = Topology(server)
        pid = topology.rank(gang, int(index)).pid if gang else None
        return FAULTS[trial.fault](topology, kind, pid)

    renew(bench.server(trial.server), kind, gang, int(index or 0))
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

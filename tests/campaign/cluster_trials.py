"""Ray's own processes: what runs goes on without them, and `csps serve` restores the service."""

from __future__ import annotations

import os
import signal
import time

from campaign_bench import PROBE, PROBE_TOKENS, Bench
from campaign_trial import Outcome, Trial
from deployed_server import replaced, stop_left
from free_ports import free_port
from kill_trials import program
from outage import QUIET_S, Outage

GOES_ON_S = 60.0
"""Time for which requests are answered without Ray's central store, the GCS."""
FAULTS = {"GCS": "gcs_server", "raylet": "raylet/raylet"}


def run(bench: Bench, trial: Trial) -> Outcome:
    """Kill a process of Ray, watch what runs, then run `csps serve` again."""
    bench.close()  # two servers would need more cores than there are
    folder, port, outcome = bench.folder / "served", free_port(), Outcome(tries=0)
    folder.mkdir(exist_ok=True)
    waits_s = GOES_ON_S if trial.target == "GCS" else QUIET_S
    try:
        with replaced(bench.model_dir, folder, port) as server:
            with Outage(server, PROBE, PROBE_TOKENS) as outage:
                outage.begin()
                os.kill(program(FAULTS[trial.target])(server), signal.SIGKILL)
                time.sleep(waits_s)
                lost = list(outage.failed)
            bench.judge_probes(outage, outcome)
            if trial.target == "GCS" and lost:
                outcome.missed.append(f"{len(lost)} requests failed, the first with {lost[0]}")
            began = time.monotonic()
            # Without a word to what is left of the other one.
            with replaced(bench.model_dir, folder, port) as again:
                outcome.measured["served_again_s"] = round(time.monotonic() - began, 1)
                with Outage(again, PROBE, PROBE_TOKENS) as after:
                    after.begin()
                    after.recovered()
                bench.judge_probes(after, outcome)
                if after.failed:
                    outcome.missed.append(f"{len(after.failed)} requests failed afterwards")
                again.assert_only_cache_left()
    finally:
        stop_left(folder)
    return outcome


TRIALS = [
    Trial(fault="kill", target=target, run=run, about_s=180.0, limit_s=400.0) for target in FAULTS
]

"""Ranks of an elastic gang that die or freeze while its groups change: a prompt's KV is gathered on
fewer instances, an answer grows to another instance, a prompt preempts, KV of an answer moves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

from campaign_bench import Bench
from campaign_trial import Outcome, Trial
from elastic_scenes import LATE, LONG, MOVERS, TALKERS, scene
from watched_streams import Talk

JUDGED = {
    len(prompt): (prompt, min(known, 300)) for prompt, known in (LONG, *TALKERS, *MOVERS, LATE)
}
"""Prompts by their lengths, and how many tokens of their answers are compared."""
BACK_S = 20.0


def run(bench: Bench, trial: Trial) -> Outcome:
    """Kill or freeze one rank at an event; every stream has to go on."""
    server, outcome = bench.server(trial.server), Outcome(tries=0)
    for prompt, known in JUDGED.values():
        bench.oracle.wrong_at(prompt, known, ())
    pids, failures = server.rank_pids(), server.gauge("request_failures_total")
    number = signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP

    async def disturbed() -> list[Talk]:
        async with scene(server, trial.state) as played:
            # While KV moves, the scene holds the rank that takes it.
            pid = played.stopped[0] if played.stopped else pids[int(trial.target.split()[-1])]
            began, before = time.monotonic(), [talk.tokens for talk in played.talks]
            os.kill(pid, number)
            try:
                for talk, tokens in zip(played.talks, before, strict=True):
                    await talk.says(tokens + 1)
                outcome.recovery_s = time.monotonic() - began
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            return played.talks

    for talk in asyncio.run(disturbed()):
        prompt, known = JUDGED[len(talk.fields["prompt"])]
        at = bench.oracle.wrong_at(prompt, known, talk.received["tokens"][:known])
        outcome.tries += 1
        outcome.wrong += at is not None
    if failed := server.gauge("request_failures_total") - failures:
        outcome.missed.append(f"{failed:.0f} requests failed, and none may")
    server.wait_ready()
    return outcome


TRIALS = [
    Trial(
        fault=fault,
        target=f"ElasticGang {rank}",
        state=event,
        server="elastic",
        run=run,
        recovery_limit_s=BACK_S,
        about_s=60.0,
    )
    for fault in ("kill", "freeze")
    for rank, event in enumerate(("scale_down", "scale_up", "preempt", "migrate"))
]

"""Trials of requests that are cancelled at any moment, and of equal answers in every way."""

from __future__ import annotations

import asyncio

from campaign_bench import Bench
from campaign_trial import Outcome, Trial
from random_cancellations import GANGS, cancel_at_random
from same_answers import KILLED, TOLERANCE, WAYS, compare_ways

CANCELLED = 1_000


def cancelled_run(bench: Bench, trial: Trial) -> Outcome:
    """Cancel requests over real ranks in this process; lost slots end the trial."""
    found = asyncio.run(
        cancel_at_random(bench.model_dir, trial.target, count=CANCELLED, seed=trial.seed)
    )
    outcome = Outcome(tries=found.count + found.answered, wrong=len(found.wrong))
    outcome.missed += found.wrong[:5]
    states = {f"cancelled_{state}": count for state, count in found.cancelled.items()}
    outcome.measured = {"cancelled": found.count, "answered": found.answered, **states}
    return outcome


def same_run(bench: Bench, trial: Trial) -> Outcome:
    """Answer the same requests in many ways, alone and together."""
    killed = trial.target == "retries"
    ways = tuple(KILLED) if killed else tuple(WAYS)
    found = asyncio.run(
        compare_ways(bench.model_dir, ways, requests=12 if killed else 15, killed=killed)
    )
    outcome = Outcome(tries=found.answers, wrong=len(found.different))
    outcome.missed += found.different[:5]
    if killed and not found.retried:
        outcome.missed.append("no request was tried again")
    outcome.measured = {
        "ways": len(ways),
        "retried": found.retried,
        "tolerance": TOLERANCE,
        "largest_difference": found.largest,
    }
    return outcome


TRIALS = [
    *(
        Trial(fault="cancel at random", target=policy, seed=1, run=cancelled_run, about_s=120,
              limit_s=1_200)
        for policy in GANGS
    ),
    *(
        Trial(fault="same seed again", target=target, seed=1, run=same_run, about_s=60,
              limit_s=900)
        for target in ("policies and placements", "retries")
    ),
]  # fmt: skip

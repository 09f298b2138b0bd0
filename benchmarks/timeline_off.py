"""Cost of phases for a prefill without a recorded timeline, beside the time of a layer.

    python benchmarks/timeline_off.py [--tokens 4096] [--json FILE]

Sparse attention on two ranks has most phases: those of a prefill are counted, and one is timed by
itself. All times are CPU times, which other load hardly changes. `layer_ms` is a rank's mean over
the layers of the cheapest of five prefills.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any
from unittest.mock import patch

import prefill_scaling  # which also lets the tests' modules be imported
import report
import wide_checkpoint
from gang_driver import Cell, GangPlan
from gang_threads import thread_gang
from uniform_plan import uniform_plan

from csps.actors.timing.timeline import PhaseTimeline

RANKS, LAYERS, ROUNDS, CALLS = ("0-0-0", "0-1-0"), wide_checkpoint.LAYERS, 5, 100_000
PLAN = uniform_plan(RANKS, levels=2, layers=LAYERS, drop_ratio=0.5, micro_partitions=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    args = report.with_json_option(parser).parse_args()
    phases, layer_s = asyncio.run(_layer(args.tokens))
    phase_s = _phase_s()
    row = {
        "tokens": args.tokens,
        "layer_ms": layer_s * 1e3,
        "phases": phases,
        "phase_ns": phase_s * 1e9,
        "phases_us": phases * phase_s * 1e6,
    }
    report.publish({"benchmark": "timeline_off"}, [row], args.json)


async def _layer(tokens: int) -> tuple[float, float]:
    """Return (phases, seconds) of one rank."""
    phase, calls = PhaseTimeline.phase, itertools.count()

    def counted(*args: Any, **where: Any) -> Any:
        next(calls)
        return phase(*args, **where)

    async def prefill(seed: int) -> float:
        begin = time.process_time()
        await prefill_scaling.prefill(cell, gang, tokens, seed=seed, strategy="csa", csa=PLAN)
        return time.process_time() - begin

    cell = Cell()
    with tempfile.TemporaryDirectory() as model:
        wide_checkpoint.make(Path(model))
        plan = GangPlan(model_dir=model, role="prefill", instances=len(RANKS), kv_slots=tokens)
        async with thread_gang(plan) as ranks:
            gang = await cell.attach(ranks.members, "prefill")
            with patch.object(PhaseTimeline, "phase", counted):
                await prefill(0)
            seconds = min([await prefill(seed) for seed in range(ROUNDS)])
            await gang.close()
    layers = len(RANKS) * LAYERS
    return next(calls) / layers, seconds / layers


def _phase_s() -> float:
    """Return the seconds of a phase that is not recorded."""
    timeline = PhaseTimeline(on=False)

    def phase() -> None:
        with timeline.phase("attention", layer=1, level=2, micro=3):
            pass

    return min(timeit.repeat(phase, timer=time.process_time, number=CALLS, repeat=5)) / CALLS


if __name__ == "__main__":
    main()

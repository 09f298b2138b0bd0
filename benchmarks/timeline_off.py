"""Cost of what nobody asked for: phases without a recorded timeline, progress without a reader.

    python benchmarks/timeline_off.py [--tokens 4096] [--prompt 16384] [--json FILE]

Sparse attention on two ranks has most phases: those of a prefill are counted, and one is timed by
itself. All times are CPU times, which other load hardly changes. `layer_ms` is a rank's mean over
the layers of the cheapest of five prefills.

Progress: streams of a prompt, with `return_progress` and without in turns, through HTTP and real
ranks in one process. `off_ms` and `on_ms` are its CPU times, medians of five. Ranks report to the
router either way, as a sign of life; `reports_us` is what the router does with all reports of one
prompt without a reader.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
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
from http_over_ranks import served
from uniform_plan import uniform_plan

from csps.actors.timing.timeline import PhaseTimeline
from csps.services.router.rank_notifications import RunningSteps

RANKS, LAYERS, ROUNDS, CALLS = ("0-0-0", "0-1-0"), wide_checkpoint.LAYERS, 5, 100_000
PLAN = uniform_plan(RANKS, levels=2, layers=LAYERS, drop_ratio=0.5, micro_partitions=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=16_384)
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
    progress = asyncio.run(_progress(args.prompt))
    report.print_table([progress])
    report.publish({"benchmark": "timeline_off", "progress": progress}, [row], args.json)


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


async def _progress(tokens: int) -> dict[str, Any]:
    """Return what progress costs the router of a prompt of so many tokens."""
    advanced, spent = RunningSteps.advanced, list[float]()

    def timed(*args: Any) -> None:
        begin = time.thread_time()
        advanced(*args)
        spent.append(time.thread_time() - begin)

    async def stream(number: int, *, progress: bool) -> float:
        body = {
            "model": "tiny",
            "prompt": [3 + (number + token) % 250 for token in range(tokens)],
            "max_tokens": 1,
            "stream": True,
            "return_progress": progress,
        }
        begin = time.process_time()
        answer = await server.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return time.process_time() - begin

    with tempfile.TemporaryDirectory() as model:
        wide_checkpoint.make(Path(model))
        async with served(Path(model), kv_slots=tokens + 64) as server:
            await stream(0, progress=False)  # allocators and caches warm up
            times: dict[bool, list[float]] = {False: [], True: []}
            with patch.object(RunningSteps, "advanced", timed):
                for number in range(1, 2 * ROUNDS + 1):
                    on = number % 2 == 0
                    spent_before = len(spent)
                    times[on].append(await stream(number, progress=on))
                    if on:
                        del spent[spent_before:]
    return {
        "prompt": tokens,
        "off_ms": 1e3 * statistics.median(times[False]),
        "on_ms": 1e3 * statistics.median(times[True]),
        "reports": len(spent) / ROUNDS,
        "reports_us": 1e6 * sum(spent) / ROUNDS,
    }


def _phase_s() -> float:
    """Return the seconds of a phase that is not recorded."""
    timeline = PhaseTimeline(on=False)

    def phase() -> None:
        with timeline.phase("attention", layer=1, level=2, micro=3):
            pass

    return min(timeit.repeat(phase, timer=time.process_time, number=CALLS, repeat=5)) / CALLS


if __name__ == "__main__":
    main()

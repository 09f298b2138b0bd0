"""Prefill on two ranks against one, each a process with one torch thread.

    python benchmarks/prefill_scaling.py [--lengths 16384 32768] [--rounds 3] [--json FILE]

Both gangs are up all the time and take turns, so that a slow moment of the machine affects both; a
waiting gang does not compute. A time is from sending the job to its first token. `ratio` is the
median time of one rank over that of two. `communication` is the share of the two ranks' time in
which they waited for each other. It needs two idle cores: compare the load average in the result.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
import wide_checkpoint

from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import CancelSequence, PrefillDone, SampledToken
from csps.protocols.rpc.schema import pack

# The driver that stands in for the router belongs to the tests, which hold the engine to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gang_driver
from gang_driver import Cell, GangPlan, Request, prefill_step
from gang_processes import attached_processes

gang_driver.ANSWER_S = 600.0  # tests answer in seconds, 32K tokens on one rank take a minute
NEEDLE = Path(__file__).resolve().parents[1] / "models" / "needle"


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        models = {"wide": wide_checkpoint.make(Path(folder) / "wide")}
        if (NEEDLE / "config.json").exists():
            models["needle"] = NEEDLE
        rows = [
            row
            for name in args.models or models
            for row in asyncio.run(_measure(name, models[name], args))
        ]
    result = {
        "benchmark": "prefill_scaling",
        "rounds": args.rounds,
        "least_ratio": min(row["ratio"] for row in rows),
    }
    report.publish(result, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=["wide", "needle"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--rounds", type=int, default=3)
    return report.with_json_option(parser).parse_args()


async def _measure(name: str, model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each length."""
    slots = max(args.lengths)
    plans = [
        GangPlan(model_dir=str(model), role="prefill", instances=ranks, kv_slots=slots)
        for ranks in (1, 2)
    ]
    async with attached_processes(*plans) as (cell, gangs):
        return [
            {"model": name, "tokens": length, **await _compare(cell, gangs, length, args.rounds)}
            for length in args.lengths
        ]


async def _compare(
    cell: Cell, gangs: Sequence[GangClient], length: int, rounds: int
) -> dict[str, float]:
    for gang in gangs:
        await prefill(cell, gang, min(length, 1024), seed=0)  # allocators and caches warm up
    runs = [[await prefill(cell, gang, length, seed=n) for gang in gangs] for n in range(rounds)]
    one_s, two_s = (statistics.median(run[i][0] for run in runs) for i in range(2))
    waited_s = statistics.median(run[1][1] for run in runs)
    return {
        "one_rank_s": one_s,
        "two_ranks_s": two_s,
        "ratio": one_s / two_s,
        "communication": waited_s / two_s,
    }


async def prefill(
    cell: Cell, gang: GangClient, length: int, *, seed: int, **fields: Any
) -> tuple[float, float]:
    """Return (seconds to the first token, longest time that a rank has waited for others).

    Args:
        fields: fields of the job.
    """
    cell.prefill = gang
    prompt = np.random.default_rng(seed).integers(3, 256, length).astype("<i4")
    request = Request(sequence_id=max(cell.steps, default=0) + 1, prompt=prompt, slices=())
    job = prefill_step([request.chunk()], range(gang.instances), **fields)
    begin = time.perf_counter()
    step_id = cell.submit(job, prompt)
    await cell.until(lambda: cell.about(SampledToken, sequence_id=request.sequence_id))
    seconds = time.perf_counter() - begin
    await cell.prefilled(step_id)
    gang.notify_all("cancel", pack(CancelSequence(sequence_id=request.sequence_id)))
    await gang.stats()  # the slots are free
    reports = cell.about(PrefillDone, step_id=step_id)
    return seconds, max(rank_done.communication_s for rank_done in reports)


if __name__ == "__main__":
    main()

"""Memory that `csps check-config` plans for a rank beside what the rank takes.

    python benchmarks/planned_memory.py [--shapes bfloat16 ...] [--json FILE]

For each shape, a gang of real ranks loads a random checkpoint of about a gigabyte a rank and
computes two prompts, each of which fills all its KV slots: the system backs a slot when it is first
written, so only the second prompt meets a pool that is resident. `measured` is the peak of a rank's
anonymous memory (RssAnon) over that of an idle rank, which has loaded the included model; pages of
files do not count, because the system may drop them. `planned` is the planner's sum of weights, KV
slots and temporaries. Buffers for KV in transfer are not in either, because nothing is sent. Sizes
do not depend on the load of the machine, and the prompts take minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load_memory
import report
from prefill_scaling import NEEDLE, prefill

from csps.services.planning.memory import RankNeed, rank_need
from csps.services.settings.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gang_driver
from gang_driver import Cell, GangPlan, in_threads
from gang_processes import ProcessGang

SAMPLE_S = 0.005
IDLE_PROMPT = 256
PROMPT_S = 3600.0
"""Limit of a prompt: minutes on an idle core, and the machine need not be idle."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A checkpoint, and how ranks hold it."""

    kind: str
    gib: float
    """Size of the checkpoint's files."""
    dtype: str
    tp: int = 1
    slots: int

    @property
    def gang(self) -> dict[str, Any]:
        """Return the settings of the gang."""
        return {"instances": 1, "tp": self.tp, "kv_slots": self.slots}


SHAPES = {
    "bfloat16": Shape(kind="bfloat16", gib=1.2, dtype="bfloat16", slots=4096),
    "float32": Shape(kind="bfloat16", gib=0.8, dtype="float32", slots=4096),
    "tp2": Shape(kind="bfloat16", gib=2.4, dtype="bfloat16", tp=2, slots=4096),
    "fp8-files": Shape(kind="fp8", gib=0.9, dtype="bfloat16", slots=4096),
    "experts": Shape(kind="experts", gib=1.5, dtype="bfloat16", slots=4096),
    "long": Shape(kind="bfloat16", gib=1.0, dtype="bfloat16", slots=16_384),
}


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan(GangPlan):
    """A gang whose ranks have a dtype."""

    dtype: str = "float32"

    def rank_fields(self, rank: int) -> dict[str, Any]:
        """Return arguments of the rank's `RankConfig`."""
        return {**super().rank_fields(rank), "dtype": self.dtype}


async def peaks(model: Path, shape: Shape, prompt: int) -> list[int]:
    """Return the largest anonymous memory of each rank while it computes two prompts."""
    plan = MeasuredPlan(
        model_dir=str(model),
        role="prefill",
        instances=1,
        tp=shape.tp,
        kv_slots=shape.slots,
        dtype=shape.dtype,
    )
    gang = ProcessGang(plan)
    try:
        members = await gang.start()
        with watched(gang.process_ids) as largest:
            cell = Cell()
            client = await cell.attach(members, "prefill")
            for seed in range(2):
                await prefill(cell, client, prompt, seed=seed)
        return largest
    finally:
        await in_threads([gang.close])


@contextmanager
def watched(processes: Sequence[int]) -> Iterator[list[int]]:
    """Sample the anonymous memory of processes; the list has the largest sample of each."""
    largest, done = [load_memory.anonymous(process) for process in processes], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            for number, process in enumerate(processes):
                largest[number] = max(largest[number], load_memory.anonymous(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield largest
    finally:
        done.set()
        watcher.join()


def planned(model: Path, shape: Shape) -> RankNeed:
    """Return what the planner expects of a rank."""
    return rank_need(
        "prefill",
        Settings.model_validate({"model": str(model), "dtype": shape.dtype, "prefill": shape.gang}),
    )


def measure(name: str, shape: Shape) -> dict[str, Any]:
    """Return the row of a shape."""
    (idle,) = asyncio.run(
        peaks(
            NEEDLE,
            Shape(kind="", gib=0, dtype=shape.dtype, slots=IDLE_PROMPT),
            prompt=IDLE_PROMPT,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        load_memory.write(Path(folder), shape.kind, int(shape.gib * 2**30))
        need = planned(Path(folder), shape)
        largest = max(asyncio.run(peaks(Path(folder), shape, prompt=shape.slots)))
    measured, expected = largest - idle, need.weights + need.kv_cache + need.activations
    return {
        "shape": name,
        "weights_gib": need.weights / 2**30,
        "kv_gib": need.kv_cache / 2**30,
        "temporaries_gib": need.activations / 2**30,
        "planned_gib": expected / 2**30,
        "measured_gib": measured / 2**30,
        "planned_over_measured": expected / measured,
    }


def main() -> None:
    """Print a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    args = report.with_json_option(parser).parse_args()
    gang_driver.ANSWER_S = PROMPT_S
    rows = [measure(name, SHAPES[name]) for name in args.shapes]
    furthest = max(rows, key=lambda row: abs(row["planned_over_measured"] - 1))
    result = {
        "benchmark": "planned_memory",
        "furthest": furthest["planned_over_measured"],
    }
    report.publish(result, rows, args.json)


if __name__ == "__main__":
    main()

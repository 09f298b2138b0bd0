"""Rings of context parallelism: pass-KV against pass-Q, both against Ulysses, work by layout.

    python benchmarks/ring_variants.py [--model wide|needle] [--context 16384] [--ranks 2]
        [--misses 1 2.5 5 10 20 40 70 100] [--held-out 1.5 3.5 7] [--rounds 3]
        [--tables misses layouts scaling] [--json FILE]
    sudo python benchmarks/ring_variants.py --link 800mbit ...
    python benchmarks/ring_variants.py --smoke

Ranks are processes with one torch thread each, in one process group. With `--link` two ranks are on
each of the two servers of the testbed (`benchmarks/testbed`). Three tables:

`misses`   TTFT of a prefill with a context of this length, so many per cent of it new, by both
           variants, and the choice of the rule fitted to these points (CP App. D). The rest was
           computed before by the same strategy and stays where it is. Points of `--held-out` are
           measured afterwards, and the rule is not fitted to them: `good_choices_held_out` is the
           share of them for which it takes the faster variant, or one less than 3 % slower
`layouts`  a whole prompt by each strategy in each layout: TTFT; operations a second of a rank, also
           as a share of what a matrix product reaches there (MFU, CP App. A); pairs of a query and
           a key that ranks compute, the most over the mean, and their computing times likewise
`scaling`  one rank against all of them, by rings in zigzag and by Ulysses (not with `--link`)

A time is from sending a step to its token. Figures are medians over the rounds, in which variants
take turns. Each rank needs a core: compare the load average in the result.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import report
from checkpoints import checkpoint
from roofline import peak_flops, prompt_flops
from testbed import iproute
from testbed.gang import Gang, GangOptions, prefill_gang
from testbed.link import Link
from testbed.network import two_servers

from csps.configurator.model.fits import RingPoint, fit_rule, regret
from csps.protocols.attention.plan import RINGS
from csps.protocols.attention.ring_choice import flops_per_second, utilization
from csps.protocols.core.placement import LAYOUTS, KvSlice, place
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import CancelSequence, PrefillDone, SampledToken
from csps.protocols.rpc.schema import pack

# The driver that stands in for the router belongs to the tests, which hold the engine to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gang_driver
from gang_driver import Cell, GangPlan, Request, prefill_step
from gang_processes import attached_processes

gang_driver.ANSWER_S = 600.0  # tests answer in seconds, 32K tokens on one rank take a minute
Row = dict[str, Any]
CLOSE = 0.03
"""Relative difference below which times count as equal."""
LAYOUTS_OF = {
    "ulysses": ("contiguous",),
    "ring_kv": ("contiguous", "zigzag", "striped"),
    "ring_q": ("contiguous", "zigzag", "striped"),
}
SMOKE = ["--context", "1024", "--misses", "5", "100", "--held-out", "20", "--rounds", "1"]
TABLES = ["misses", "layouts", "scaling"]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Figures of one prefill."""

    ttft_s: float
    compute_s: list[float]
    """Computing time of each rank."""
    waited_s: float
    """Longest time that a rank has waited for others."""


class Ranks(Protocol):
    """A gang on one machine or two servers."""

    count: int

    async def prefill(self, prompt: np.ndarray, strategy: str, layout: str, cached: int) -> Timed:
        """Prefill a prompt over all ranks, with so many tokens computed before."""
        ...


class OneGroup:
    """A gang of processes on this machine."""

    def __init__(self, cell: Cell, gang: GangClient) -> None:
        self._cell, self._gang = cell, gang
        self.count = gang.instances
        self._rids = iter(range(1 + 10**6 * gang.instances, 2 * 10**9))

    async def prefill(self, prompt: np.ndarray, strategy: str, layout: str, cached: int) -> Timed:
        """See `Ranks`."""
        cell = self._cell
        cell.prefill = self._gang
        request = Request(sequence_id=next(self._rids), prompt=prompt, slices=())
        history: tuple[KvSlice, ...] = ()
        if cached:
            history = self._slices(layout, 0, cached)
            step = self._step(request, strategy, layout, 0, cached, ())
            await cell.prefilled(cell.submit(step, prompt[:cached]))
        step = self._step(request, strategy, layout, cached, len(prompt), history)
        begin = time.perf_counter()
        step_id = cell.submit(step, prompt[cached:])
        await cell.until(lambda: cell.about(SampledToken, sequence_id=request.sequence_id))
        seconds = time.perf_counter() - begin
        await cell.prefilled(step_id)
        self._gang.notify_all("cancel", pack(CancelSequence(sequence_id=request.sequence_id)))
        await self._gang.stats()  # the slots are free
        return timed(seconds, cell.about(PrefillDone, step_id=step_id))

    def _slices(self, layout: str, start: int, stop: int) -> tuple[KvSlice, ...]:
        return place(range(self.count), LAYOUTS[layout](stop - start, self.count), start=start)

    def _step(
        self,
        request: Request,
        strategy: str,
        layout: str,
        start: int,
        stop: int,
        history: tuple[KvSlice, ...],
    ) -> Any:
        rows = () if layout == "contiguous" else self._slices(layout, start, stop)
        chunk = request.chunk(start, stop, rows=rows, history=history)
        return prefill_step([chunk], range(self.count), strategy=strategy)


class TwoServers:
    """A gang over both servers of the testbed."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self.count = gang.client.world_size

    async def prefill(self, prompt: np.ndarray, strategy: str, layout: str, cached: int) -> Timed:
        """See `Ranks`."""
        result = await self._gang.prefill(prompt, strategy=strategy, layout=layout, cached=cached)
        return timed(result.ttft_s, result.done)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rows of each table."""

    misses: list[Row] = field(default_factory=list)
    layouts: list[Row] = field(default_factory=list)
    scaling: list[Row] = field(default_factory=list)


def timed(seconds: float, done: Sequence[PrefillDone]) -> Timed:
    return Timed(
        ttft_s=seconds,
        compute_s=[
            rank_done.compute_s for rank_done in sorted(done, key=lambda rank_done: rank_done.rank)
        ],
        waited_s=max(rank_done.communication_s for rank_done in done),
    )


def main() -> None:
    args = _arguments()
    with checkpoint(args.model) as model:
        measured = _on_two_servers(model, args) if args.link else _in_one_group(model, args)
    result: dict[str, Any] = {
        "benchmark": "ring_variants",
        "model": args.model,
        "context": args.context,
        "link": args.link,
        "rounds": args.rounds,
        "layouts": measured.layouts,
        "scaling": measured.scaling,
    }
    rule = fit_rule([_point(miss) for miss in measured.misses if not miss["held_out"]])
    if rule is not None:
        result["rule"] = {"alpha": rule.alpha, "beta": rule.beta, "gamma": rule.gamma}
        for row in measured.misses:
            point = _point(row)
            row |= {"chosen": rule.choose(point.new, point.history), "lost": regret(rule, point)}
        result["good_choices"] = _good([miss for miss in measured.misses if not miss["held_out"]])
        result["good_choices_held_out"] = _good(
            [miss for miss in measured.misses if miss["held_out"]]
        )
    for rows in (measured.layouts, measured.scaling):
        report.print_table(rows)
        print()
    report.publish(result, measured.misses, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["wide", "needle"], default="wide")
    parser.add_argument("--context", type=int, default=16_384, help="tokens, new ones and cached")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--misses", type=float, nargs="+", default=[1, 2.5, 5, 10, 20, 40, 70, 100],
        help="per cent of the context that is new",
    )  # fmt: skip
    parser.add_argument(
        "--held-out", type=float, nargs="*", default=[],
        help="the same of points that the rule is not fitted to",
    )  # fmt: skip
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", help="rate between two servers, such as 800mbit")
    parser.add_argument("--smoke", action="store_true", help="see that it works")
    args = report.with_json_option(parser).parse_args()
    return parser.parse_args([*sys.argv[1:], *SMOKE]) if args.smoke else args


def _on_two_servers(model: Path, args: argparse.Namespace) -> Measured:
    async def measure() -> Measured:
        options = GangOptions(model_dir=model, kv_slots=args.context)
        async with prefill_gang(bed, options) as gang:
            ranks = TwoServers(gang)
            return await _measured(ranks, None, model, args)

    with (
        two_servers(Link.parse(args.link)) as bed,
        iproute.entered(bed.servers[0].namespace),
    ):
        return asyncio.run(measure())


def _in_one_group(model: Path, args: argparse.Namespace) -> Measured:
    async def measure() -> Measured:
        async with _groups(model, args) as (one, several):
            return await _measured(several, one, model, args)

    return asyncio.run(measure())


async def _measured(
    ranks: Ranks, one: Ranks | None, model: Path, args: argparse.Namespace
) -> Measured:
    """Return the requested tables; `one` is a gang of one rank, or None."""
    measured = Measured()
    if "misses" in args.tables:
        measured.misses.extend(await _misses(ranks, args))
    if "layouts" in args.tables:
        measured.layouts.extend(await _layouts(ranks, model, args))
    if "scaling" in args.tables and one is not None:
        measured.scaling.extend(await _scaling(one, ranks, args))
    return measured


@asynccontextmanager
async def _groups(
    model: Path, args: argparse.Namespace
) -> AsyncIterator[tuple[OneGroup, OneGroup]]:
    """Yield one rank and all of them, both up all the time."""
    plans = [
        GangPlan(model_dir=str(model), role="prefill", instances=ranks, kv_slots=args.context + 8)
        for ranks in (1, args.ranks)
    ]
    async with attached_processes(*plans) as (cell, gangs):
        one, several = gangs
        yield OneGroup(cell, one), OneGroup(cell, several)


def _prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 256, length).astype("<i4")


async def _misses(ranks: Ranks, args: argparse.Namespace) -> list[Row]:
    await _warm_up(ranks, args)
    rows = []
    percents = [
        *((miss, False) for miss in args.misses),
        *((tokens, True) for tokens in args.held_out),
    ]
    for percent, held_out in percents:
        new = max(ranks.count, round(args.context * percent / 100))
        found: dict[str, list[Timed]] = defaultdict(list)
        for seed in range(args.rounds):
            for ring in RINGS:
                prompt = _prompt(args.context, seed)
                found[ring].append(await ranks.prefill(prompt, ring, "zigzag", args.context - new))
        rows.append(
            {"ranks": ranks.count, "new": new, "history": args.context - new, "held_out": held_out}
            | {f"{ring}_s": _median(found[ring]) for ring in RINGS}
            | {f"{ring}_waited_s": _waited(found[ring]) for ring in RINGS}
        )
    return rows


async def _layouts(ranks: Ranks, model: Path, args: argparse.Namespace) -> list[Row]:
    await _warm_up(ranks, args)
    found: dict[tuple[str, str], list[Timed]] = defaultdict(list)
    ways = [(strategy, layout) for strategy, kinds in LAYOUTS_OF.items() for layout in kinds]
    for seed in range(args.rounds):
        for strategy, layout in ways:
            prompt = _prompt(args.context, seed)
            found[strategy, layout].append(await ranks.prefill(prompt, strategy, layout, 0))
    flops, peak, devices = prompt_flops(model, args.context), peak_flops(), ranks.count

    def reached(seconds: float) -> Row:
        return {
            "gflops_of_a_rank": flops_per_second(flops, seconds=seconds, devices=devices) * 1e-9,
            "mfu": utilization(flops, seconds=seconds, devices=devices, peak=peak),
        }

    return [
        {"ranks": ranks.count, "strategy": strategy, "layout": layout}
        | {"ttft_s": _median(found[strategy, layout])}
        | reached(_median(found[strategy, layout]))
        | {
            "most_pairs_over_mean": _most_pairs(strategy, layout, args.context, ranks.count),
            "most_computing_over_mean": statistics.median(
                max(rank_done.compute_s) / statistics.mean(rank_done.compute_s)
                for rank_done in found[strategy, layout]
            ),
        }
        for strategy, layout in ways
    ]


async def _scaling(one: Ranks, several: Ranks, args: argparse.Namespace) -> list[Row]:
    await _warm_up(one, args)
    await _warm_up(several, args)
    ways = [("ulysses", "contiguous"), *((ring, "zigzag") for ring in RINGS)]
    alone: list[Timed] = []
    found: dict[str, list[Timed]] = defaultdict(list)
    for seed in range(args.rounds):
        prompt = _prompt(args.context, seed)
        alone.append(await one.prefill(prompt, "ulysses", "contiguous", 0))
        for strategy, layout in ways:
            found[strategy].append(await several.prefill(prompt, strategy, layout, 0))
    return [
        {
            "ranks": several.count,
            "strategy": strategy,
            "one_rank_s": _median(alone),
            "ttft_s": _median(found[strategy]),
            "ratio": _median(alone) / _median(found[strategy]),
        }
        for strategy, _ in ways
    ]


async def _warm_up(ranks: Ranks, args: argparse.Namespace) -> None:
    """Warm up allocators and caches."""
    for strategy in ("ulysses", *RINGS):
        await ranks.prefill(_prompt(min(args.context, 1024), 0), strategy, "contiguous", 0)


def _most_pairs(strategy: str, layout: str, length: int, ranks: int) -> float:
    """Return the most pairs of a query and a visible key of any rank over the mean; heads split
    them evenly.
    """
    if strategy == "ulysses":
        return 1.0
    pairs = [
        sum(position + 1 for span in spans for position in span.positions)
        for spans in LAYOUTS[layout](length, ranks)
    ]
    return max(pairs) / statistics.mean(pairs)


def _median(found: Sequence[Timed]) -> float:
    return statistics.median(prefill.ttft_s for prefill in found)


def _waited(found: Sequence[Timed]) -> float:
    return statistics.median(prefill.waited_s for prefill in found)


def _good(rows: Sequence[Row]) -> float | None:
    """Return for how many rows the rule takes the better variant or an equal one; None for none."""
    return sum(row["lost"] <= CLOSE for row in rows) / len(rows) if rows else None


def _point(row: Row) -> RingPoint:
    return RingPoint(
        new=row["new"], history=row["history"], kv_s=row["ring_kv_s"], q_s=row["ring_q_s"]
    )


if __name__ == "__main__":
    main()

"""The command `csps bench sweep`: find the highest request rate at which a server meets its SLO.

Rates are doubled until one is missed; then the gap is halved.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from csps.loadgen.bench import options
from csps.loadgen.bench.requests import load_requests
from csps.loadgen.bench.serve import SEED_STEP, Target, measure, run_of
from csps.loadgen.results.result import Result, write_result
from csps.loadgen.workloads.request import Slo
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError, FaultError


@dataclass
class RateSearch:
    """The search for the highest rate that meets the SLO.

    It assumes that an SLO missed at one rate is missed at all higher rates. A run of finite length
    may contradict this near the limit. The result is then a rate that was met below a missed one.
    """

    start: float
    """Requests per second to try first."""
    tolerance: float = 0.1
    """The search stops when the lowest missed rate is this share above the highest met one."""
    max_runs: int = 12
    highest: float = math.inf
    """Highest rate to try."""
    tried: dict[float, bool] = field(default_factory=dict)
    """True if each tried rate met the SLO."""

    @property
    def met(self) -> float | None:
        """Return the highest rate known to meet the SLO, or None."""
        limit = self.missed or math.inf
        return max((rate for rate, ok in self.tried.items() if ok and rate < limit), default=None)

    @property
    def missed(self) -> float | None:
        """Return the lowest rate known to miss the SLO, or None."""
        return min((rate for rate, ok in self.tried.items() if not ok), default=None)

    def next(self) -> float | None:
        """Return the rate to try next, or None at the end of the search."""
        if len(self.tried) >= self.max_runs:
            return None
        met, missed = self.met, self.missed
        if met is None:
            return self.start if missed is None else missed / 2
        if missed is None:
            return None if met >= self.highest else min(2 * met, self.highest)
        return None if missed <= met * (1 + self.tolerance) else math.sqrt(met * missed)

    def note(self, rate: float, *, ok: bool) -> None:
        """Record the outcome of a rate."""
        self.tried[rate] = ok


_log = logging.getLogger(__name__)

NORMALIZED = tuple(f"mean_normalized_{part}_latency_ms" for part in ("total", "input", "output"))
"""LoongServe's latencies: end to end per token in and out, TTFT per token in, and TPOT."""


@dataclass(frozen=True, kw_only=True)
class SweepLimits:
    """Limits that a run must meet."""

    most: Mapping[str, float]
    """Upper limits of result fields."""
    attainment: float | None = None
    """Least share of requests within the SLO. None: no such limit."""
    failed: float = 0.0
    """Greatest share of requests that fail."""

    @classmethod
    def times_light_load(cls, light: Result, factor: float, *, failed: float = 0.0) -> SweepLimits:
        """Return LoongServe's limits: a multiple of the latencies without load.

        Raises:
            FaultError: the run without load has no latencies.
        """
        if not light["completed"]:
            reasons = ", ".join(light["failed_by_reason"]) or "it was empty"
            raise FaultError(f"no request of the light load completed: {reasons}")
        most = {name: factor * light[name] for name in NORMALIZED if name in light}
        return cls(most=most, failed=failed)

    def missed_by(self, result: Result) -> str:
        """Return the first missed limit in words, or an empty string."""
        lost = result["num_prompts"] - result["completed"]
        if lost > self.failed * result["num_prompts"]:
            return f"{lost} of {result['num_prompts']} requests did not complete"
        for name, limit in self.most.items():
            if result.get(name, 0.0) > limit:
                return f"{name} {result[name]:.3g} > {limit:.3g}"
        if self.attainment is not None and result["slo_attainment"] < self.attainment:
            return f"{result['slo_attainment']:.1%} of requests within SLO < {self.attainment:.1%}"
        return ""


SLO_FACTOR = 25.0
"""Factor of LoongServe's SLO over the latencies without load."""
ATTAINMENT = 0.9
LIGHT_PROMPTS = 20
NUM_PROMPTS = 100
MIN_DURATION_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if no rate met the SLO."""
    return uvloop.run(Sweep(parse(argv)).run())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = CommandParser(
        prog="csps bench sweep",
        description="Find the highest rate that keeps the SLO: --goodput for a share of requests, "
        "else 25 times the latencies without load, per token (LoongServe).",
    )
    options.add_server_options(parser)
    options.add_workload_options(parser)
    options.add_load_options(parser)
    options.add_result_options(parser)
    group = parser.add_argument_group("search")
    group.add_argument("--rates", type=options.numbers, metavar="R,R", help="try these, no others")
    group.add_argument(
        "--slo-factor",
        type=options.positive,
        default=SLO_FACTOR,
        help="times the light load (25)",
    )
    group.add_argument(
        "--slo-attainment", type=float, default=ATTAINMENT, help="share, with --goodput (0.9)"
    )
    group.add_argument("--max-failed", type=float, default=0.0, help="share of requests (0)")
    group.add_argument(
        "--light-prompts", type=int, default=LIGHT_PROMPTS, help="without load (%(default)s)"
    )
    group.add_argument(
        "--min-duration",
        type=float,
        default=MIN_DURATION_S,
        metavar="SECONDS",
        help="more requests than --num-prompts where these would arrive in less (30)",
    )
    group.add_argument("--max-rate", type=options.positive, default=math.inf, help="no more (inf)")
    group.add_argument(
        "--tolerance", type=options.positive, default=0.1, help="share of the rate (%(default)s)"
    )
    group.add_argument("--max-runs", type=int, default=12, help="then it ends (%(default)s)")
    arguments = parser.parse_args(argv)
    arguments.num_prompts = arguments.num_prompts or NUM_PROMPTS
    return arguments


class Sweep:
    """Runs at several rates against one server.

    Each run has prompts of its own and writes a result file.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._slo = Slo.parse(arguments.goodput)
        self._label = arguments.label or arguments.backend
        self._rows: list[tuple[str, ...]] = []

    async def run(self) -> int:
        """Run the search and print its table."""
        target = await Target.reach(self._arguments)
        try:
            await target.warm_up(self._arguments)
            light = await self._light_load(target)
            limits = self._limits(light)
            if self._arguments.rates:
                highest = await self._try_all(target, limits)
            else:
                highest = await self._search(target, limits, light)
        finally:
            target.server.close()
        print("\n".join(table(self._rows)))
        name = f"{self._label} keeps the SLO up to"
        print(
            f"{name} {highest:.3g} requests/s" if highest else f"{self._label}: no rate met the SLO"
        )
        return 0 if highest else 1

    def _limits(self, light: Result) -> SweepLimits:
        arguments = self._arguments
        if self._slo:
            share = arguments.slo_attainment
            return SweepLimits(most={}, attainment=share, failed=arguments.max_failed)
        return SweepLimits.times_light_load(
            light, arguments.slo_factor, failed=arguments.max_failed
        )

    async def _light_load(self, target: Target) -> Result:
        """Measure one user who waits for each answer."""
        if self._arguments.dataset_path is not None:
            raise ConfigError(
                "a sweep generates its requests: give --dataset-name instead of --dataset-path"
            )
        alone = _changed(self._arguments, request_rate=math.inf, max_concurrency=1)
        alone.num_prompts, alone.ramp_up_strategy = self._arguments.light_prompts, None
        result = await self._measure(target, alone, f"{self._label} (no load)", None)
        if not result["completed"]:
            raise FaultError(f"no request completed without load: {[*result['failed_by_reason']]}")
        return result

    async def _try_all(self, target: Target, limits: SweepLimits) -> float | None:
        met: list[float] = []
        for rate in self._arguments.rates:
            if await self._try(target, limits, rate):
                met.append(rate)
        return max(met, default=None)

    async def _search(self, target: Target, limits: SweepLimits, light: Result) -> float | None:
        arguments = self._arguments
        start = arguments.request_rate
        if math.isinf(start):
            start = 1000 / light["mean_e2el_ms"]
        search = RateSearch(
            start=min(start, arguments.max_rate),
            tolerance=arguments.tolerance,
            max_runs=arguments.max_runs,
            highest=arguments.max_rate,
        )
        while (rate := search.next()) is not None:
            search.note(rate, ok=await self._try(target, limits, rate))
        return search.met

    async def _try(self, target: Target, limits: SweepLimits, rate: float) -> bool:
        # Few requests are no load however high their rate, so a run lasts --min-duration.
        requests = max(self._arguments.num_prompts, math.ceil(rate * self._arguments.min_duration))
        at_rate = _changed(self._arguments, request_rate=rate, num_prompts=requests)
        result = await self._measure(target, at_rate, self._label, limits)
        _log.info("rate %.3g requests/s: %s", rate, result["slo_missed"] or "SLO met")
        return bool(result["slo_kept"])

    async def _measure(
        self, target: Target, arguments: argparse.Namespace, label: str, limits: SweepLimits | None
    ) -> Result:
        arguments = _changed(arguments, seed=self._next_seed())
        selected = load_requests(arguments, chat=target.api.chat, positions=target.positions)
        run = replace(run_of(target, arguments, self._slo), label=label)
        result = await measure(target, arguments, selected, run)
        missed = "" if limits is None else limits.missed_by(result)
        result |= {"slo_kept": None if limits is None else not missed, "slo_missed": missed}
        if limits is not None:
            result["slo_limits"] = dict(limits.most)
        load = "no-load" if limits is None else f"{result['request_rate']:.3f}"
        name = f"{self._label}-{load}.json".replace("/", "_")
        write_result(result, Path(arguments.result_dir) / name)
        self._rows.append(_row(result))
        print("  ".join(self._rows[-1]), flush=True)
        return result

    def _next_seed(self) -> int:
        """Return a new seed for each run."""
        # Prompts of an earlier run would find their KV cached and flatter this run.
        # Seed + SEED_STEP is the warm-up's.
        runs = len(self._rows)
        seed: int = self._arguments.seed
        return seed + SEED_STEP * (runs + 1) if runs else seed


def _changed(arguments: argparse.Namespace, **fields: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(arguments) | fields))


_HEAD = ("rate", "done/s", "good/s", "TTFT P50", "TTFT P99", "TPOT P50", "failed", "verdict")


def _row(result: Result) -> tuple[str, ...]:
    def shown(name: str, digits: str = ".0f") -> str:
        return format(result[name], digits) if result.get(name) is not None else "-"

    rate, met = result["request_rate"], result["slo_kept"]
    verdict = "no load" if met is None else "met" if met else f"missed: {result['slo_missed']}"
    return (
        rate if isinstance(rate, str) else f"{rate:.3g}",
        shown("request_throughput", ".3g"),
        shown("request_goodput", ".3g"),
        shown("median_ttft_ms"),
        shown("p99_ttft_ms"),
        shown("median_tpot_ms", ".1f"),
        str(result["failed"]),
        verdict,
    )


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the table's lines in order of rate, the run without load first."""
    ordered = sorted(rows, key=lambda row: -1.0 if row[0] == "inf" else float(row[0]))
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    for row in (_HEAD, *ordered):
        cells = zip(row[:-1], widths, strict=False)
        yield "  ".join([*(cell.rjust(width) for cell, width in cells), row[-1]])

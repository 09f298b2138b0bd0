"""Prefill over two servers with a slow link: exact or sparse, overlapped or not, SP-NTP or SP-TP.

    sudo python benchmarks/two_servers.py [--models needle wide] [--places 16384@800mbit …]
        [--variants PART …] [--rounds 5] [--questions 50] [--timelines DIR]
        [--add FILE …] [--json FILE]
    sudo python benchmarks/two_servers.py --smoke

A place is a prompt length at a link rate. `--rounds 0` measures accuracy only and `--questions 0`
times only; `--add` publishes the results of such runs together with this one's.

Four ranks, two on each server of the testbed (`benchmarks/testbed`), have one compute thread each.
Variants take turns within a round, so that a slow moment of the machine affects all of them.
Figures are medians over the rounds, after one that does not count. `link_mb` and `loopback_mb` are
the kernel's counters of the devices, headers and control included; `between_mb` and `inside_mb` are
what the engine sent to ranks of the other and of the same server. `communication_s` is the time
that computing waited for exchanges. `hidden` is the share of it that overlap saves: one minus a
pipelined variant's `communication_s` over that of the same variant unpipelined. `overlapped` is the
engine's own account, the share of the time under way in which exchanges kept no rank waiting. It
flatters, because an exchange is under way as soon as one rank is ready to receive.

With fewer cores than ranks, which it reports first, ranks wait for cores as well as for bytes.
Wall-clock compute is then that of the machine's cores instead of four devices, and hides
communication more easily. `attention_cpu_s` (mean over ranks) and `compute_cpu_s` (the busiest
rank) are CPU time of the computing threads, which other ranks do not lengthen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import report
from checkpoints import checkpoint
from needle_questions import questions
from prefill_costs import JobCost, job_costs
from prefill_variants import BASELINE, CsaOptions, Variant, select
from testbed import iproute
from testbed.gang import Gang, GangOptions, JobResult, prefill_gang
from testbed.link import UNLIMITED, Link
from testbed.network import Testbed, two_servers

from csps.protocols.core.errors import ConfigError
from csps.services.telemetry.traces.perfetto import trace_events
from csps.services.telemetry.traces.spans import Trace, read_spans, span_files, traces

MODELS = ("needle", "wide")
WIDE_LAYERS = 6
"""Layers of the wide model. The first and the last never drop; with fewer layers they would
dominate.
"""
RANKS = 4
LOCATIONS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
PLACES = ("16384@400mbit", "16384@800mbit", f"16384@{UNLIMITED}", "32768@800mbit")
FIRST_WORD = 10
"""First token id used; ids below may be special tokens in either model."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Conditions under which the variants are compared."""

    tokens: int
    rate: str
    """Rate as named on the command line."""
    link: Link

    @classmethod
    def parse(cls, text: str, delay: str) -> Place:
        """Parse `TOKENS@RATE`, and the link's delay in one direction."""
        tokens, _, rate = text.partition("@")
        return cls(tokens=int(tokens), rate=rate, link=Link.parse(rate, delay))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of the measurements."""

    models: tuple[str, ...]
    places: tuple[Place, ...]
    variants: tuple[Variant, ...]
    rounds: int
    questions: int
    """Questions of each kind and accuracy length; 0 measures no accuracy."""
    accuracy_lengths: tuple[int, ...]
    csa: CsaOptions
    timelines: Path | None
    """Folder for a timeline of each row."""


def main() -> int:
    """Measure and publish; return the exit status."""
    args = _arguments()
    try:
        plan = _smoke(args) if args.smoke else _plan(args)
        iproute.require()
    except (ConfigError, iproute.UnavailableError) as exc:
        print(exc, file=sys.stderr)
        return 1
    _log(f"{os.cpu_count()} cores for {RANKS} ranks, load average {os.getloadavg()[0]:.1f}")
    result = _earlier(args.add, plan)
    for so_far in measure(plan, result):
        if args.json is not None:
            report.write(so_far.published(), so_far.rows, args.json)
    report.publish(result.published(), result.rows, args.json)
    return 0


def _earlier(paths: Sequence[Path], plan: Plan) -> Result:
    """Return the results of earlier runs with the same plan."""
    result = Result(csa=asdict(plan.csa))
    for path in paths:
        found = json.loads(path.read_text())
        if found["csa"] != json.loads(json.dumps(result.csa)):
            raise SystemExit(f"{path} is of another plan: {found['csa']}, not {result.csa}")
        result.rows += found["rows"]
        result.accuracy += found["accuracy"]
    return result


def to_baseline(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each row's figures relative to exact unpipelined SP-NTP in the same place."""
    place, figures = ("model", "tokens", "rate"), ("ttft_s", "between_mb", "attention_cpu_s")
    baselines = {
        tuple(row[name] for name in place): row for row in rows if row["variant"] == BASELINE.name
    }
    return [
        {name: row[name] for name in (*place, "variant")}
        | {figure: row[figure] / baseline[figure] for figure in figures}
        for row in rows
        if (baseline := baselines.get(tuple(row[name] for name in place))) is not None
    ]


def measure(plan: Plan, result: Result) -> Iterator[Result]:
    """Add to the result and yield it after each place and each model's accuracy."""
    with two_servers(Link()) as bed, iproute.entered(bed.servers[0].namespace):
        for model in plan.models:
            with checkpoint(model, layers=WIDE_LAYERS) as model_dir:
                for place in plan.places if plan.rounds else ():
                    result.rows += asyncio.run(_place_rows(bed, model, model_dir, place, plan))
                    yield result
                if model == "needle" and plan.questions:
                    bed.set_rate(None)
                    result.accuracy += asyncio.run(_accuracy(bed, model_dir, plan))
                    yield result


async def _place_rows(
    bed: Testbed, model: str, model_dir: Path, place: Place, plan: Plan
) -> list[dict[str, Any]]:
    """Measure a place with a gang of its own, so that a failure leaves other places' rows."""
    _log(f"{model}, {place.tokens} tokens, {place.rate}")
    about = {"model": model, "tokens": place.tokens, "rate": place.rate}
    bed.set_rate(place.link.rate_bits)
    with tempfile.TemporaryDirectory() as spans_dir:
        options = GangOptions(model_dir=model_dir, kv_slots=place.tokens, spans_dir=Path(spans_dir))
        async with prefill_gang(bed, options) as gang:
            results = await _rounds(gang, place.tokens, plan)
        traced = traces(read_spans(span_files(Path(spans_dir))))
    costs = job_costs(traced, gang.locations)
    series = [
        Series(about={**about, "variant": variant.name}, results=of_variant)
        for variant, of_variant in results.items()
    ]
    if plan.timelines is not None:
        for one in series:
            one.write_timeline(plan.timelines, traced)
    return with_hidden([one.row(costs) for one in series])


def with_hidden(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of one place with the share of the communication that overlap saves.

    A row without an unpipelined counterpart gets None.
    """
    waited = {row["variant"]: row["communication_s"] for row in rows}

    def hidden(variant: str, seconds: float) -> float | None:
        kind, _, overlap = variant.rpartition("/")
        total = waited.get(f"{kind}/unpipelined")
        if overlap == "unpipelined":
            return 0.0
        return 1 - seconds / total if total else None

    return [{**row, "hidden": hidden(row["variant"], row["communication_s"])} for row in rows]


@dataclass(kw_only=True)
class Result:
    """Result so far."""

    csa: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    accuracy: list[dict[str, Any]] = field(default_factory=list)

    def published(self) -> dict[str, Any]:
        """Return the result as it is written."""
        return {
            "benchmark": "two_servers",
            "ranks": RANKS,
            "oversubscribed": (os.cpu_count() or 1) < RANKS,
            "csa": self.csa,
            "accuracy": self.accuracy,
            "to_baseline": to_baseline(self.rows),
        }


@dataclass(frozen=True, kw_only=True)
class Series:
    """Rounds of one variant."""

    about: dict[str, Any]
    results: list[JobResult]

    def row(self, costs: Mapping[str, JobCost]) -> dict[str, Any]:
        """Return medians over the rounds, with the slowest rank's values."""
        results, spent = self.results, [costs[result.trace_id] for result in self.results]
        return {
            **self.about,
            "ttft_s": _median(r.ttft_s for r in results),
            "link_mb": _median(r.traffic.between_bytes / 1e6 for r in results),
            "loopback_mb": _median(r.traffic.inside_bytes / 1e6 for r in results),
            "between_mb": _median(cost.between_bytes / 1e6 for cost in spent),
            "inside_mb": _median(cost.inside_bytes / 1e6 for cost in spent),
            "attention_s": _median(cost.attention_s for cost in spent),
            "attention_cpu_s": _median(cost.attention_cpu_s for cost in spent),
            "communication_s": _median(max(d.communication_s for d in r.done) for r in results),
            "overlapped": _median(cost.hidden for cost in spent),
            "compute_cpu_s": _median(max(r.compute_cpu_s) for r in results),
            "rounds": len(results),
            "load": os.getloadavg()[0],
        }

    def write_timeline(self, folder: Path, traced: Sequence[Trace]) -> None:
        """Write the round with the median TTFT, for Perfetto."""
        middle = sorted(self.results, key=lambda r: r.ttft_s)[(len(self.results) - 1) // 2]
        name = "-".join(str(value).replace("/", "-") for value in self.about.values())
        folder.mkdir(parents=True, exist_ok=True)
        events = trace_events(next(trace for trace in traced if trace.trace_id == middle.trace_id))
        (folder / f"{name}.json").write_text(json.dumps({"traceEvents": events}))


async def _rounds(gang: Gang, length: int, plan: Plan) -> dict[Variant, list[JobResult]]:
    results: dict[Variant, list[JobResult]] = {variant: [] for variant in plan.variants}
    for number in range(plan.rounds + 1):
        tokens = _random_prompt(length, seed=number)
        for variant in plan.variants:
            result = await _run(gang, variant, tokens, plan.csa)
            if number:  # the first one connects and warms up
                results[variant].append(result)
    return results


async def _run(gang: Gang, variant: Variant, tokens: np.ndarray, csa: CsaOptions) -> JobResult:
    layers = gang.client.descriptions[0].layers
    plan = variant.plan(gang.locations, layers=layers, options=csa)
    return await gang.prefill(tokens, strategy=variant.engine_strategy, csa=plan)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


async def _accuracy(bed: Testbed, model_dir: Path, plan: Plan) -> list[dict[str, Any]]:
    """Measure right first tokens of needle answers, by variant, length and kind."""
    right: dict[tuple[str, int, str], list[bool]] = {}
    options = GangOptions(model_dir=model_dir, kv_slots=max(plan.accuracy_lengths))
    async with prefill_gang(bed, options) as gang:
        for length in plan.accuracy_lengths:
            _log(f"accuracy at {length} tokens")
            for question in questions(model_dir, length=length, count=plan.questions):
                for variant in plan.variants:
                    result = await _run(gang, variant, question.tokens, plan.csa)
                    key = (variant.name, length, question.kind)
                    right.setdefault(key, []).append(result.token == question.answer)
    return [
        {
            "variant": variant,
            "tokens": length,
            "kind": kind,
            "questions": len(answers),
            "accuracy": statistics.fmean(answers),
        }
        for (variant, length, kind), answers in right.items()
    ]


def _random_prompt(length: int, *, seed: int) -> np.ndarray:
    """Return token ids that both models have."""
    smallest_vocabulary = 1024
    draw = np.random.default_rng(seed)
    return draw.integers(FIRST_WORD, smallest_vocabulary, length, dtype=np.int32)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--places", nargs="+", default=PLACES, metavar="TOKENS@RATE")
    parser.add_argument("--delay", default="0ms", help="one way")
    parser.add_argument(
        "--variants", nargs="+", default=["/"], metavar="PART", help="names that contain a part"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=50, help="of each kind and length")
    parser.add_argument("--accuracy-lengths", nargs="+", type=int, default=[4_096, 16_384])
    parser.add_argument("--levels", type=int, default=CsaOptions.levels)
    parser.add_argument(
        "--drop-ratios", nargs="+", type=float, default=CsaOptions.drop_ratios, help="by layer"
    )
    parser.add_argument(
        "--micro", nargs="+", type=int, default=list(CsaOptions.micro_partitions), help="by level"
    )
    parser.add_argument("--exact-micro", type=int, default=CsaOptions.exact_micro)
    parser.add_argument("--tp-micro", type=int, default=CsaOptions.tp_micro)
    parser.add_argument("--window", type=int, default=CsaOptions.importance_window)
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--timelines", type=Path, metavar="DIR", help="one file for Perfetto a row")
    parser.add_argument("--smoke", action="store_true", help="does it run at all: a few seconds")
    return report.with_json_option(parser).parse_args()


def _plan(args: argparse.Namespace) -> Plan:
    plan = Plan(
        models=tuple(args.models),
        places=tuple(Place.parse(place, args.delay) for place in args.places),
        variants=tuple(select(args.variants)),
        rounds=args.rounds,
        questions=args.questions,
        accuracy_lengths=tuple(args.accuracy_lengths),
        csa=CsaOptions(
            levels=args.levels,
            drop_ratios=tuple(args.drop_ratios),
            micro_partitions=tuple(args.micro),
            exact_micro=args.exact_micro,
            tp_micro=args.tp_micro,
            importance_window=args.window,
        ),
        timelines=args.timelines,
    )
    for variant in plan.variants:  # a plan that cannot be is refused before anything is started
        variant.plan(LOCATIONS, layers=WIDE_LAYERS, options=plan.csa)
    return plan


def _smoke(args: argparse.Namespace) -> Plan:
    args.places, args.rounds = ["1024@800mbit"], 1
    args.accuracy_lengths, args.questions = [1_024], 1
    return _plan(args)


if __name__ == "__main__":
    sys.exit(main())

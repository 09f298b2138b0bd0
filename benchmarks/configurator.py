"""What the configurator chooses, against what was measured and against an exhaustive search.

    python benchmarks/configurator.py lookup
    python benchmarks/configurator.py oracle [--planted] [--cluster FILE] [--instances 2 4]
    sudo python benchmarks/configurator.py simulator --sib FILE [--cluster FILE] [--rate 800mbit]
        [--lengths 4096 8192 16384] [--configurations 72] [--rounds 3] [--measured FILE]
    python benchmarks/configurator.py live --base-url URL [--length 32768] [--rounds 7]

Each takes less than eight minutes, and `--json FILE` keeps its rows, of which
`configurator_table.py` makes one table with what is aimed at.

`lookup`: processor time of one look-up in a cost table whose buckets have all options.
`oracle`: regressors learn from the lengths of `csps train` and are asked for those of the cost
table's buckets, between them, and for bounds that they have not seen; times are the pipeline
simulator's. `worse` is the answer's time over the best that an exhaustive search of the same space
has found, less one, for least TTFT; for least loss it is the difference of the losses. Losses are
what ships of the included model, or planted: growing with what is dropped, so that bounds bind.
`simulator`: configurations drawn at random, exact and sparse, SP-NTP and SP-TP, cut and not, on the
two-server testbed (`benchmarks/testbed`); the median of the rounds over the predicted time. Phases
are of `csps profile phases`, on one server, and what steps take of the cores besides is measured as
there, but on the testbed, whose link costs more of them; steps of other lengths, cut otherwise: to
none that is compared is anything fitted. `--measured` takes the times of an earlier run's rows and
only predicts anew. `pipelined` compares each pipelined
configuration with the same one that waits for every exchange, as measured and as predicted; `auto`
compares what exact requests are given there with exact SP-NTP that is not cut.
`live`: a server that was profiled and trained. Requests of each kind take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report

from csps.configurator.answering import Answerer, answered_space, exact_seconds
from csps.configurator.bound_buckets import LOSSES, TIMES
from csps.configurator.enumeration import Loss
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds
from csps.configurator.predicted_options import PredictedOptions
from csps.configurator.profiles import fit_phases
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.direct import fingerprint, train_direct
from csps.configurator.regressors.pairs import eligible_pairs
from csps.configurator.regressors.shipped_accuracy import shipped_accuracy
from csps.configurator.regressors.training_set import direct_samples, simulated
from csps.configurator.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.search import Answer, Found, Question, chosen, exhaustive
from csps.configurator.step_overheads import with_overheads
from csps.loadgen.planner.hardware_file import load_group
from csps.models.weights_digest import weights_digest
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.group_shape import GroupShape
from csps.protocols.options import option_name, parse_option
from csps.protocols.plans import (
    BOUNDED,
    ENGINE_NAMES,
    EXACT,
    LEVELS,
    RINGS,
    SPARSE,
    Objective,
    ObjectiveKind,
    RequestClass,
    StrategyChoice,
    StrategyQuestion,
)
from csps.protocols.topology import Topology
from csps.services.launch.settings import shipped_models
from csps.services.profiling.option_source import KINDS
from csps.services.profiling.overheads import ROUNDS, measure_steps
from csps.services.profiling.steps import Work
from csps.services.scheduling.cost import Allowed, Bucket, CostTable
from csps.services.scheduling.latency_shipped import SHIPPED

LEARNED = tuple(1 << exponent for exponent in range(10, 18))
ASKED = tuple(3 << exponent >> 1 for exponent in range(10, 17))
"""Lengths of the cost table's buckets."""
HELD_OUT_LOSSES = (0.003, 0.015, 0.03, 0.07)
HELD_OUT_TIMES = (0.45, 0.65, 0.85, 1.2)
PROFILED = (1_024, 3_072, 12_288)
"""Lengths of which it is measured what steps take of the testbed's cores: none that is drawn."""
LOOKUPS = 20_000
UNPIPELINED: dict[str, Any] = {
    "attention": "csa", "strategy": "ntp", "levels": 1, "drop_ratio": 0, "pipelined": False,
}  # fmt: skip
"""Exact SP-NTP that waits for every exchange."""


def main() -> int:
    """Measure and publish; the exit status."""
    arguments = _arguments()
    rows, result = arguments.section(arguments)
    report.publish({"benchmark": f"configurator {arguments.what}", **result}, rows, arguments.json)
    return 0


Section = tuple[list[dict[str, Any]], dict[str, Any]]

# --- look-up -----------------------------------------------------------------------------------


def lookup(arguments: argparse.Namespace) -> Section:
    """Microseconds of processor time, every bucket with an option for each bound."""
    shape, length = GroupShape((2, 2)), 32_768
    sparse = [
        Allowed(
            option_name("csa", CsaSettings(drop_ratios=((share,),))), round(1000 * share), 100 * it
        )
        for it, share in enumerate(np.linspace(0.99, 0.1, len(LOSSES) + len(TIMES)).tolist())
    ]
    bucket = Bucket(BOUNDED, shape, length.bit_length() - 1)
    table = CostTable(latencies=SHIPPED, buckets={bucket: (Allowed("ulysses"), *sparse)})
    rows = []
    for objective in (
        Objective(max_accuracy_loss=0.01),
        Objective(kind="accuracy", max_ttft_ms=5_000.0),
    ):
        cls = RequestClass(objective=objective).key
        table.best(cls, shape, 0, length)
        begin = time.process_time()
        for waited_ns in range(LOOKUPS):
            table.best(cls, shape, 0, length, waited_ns)
        took_us = (time.process_time() - begin) / LOOKUPS * 1e6
        rows.append({"objective": objective.kind, "options": 1 + len(sparse), "us": took_us})
    return rows, {}


# --- against an exhaustive search --------------------------------------------------------------


def oracle(arguments: argparse.Namespace) -> Section:
    """Answers to held-out questions beside the Oracle's."""
    accuracy = Planted() if arguments.planted else shipped()
    groups = [load_group(arguments.cluster, instances=it) for it in arguments.instances]
    answerer = trained(groups, accuracy)
    rows = []
    for group in groups:
        for tokens in arguments.lengths or ASKED:
            loss = _loss(accuracy, group, tokens)
            whatever = Question(
                group=group, tokens=tokens, objective=Objective(max_accuracy_loss=1.0)
            )
            everything = exhaustive(whatever, answerer.space, loss)
            found = [everything.best, *everything.runners_up]
            rows += [_compared(answerer, it, loss, found) for it in _held_out(group, tokens)]
    losses = "planted" if arguments.planted else "shipped"
    return rows, {"losses": losses, "summary": [_summary(rows, kind) for kind in KINDS]}


class Planted:
    """In the place of F_Ad."""

    def of_group(self, locations: Sequence[str], *, layers: int, tokens: int) -> Loss:
        """The layer before judges worse."""
        share = eligible_pairs(locations, len(Topology.of(locations).granularities))

        def loss(settings: CsaSettings) -> float:
            if settings.lossless:
                return 0.0
            worse = 1.0 if settings.importance_layer == "same" else 4.0
            return min(1.0, 0.3 * worse * share * max(map(max, settings.drop_ratios)) ** 3)

        return lambda configurations: list(map(loss, configurations))


def shipped() -> AccuracyModel:
    """F_Ad of the included model."""
    found = shipped_accuracy(weights_digest(shipped_models() / "needle"))
    assert found is not None, "nothing ships of the included model"
    return found


def trained(groups: Sequence[SimulatedGroup], accuracy: AccuracyModel | Planted) -> Answerer:
    """What answers for groups of these kinds."""
    space = answered_space(groups[0].shape.layers)
    prompts = [
        simulated(group, tokens, space, _loss(accuracy, group, tokens))
        for group in groups
        for tokens in LEARNED
    ]
    models = {}
    for kind in KINDS:
        samples = direct_samples(prompts, kind, space)
        models[kind] = train_direct(kind, samples, {}, training_set=fingerprint(samples))
    return Answerer(space=space, models=models)


def _held_out(group: SimulatedGroup, tokens: int) -> Iterator[Question]:
    exact_ms = 1000 * exact_seconds(group, tokens)
    for bound in HELD_OUT_LOSSES:
        objective = Objective(max_accuracy_loss=bound)
        yield Question(group=group, tokens=tokens, objective=objective)
    for share in HELD_OUT_TIMES:
        objective = Objective(
            kind="accuracy", max_ttft_ms=share * exact_ms, max_accuracy_loss=LOSSES[-1]
        )
        yield Question(group=group, tokens=tokens, objective=objective)


def _compared(
    answerer: Answerer, question: Question, loss: Loss, everything: Sequence[Found]
) -> dict[str, Any]:
    begin = time.process_time()
    answer = answerer.answer(question, loss)
    took_s = time.process_time() - begin
    best = chosen(question, everything)
    return {
        "instances": question.group.members,
        "tokens": question.tokens,
        "objective": question.objective.kind,
        "bound": question.objective.max_ttft_ms or question.most_loss,
        "met": answer.met,
        "oracle_met": best.met,
        "worse": _worse(question.objective.kind, answer, best),
        "compared": answer.compared,
        "of": best.compared,
        "cpu_s": took_s,
    }


def _worse(kind: ObjectiveKind, answer: Answer, best: Answer) -> float | None:
    if not (answer.met and best.met):
        return None
    if kind == "ttft":
        return answer.best.seconds / best.best.seconds - 1
    return answer.best.loss - best.best.loss


def _summary(rows: Sequence[dict[str, Any]], kind: ObjectiveKind) -> dict[str, Any]:
    of_kind = [it for it in rows if it["objective"] == kind]
    worse = [it["worse"] for it in of_kind if it["worse"] is not None]
    return {
        "objective": kind,
        "questions": len(of_kind),
        "met_as_the_oracle": sum(it["met"] == it["oracle_met"] for it in of_kind) / len(of_kind),
        "worse_median": statistics.median(worse),
        "worse_p95": float(np.quantile(worse, 0.95)),
        "cpu_s_median": statistics.median(it["cpu_s"] for it in of_kind),
    }


def _loss(accuracy: AccuracyModel | Planted, group: SimulatedGroup, tokens: int) -> Loss:
    return accuracy.of_group(group.locations, layers=group.shape.layers, tokens=tokens)


# --- the pipeline simulator against the testbed ------------------------------------------------


def simulator(arguments: argparse.Namespace) -> Section:
    """Predicted and measured times of drawn configurations."""
    group = load_group(arguments.cluster)
    drawn = _drawn(group, arguments.configurations, arguments.lengths or (4_096, 8_192, 16_384))
    chosen_s: dict[int, tuple[float, float]] = {}
    if arguments.measured is None:
        measured, chosen_s = _on_testbed(group, drawn, arguments)
    else:
        known = json.loads(arguments.measured.read_text())["rows"]
        measured = [float(it["measured_s"]) for it in known]
    group = _with_phases(group, arguments.sib)
    rows = [
        _row(group, settings, length, seconds)
        for (settings, length), seconds in zip(drawn, measured, strict=True)
    ]
    errors = [abs(it["error"]) for it in rows]
    summary = {
        "configurations": len(rows),
        "median_error": statistics.median(errors),
        "p95_error": float(np.quantile(errors, 0.95)),
        "pipelined": _pipelined(rows),
        "auto": [
            {
                "tokens": tokens,
                "option": choice.strategy,
                "predicted": choice.permille / 1000,
                "measured": chosen_s[tokens][0] / chosen_s[tokens][1] if chosen_s else None,
            }
            for tokens, choice in _auto(group, drawn).items()
        ],
    }
    return rows, {"summary": summary, "rate": arguments.rate}


def _auto(
    group: SimulatedGroup, drawn: Sequence[tuple[CsaSettings, int]]
) -> dict[int, StrategyChoice]:
    """What exact requests without bounds are given, by length."""
    shape = GroupShape.of(Topology.of(group.locations).locations, group.tp)
    options = PredictedOptions(
        answerer=Answerer(space=answered_space(group.shape.layers), models={}),
        accuracy=shipped(),
        group_of=lambda _servers, _tp: group,
    )
    usual = StrategyChoice(strategy=EXACT, reason="")
    return {
        tokens: options.exact(
            StrategyQuestion(csa=None, servers=shape.servers, tp=group.tp, tokens=tokens), usual
        )
        for tokens in sorted({length for _, length in drawn})
    }


def _pipelined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of pipelined times over those of the same configurations, not pipelined."""
    pairs = [(one, two) for one, two in pairwise(rows) if one["micro"] != "-" == two["micro"]]
    kinds = sorted({(it["strategy"], it["tokens"]) for it, _ in pairs})
    return [
        {"strategy": strategy, "tokens": tokens}
        | {
            which: statistics.median(
                one[f"{which}_s"] / two[f"{which}_s"]
                for one, two in pairs
                if (one["strategy"], one["tokens"]) == (strategy, tokens)
            )
            for which in ("measured", "predicted")
        }
        for strategy, tokens in kinds
    ]


Measured = tuple[list[float], dict[int, tuple[float, float]]]
"""Seconds of what was drawn; and by length of what `auto` takes, and of exact SP-NTP whole."""


def _on_testbed(
    group: SimulatedGroup,
    drawn: Sequence[tuple[CsaSettings, int]],
    arguments: argparse.Namespace,
) -> Measured:
    from testbed import iproute
    from testbed.link import Link
    from testbed.network import two_servers

    iproute.require()
    with two_servers(Link()) as bed, iproute.entered(bed.servers[0].namespace):
        bed.set_rate(Link.parse(arguments.rate, "0ms").rate_bits)
        return asyncio.run(_measured(bed, group, drawn, arguments))


def _with_phases(group: SimulatedGroup, sib: Path) -> SimulatedGroup:
    with _opened(sib) as base:
        rows = base.rows(PhaseRow)
    shape = group.shape
    times = fit_phases(rows, heads=shape.heads, kv_heads=shape.kv_heads, tp=group.tp)
    group = replace(group, times=times)
    return replace(group, times=with_overheads(group, rows))


def _opened(sib: Path) -> ScalingInformationBase:
    base = ScalingInformationBase.read(sib, None)
    if base is None:
        raise SystemExit(f"there is no {sib}; run `csps profile phases`")
    return base


def _drawn(
    group: SimulatedGroup, count: int, lengths: Sequence[int]
) -> list[tuple[CsaSettings, int]]:
    """Of each length and variant as many, a third of them exact, ratios and micro-partitions at
    random; each that is pipelined stands before the same one that is not."""
    draw, space = random.Random(0), answered_space(group.shape.layers)
    ratios, exact = list(space.ratios()), space.exact(group.locations)
    variants = list(space.variants(group.locations))
    found: list[tuple[CsaSettings, int]] = []
    for number in range(-(-count // 2)):
        length = lengths[number // 3 % len(lengths)]
        if number % 3:
            strategy, levels, judging = variants[number % len(variants)]
            micro = draw.choice(space.micros(levels))
            settings = space.settings(strategy, levels, judging, draw.choice(ratios), micro)
        else:
            settings = draw.choice(exact)
        found += [(settings, length), (replace(settings, pipelined=False), length)]
    return list(dict.fromkeys(found))[:count]


async def _measured(
    bed: Any,
    group: SimulatedGroup,
    drawn: Sequence[tuple[CsaSettings, int]],
    arguments: argparse.Namespace,
) -> Measured:
    """Seconds to the first token, medians; what steps take of the cores there is kept first."""
    from testbed.gang import GangOptions, prefill_gang

    options = GangOptions(
        model_dir=shipped_models() / "needle", kv_slots=max(length for _, length in drawn)
    )
    tokens = np.random.default_rng(0).integers(10, 1024, options.kv_slots, dtype=np.int32)
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    async with prefill_gang(bed, options) as gang:
        layers = gang.client.descriptions[0].layers

        async def run(length: int, option: str) -> Any:
            name, settings = parse_option(option)
            plan = settings and settings.for_group(
                gang.locations,
                layers=layers,
                longest_spt=-(-length // len(gang.locations)),
                every_query=name == ENGINE_NAMES["tp"],
            )
            return await gang.prefill(
                tokens[:length],
                strategy=SPARSE if name == LEVELS else name,
                csa=plan,
                layout="zigzag" if name in RINGS else "contiguous",
            )

        async def work(length: int, option: str) -> Work:
            done = await run(length, option)
            return Work(
                processor_s=sum(done.cpu_s),
                computing_s=sum(done.compute_cpu_s),
                took_s=done.ttft_s,
            )

        with _opened(arguments.sib) as base:
            shape = f"{options.ranks_per_server}+{options.ranks_per_server}"
            await measure_steps(
                base, work, PROFILED, group_shape=shape, tp=1, rounds=ROUNDS, crowded=None
            )
        wanted = [(_option(settings), length) for settings, length in drawn]
        auto = _auto(_with_phases(group, arguments.sib), drawn)
        taken = {length: (choice.strategy, EXACT) for length, choice in auto.items()}
        whole = [(option, length) for length, both in taken.items() for option in both]
        for number_of_round in range(arguments.rounds + 1):
            for option, length in dict.fromkeys([*wanted, *whole]):
                done = await run(length, option)
                if number_of_round:  # the first one connects and warms up
                    took[option, length].append(done.ttft_s)
    median_s = {key: statistics.median(seconds) for key, seconds in took.items()}
    return [median_s[it] for it in wanted], {
        length: (median_s[option, length], median_s[whole, length])
        for length, (option, whole) in taken.items()
    }


def _option(settings: CsaSettings) -> str:
    if settings == WHOLE:
        return EXACT
    assert settings.strategy is not None
    return option_name(ENGINE_NAMES[settings.strategy], settings)


def _row(
    group: SimulatedGroup, settings: CsaSettings, length: int, measured_s: float
) -> dict[str, Any]:
    (predicted_s,) = prefill_seconds(group, [settings], length).tolist()
    return {
        "tokens": length,
        "strategy": settings.strategy,
        "levels": settings.levels,
        "ratio": max(map(max, settings.drop_ratios)),
        "judged": "-" if settings.lossless else settings.importance_layer,
        "micro": "-" if not settings.pipelined else str((settings.micro_partitions or ((4,),))[0]),
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1,
    }


# --- a server ----------------------------------------------------------------------------------


def live(arguments: argparse.Namespace) -> Section:
    """Bounds on the loss by turns, and then bounds on TTFT relative to exact attention."""
    with httpx.Client(base_url=arguments.base_url, timeout=300.0) as client:
        ask = _Asker(client, arguments.length, arguments.pause)
        wishes = {
            "unpipelined": UNPIPELINED,
            "exact": {"attention": "exact"},
            **{f"loss {bound:g}": {"max_accuracy_loss": bound} for bound in (0.0, 0.01, 0.05)},
        }
        rows = ask.by_turns(wishes, arguments.rounds)
        exact_ms = 1000 * next(it["ttft_s"] for it in rows if it["wish"] == "exact")
        bounds = {share: share * exact_ms for share in (0.6, 0.8, 1.0, 1.3)}
        timed = {
            f"ttft {share:g}": {"objective": "accuracy", "max_ttft_ms": bound}
            for share, bound in bounds.items()
        }
        rows += ask.by_turns(timed, arguments.rounds)
    return rows, {"length": arguments.length}


class _Asker:
    """Sends prompts that have nothing in common, one at a time."""

    def __init__(self, client: httpx.Client, length: int, pause_s: float) -> None:
        self._client, self._length, self._pause_s = client, length, pause_s
        self._model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._draw = random.Random(time.time_ns())

    def by_turns(self, wishes: dict[str, dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
        """A row for each wish; the first round fills the cost table."""
        told: dict[str, list[dict[str, Any]]] = {name: [] for name in wishes}
        for number in range(rounds + 1):
            for name, wish in wishes.items():
                answer = self._ask(wish)
                if number:
                    told[name].append(answer)
            if not number:
                time.sleep(self._pause_s)  # the configurator answers in the background
        return [self._row(name, wishes[name], answers) for name, answers in told.items()]

    def _ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": [self._draw.randrange(10, 250) for _ in range(self._length)],
            "max_tokens": 1,
            "temperature": 0,
            "csps": {"explain": True, **wish},
        }
        told: dict[str, Any] = (
            self._client.post("/v1/completions", json=body).raise_for_status().json()
        )
        return told["csps"]

    def _row(
        self, name: str, wish: dict[str, Any], answers: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        ttfts = [it["timings"]["ttft_s"] for it in answers]
        plan = answers[-1]["plan"]
        bound_ms = wish.get("max_ttft_ms")
        return {
            "wish": name,
            "ttft_s": statistics.median(ttfts),
            "predicted_s": plan["predicted_ttft_ms"] / 1000,
            "strategy": plan["strategy"],
            "loss": plan["predicted_accuracy_loss"],
            "said_met": plan["bounds_met"],
            "kept": None
            if bound_ms is None
            else sum(1000 * it <= bound_ms for it in ttfts) / len(ttfts),
        }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sections = {"lookup": lookup, "oracle": oracle, "simulator": simulator, "live": live}
    parser.add_argument("what", choices=sections)
    here = Path(__file__).with_name("needle-two-servers.yaml")
    parser.add_argument("--cluster", default=str(here), help="a file as `csps plan` takes it")
    parser.add_argument("--planted", action="store_true", help="a loss that makes bounds bind")
    parser.add_argument("--sib", type=Path, default=Path("run/scaling-information-base.sqlite"))
    parser.add_argument("--pause", type=float, default=30.0, help="s, for the configurator")
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--configurations", type=int, default=72)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measured", type=Path, help="rows of an earlier run of `simulator`")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--length", type=int, default=32_768)
    arguments = report.with_json_option(parser).parse_args()
    arguments.section = sections[arguments.what]
    return arguments


if __name__ == "__main__":
    sys.exit(main())

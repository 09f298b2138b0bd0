"""The pipeline simulator against the testbed: `configurator.py simulator`.

Configurations are sampled at random: exact and sparse, SP-NTP and SP-TP, pipelined and not. They
run on the two-server testbed (`benchmarks/testbed`), and the median of the rounds is compared with
the predicted time. Phase times come from `csps profile phases` on one server. Core overheads of
steps are measured on the testbed, whose link costs more processor time, with other lengths and
other cuts. No compared configuration is used for fitting. `--measured` takes the times of an
earlier run and only predicts anew.

`pipelined` compares each pipelined configuration with the same one unpipelined, as measured and as
predicted, those that drop tokens apart from exact ones. `auto` compares the choice for exact
requests with whole exact SP-NTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from configurator_oracle import shipped
from report import Section

from csps.configurator.model.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds
from csps.configurator.plan.predicted_options import (
    DirectAnswerer,
    PredictedOptions,
    answered_space,
)
from csps.configurator.plan.profiles import fit_phases, with_overheads
from csps.configurator.search.space import LayerGroups, Space
from csps.loadgen.planner.hardware_file import load_group
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    ENGINE_NAMES,
    EXACT,
    LEVELS,
    RINGS,
    SPARSE,
    StrategyChoice,
    StrategyQuestion,
    option_name,
    parse_option,
)
from csps.protocols.core.topology import GroupShape, Topology
from csps.services.profiling.phases import OVERHEAD_ROUNDS, measure_steps
from csps.services.profiling.steps import StepWork
from csps.services.settings.settings import shipped_models

PROFILED = (1_024, 3_072, 12_288)
"""Lengths at which core overheads are measured; no sampled configuration has them."""


def simulator(arguments: argparse.Namespace) -> Section:
    """Compare predicted and measured times of sampled configurations."""
    group = load_group(arguments.cluster)
    sampled = _sampled(group, arguments.configurations, arguments.lengths or (4_096, 8_192, 16_384))
    chosen_s: dict[int, tuple[float, float]] = {}
    if arguments.measured is None:
        measured, chosen_s = _on_testbed(group, sampled, arguments)
    else:
        known = json.loads(arguments.measured.read_text())["rows"]
        measured = [float(row["measured_s"]) for row in known]
    group = _with_phases(group, arguments.sib)
    rows = [
        _row(group, settings, length, seconds)
        for (settings, length), seconds in zip(sampled, measured, strict=True)
    ]
    errors = [abs(row["error"]) for row in rows]
    summary = {
        "configurations": len(rows),
        "median_error": statistics.median(errors),
        "p95_error": float(np.quantile(errors, 0.95)),
        "pipelined": pipelined(rows),
        "auto": [
            {
                "tokens": tokens,
                "option": choice.strategy,
                "predicted": choice.permille / 1000,
                "measured": chosen_s[tokens][0] / chosen_s[tokens][1] if chosen_s else None,
            }
            for tokens, choice in _auto(group, sampled).items()
        ],
    }
    return rows, {"summary": summary, "rate": arguments.rate}


def _auto(
    group: SimulatedGroup, sampled: Sequence[tuple[CsaSettings, int]]
) -> dict[int, StrategyChoice]:
    """Return the choice for exact requests without bounds, by length."""
    shape = GroupShape.of(Topology.of(group.locations).locations, group.tp)
    options = PredictedOptions(
        answerer=DirectAnswerer(space=_space(group), models={}),
        accuracy=shipped(),
        group_of=lambda _places: group,
    )
    usual = StrategyChoice(strategy=EXACT, reason="")
    return {
        tokens: options.exact(
            StrategyQuestion(
                csa=None, servers=shape.servers, racks=shape.racks, tp=group.tp, tokens=tokens
            ),
            usual,
        )
        for tokens in sorted({length for _, length in sampled})
    }


def _space(group: SimulatedGroup) -> Space:
    return answered_space(LayerGroups.alike(group.shape.layers))


def pipelined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median ratios of pipelined to unpipelined times of the same configurations, by
    strategy, length and whether tokens are dropped."""
    found: dict[tuple[str, bool, int], list[tuple[float, float]]] = defaultdict(list)
    for one, two in pairwise(rows):
        if one["micro"] != "-" == two["micro"]:
            found[one["strategy"], one["ratio"] > 0, one["tokens"]].append(
                (one["measured_s"] / two["measured_s"], one["predicted_s"] / two["predicted_s"])
            )
    return [
        {
            "strategy": strategy,
            "drops": drops,
            "tokens": tokens,
            "pairs": len(pairs),
            "measured": statistics.median(measured for measured, _ in pairs),
            "predicted": statistics.median(predicted for _, predicted in pairs),
        }
        for (strategy, drops, tokens), pairs in sorted(found.items())
    ]


Measured = tuple[list[float], dict[int, tuple[float, float]]]
"""Seconds of the sampled configurations, and by length of `auto` and of whole exact SP-NTP."""


def _on_testbed(
    group: SimulatedGroup,
    sampled: Sequence[tuple[CsaSettings, int]],
    arguments: argparse.Namespace,
) -> Measured:
    from testbed import iproute
    from testbed.link import Link
    from testbed.network import two_servers

    iproute.require()
    with two_servers(Link()) as bed, iproute.entered(bed.servers[0].namespace):
        bed.set_rate(Link.parse(arguments.rate, "0ms").rate_bits)
        return asyncio.run(_measured(bed, group, sampled, arguments))


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


def _sampled(
    group: SimulatedGroup, count: int, lengths: Sequence[int]
) -> list[tuple[CsaSettings, int]]:
    """Return as many configurations of each length and variant, a third of them exact.

    Ratios and micro-partitions are random. Each pipelined one precedes the same one unpipelined.
    """
    draw, space = random.Random(0), _space(group)
    ratios, exact = list(space.ratios()), space.exact(group.locations)
    variants = list(space.variants(group.locations))
    found: list[tuple[CsaSettings, int]] = []
    for number in range(-(-count // 2)):
        length = lengths[number // 3 % len(lengths)]
        if number % 3:
            strategy, levels, scoring = variants[number % len(variants)]
            micro = draw.choice(space.micros(levels))
            settings = space.settings(strategy, levels, scoring, draw.choice(ratios), micro)
        else:
            settings = draw.choice(exact)
        found += [(settings, length), (replace(settings, pipelined=False), length)]
    return list(dict.fromkeys(found))[:count]


async def _measured(
    bed: Any,
    group: SimulatedGroup,
    sampled: Sequence[tuple[CsaSettings, int]],
    arguments: argparse.Namespace,
) -> Measured:
    """Return median seconds to the first token, after storing the core overheads."""
    from testbed.gang import GangOptions, prefill_gang

    options = GangOptions(
        model_dir=shipped_models() / "needle", kv_slots=max(length for _, length in sampled)
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

        async def work(length: int, option: str) -> StepWork:
            done = await run(length, option)
            return StepWork(
                processor_s=sum(done.cpu_s),
                computing_s=sum(done.compute_cpu_s),
                took_s=done.ttft_s,
            )

        with _opened(arguments.sib) as base:
            shape = f"{options.ranks_per_server}+{options.ranks_per_server}"
            await measure_steps(
                base, work, PROFILED, group_shape=shape, tp=1, rounds=OVERHEAD_ROUNDS, crowded=None
            )
        wanted = [(_option(settings), length) for settings, length in sampled]
        auto = _auto(_with_phases(group, arguments.sib), sampled)
        taken = {length: (choice.strategy, EXACT) for length, choice in auto.items()}
        whole = [(option, length) for length, both in taken.items() for option in both]
        for number_of_round in range(arguments.rounds + 1):
            for option, length in dict.fromkeys([*wanted, *whole]):
                done = await run(length, option)
                if number_of_round:  # the first one connects and warms up
                    took[option, length].append(done.ttft_s)
    median_s = {key: statistics.median(seconds) for key, seconds in took.items()}
    return [median_s[variant] for variant in wanted], {
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

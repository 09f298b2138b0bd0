"""Time to the first token on a group: T_a + T'_a of CSPS §3.2.6, for many configurations.

T_a is summed over layers (Eq. 6); layers that are alike are simulated once. The model's last layer
is computed for single rows only, so it has no pipeline; of T'_a = R L_in the R is the rest of every
layer, for the rows of the member that has most, whose core others use as well then.

Shape suffix c: configurations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from csps.configurator.pipeline.cases import LayerCases, SimulatedGroup
from csps.configurator.pipeline.ntp import simulate_ntp
from csps.configurator.pipeline.program import Outcome, Seconds
from csps.configurator.pipeline.ring import simulate_ring
from csps.configurator.pipeline.tp import simulate_tp
from csps.protocols.csa import ALL_QUERIES, CsaPlan
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.even_share import even_share
from csps.protocols.plans import Ring

WHOLE = CsaSettings(levels=1, pipelined=False, strategy="ntp")
"""Exact SP-NTP, not cut."""


class _Kind(NamedTuple):
    """Layers of one kind share a program."""

    tp: bool
    levels: int
    drop_queries: bool
    pipelined: bool
    judges_itself: bool
    """In SP-TP, where that has another order of steps."""


class _LayerProblem(NamedTuple):
    """What a layer's time depends on beside its kind."""

    ratios: tuple[tuple[float, ...], ...]
    """[KV head][level - 1]."""
    micro: tuple[int, ...]
    judges: bool
    same: bool
    window: int
    sinks: int
    tail: int


def can_simulate(settings: CsaSettings) -> bool:
    """Nested levels and importance judged by all queries are for comparison, and not predicted."""
    return not settings.nested and (settings.importance_window != ALL_QUERIES or settings.lossless)


def prefill_seconds(
    group: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int, history: int = 0
) -> Seconds:
    """(c,) T_a + T'_a of a prompt that is cut evenly over the group.

    Args:
        configurations: with a strategy each; exact SP-NTP is one level, not pipelined.
        tokens: of the prompt, at least one for each member.
        history: before them, evenly over the group; SP-NTP only.
    """
    seconds: Seconds = attention_seconds(group, configurations, tokens, history)
    return seconds + _rest(group, tokens)


def ring_seconds(group: SimulatedGroup, ring: Ring, tokens: int, history: int = 0) -> float:
    """The same around a ring. Arguments as above."""
    layer_c = simulate_ring(group, ring, _spts(group, tokens), history).makespan_c
    return float((group.shape.layers - 1) * layer_c[0] + _rest(group, tokens))


def _rest(group: SimulatedGroup, tokens: int) -> float:
    """T'_a."""
    longest = np.array(max(_spts(group, tokens)), float)
    times, layers = group.times, group.shape.layers
    rest = layers * times.rest.seconds(longest) + times.qkv.seconds(longest)
    return float((rest + times.step.fixed) * group.slowed)


def attention_seconds(
    group: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int, history: int = 0
) -> Seconds:
    """(c,) T_a, of all layers but the last."""
    return _over_layers(group, configurations, tokens, lambda outcome: outcome.makespan_c, history)


def work_seconds(
    group: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int
) -> Seconds:
    """(c,) what a prompt takes of all simulated ranks' cores together, without threads beside
    those that compute. Arguments as above."""
    spts, times = np.array(_spts(group, tokens), float), group.times
    rest = group.shape.layers * times.rest.seconds(spts) + times.qkv.seconds(spts)
    rest = rest + times.step.fixed
    attention_c = _over_layers(group, configurations, tokens, lambda it: it.work_c)
    seconds: Seconds = attention_c + rest.sum()
    return seconds


def _over_layers(
    group: SimulatedGroup,
    configurations: Sequence[CsaSettings],
    tokens: int,
    of: Callable[[Outcome], Seconds],
    history: int = 0,
) -> Seconds:
    spts = _spts(group, tokens)
    needed: dict[_Kind, dict[_LayerProblem, int]] = defaultdict(dict)
    layers_of = []
    for settings in configurations:
        assert can_simulate(settings), f"not simulated: {settings}"
        layers = _layers(group, settings, max(spts))
        for kind, problem in layers:
            needed[kind].setdefault(problem, len(needed[kind]))
        layers_of.append(layers)
    seconds = {
        kind: of(_simulated(group, kind, list(found), spts, history))
        for kind, found in needed.items()
    }
    return np.array(
        [
            sum(
                times * seconds[kind][needed[kind][problem]]
                for (kind, problem), times in layers.items()
            )
            for layers in layers_of
        ],
        float,
    )


def _spts(group: SimulatedGroup, tokens: int) -> list[int]:
    return [len(even_share(tokens, group.members, member)) for member in range(group.members)]


def _layers(
    group: SimulatedGroup, settings: CsaSettings, longest_spt: int
) -> Counter[tuple[_Kind, _LayerProblem]]:
    """The layers of a configuration but the last, by what their times depend on."""
    tp = settings.strategy in ("tp", "tp_flat")
    plan = settings.for_group(
        group.locations, layers=group.shape.layers, longest_spt=longest_spt, every_query=tp
    )
    problems = Counter(_problem(group, plan, layer) for layer in range(group.shape.layers - 1))
    return Counter(
        {
            (
                _Kind(tp, plan.levels, plan.drop_queries, plan.pipelined, tp and problem.same),
                problem,
            ): times
            for problem, times in problems.items()
        }
    )


def _problem(group: SimulatedGroup, plan: CsaPlan, layer: int) -> _LayerProblem:
    last = group.shape.layers - 1
    of_layer, same = plan.layer_group(layer), plan.importance_layer == "same"
    drops = _drops(plan, layer, last)
    judges = not same and _drops(plan, layer + 1, last)
    levels = range(1, plan.levels + 1)
    ratios = tuple(
        tuple(of_layer.drop_ratio(level, head) if drops else 0.0 for level in levels)
        for head in range(group.kv_heads)
    )
    judging = judges or drops
    return _LayerProblem(
        ratios=ratios,
        micro=tuple(of_layer.micro(level) for level in levels),
        judges=judges,
        same=drops and same,
        window=plan.importance_window if judging else 1,
        sinks=plan.sinks if drops else 0,
        tail=plan.tail if drops else 0,
    )


def _drops(plan: CsaPlan, layer: int, last: int) -> bool:
    """The first layer and the last never do (`actors.levels.schedule`)."""
    return 0 < layer < last and any(map(any, plan.layer_group(layer).drop_ratios))


def _simulated(
    group: SimulatedGroup,
    kind: _Kind,
    problems: Sequence[_LayerProblem],
    spts: Sequence[int],
    history: int,
) -> Outcome:
    cases = LayerCases(
        levels=kind.levels,
        ratios_cgv=np.array([it.ratios for it in problems], float),
        micro_cv=np.array([it.micro for it in problems], np.int64),
        judges_c=np.array([it.judges for it in problems], np.bool_),
        same_c=np.array([it.same for it in problems], np.bool_),
        window_c=np.array([it.window for it in problems], np.int64),
        sinks_c=np.array([it.sinks for it in problems], np.int64),
        tail_c=np.array([it.tail for it in problems], np.int64),
        drop_queries=kind.drop_queries,
        pipelined=kind.pipelined,
    )
    if kind.tp:
        assert not history, "SP-TP is not simulated behind history"
        return simulate_tp(group, cases, spts)
    return simulate_ntp(group, cases, spts, history)

"""Context parallelism's rings as this engine runs them (CP Algs. 2-3): a share goes to the next
member while the one before is computed, N - 1 times.

Rows lie in zigzag, so that a member's queries see as many keys of every other's, and it has one
call of attention a round. With `ring_kv` keys and values go round, history with them where that is
less than asking for it; with `ring_q` queries do, meet all that a member holds, and outputs return
by an all-to-all in the end. A ring is exact and cut in one way, so there is one configuration.

Shape suffixes: c configurations, p parts (one per member), s senders, r receivers.

Time to the first token on a group: T_a + T'_a of CSPS §3.2.6, for many configurations.

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

from csps.configurator.pipeline.cases import LSE_BYTES, LayerCases, SimulatedGroup
from csps.configurator.pipeline.ntp import simulate_ntp
from csps.configurator.pipeline.program import Mask, Op, PipelineOutcome, Seconds
from csps.configurator.pipeline.script import AskedHistory, Script
from csps.configurator.pipeline.tp import simulate_tp
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, CsaSettings
from csps.protocols.attention.plan import Ring
from csps.protocols.core.placement import even_share


def simulate_ring(
    group: SimulatedGroup, ring: Ring, spts: Sequence[int], history: int
) -> PipelineOutcome:
    """One layer.

    Args:
        spts: tokens of each member.
        history: tokens before them, evenly over the members.
    """
    return _RingLayer(group, spts, history).run(ring)


class _RingLayer:
    def __init__(self, group: SimulatedGroup, spts: Sequence[int], history: int) -> None:
        assert len(spts) == group.members, f"{len(spts)} parts for {group.members} members"
        self._group, self._spts_p = group, np.array(spts, float)
        self._held = history / group.members
        members = group.members
        filler_crf = np.zeros((1, members, 0))
        self._script = Script(group.wiring, filler_crf, group.times.exchange)
        self._next_sr = np.roll(np.eye(members, dtype=bool), 1, axis=1)
        goes_round = history and self._kv_bytes(self._held) * members * (members - 1) < (
            (members - 1) * self._row_bytes().sum()
        )
        self._asked = AskedHistory(group, self._script, spts, 0 if goes_round else history)
        self._round_held = self._held if goes_round else 0.0
        """Of each member's history, what goes round as keys and values."""

    def run(self, ring: Ring) -> PipelineOutcome:
        """The layer."""
        script, times = self._script, self._group.times
        script.compute(times.qkv.seconds(self._spts_p)[None])
        if ring == "ring_kv":
            self._pass_kv()
        else:
            self._pass_q()
        script.compute(times.linear.seconds(self._spts_p)[None])
        return script.run(*self._group.machine())

    def _pass_kv(self) -> None:
        self._asked.ask()
        share = self._kv_bytes(self._spts_p.max() + self._round_held)
        coming = self._pass_on(share)
        self._asked.answer()
        for turn in range(self._group.members):
            if turn:
                self._script.do(Op.WAIT, coming)
                if turn < self._group.members - 1:
                    coming = self._pass_on(share)
            self._attend(turn, self._round_held)
        self._asked.merge()

    def _pass_q(self) -> None:
        members, heads = self._group.members, self._group.heads
        dim, size = self._group.shape.head_dim, self._group.itemsize
        share = self._spts_p.max() * heads * dim * size
        coming = self._pass_on(share)
        for turn in range(members):
            if turn:
                self._script.do(Op.WAIT, coming)
                if turn < members - 1:
                    coming = self._pass_on(share)
            self._attend(turn, self._held)
        # Of a member before it in the ring both chunks see keys, of one behind it the second alone.
        seen_sr = np.where(np.tri(members, k=-1, dtype=bool).T | bool(self._held), 1.0, 0.5)
        rows_sr = self._spts_p[None, :] * heads * seen_sr * ~np.eye(members, dtype=bool)
        answers = self._post(rows_sr * (dim * size + LSE_BYTES))
        self._script.do(Op.WAIT, answers)
        self._script.compute(self._group.times.merge.seconds(rows_sr.sum(axis=0))[None])

    def _pass_on(self, share: float) -> int:
        """A share of bytes to the next, from everyone at once."""
        return self._post(share * self._next_sr)

    def _post(self, bytes_sr: Seconds) -> int:
        pairs_sr: Mask = bytes_sr > 0
        return self._script.post(bytes_sr[None].astype(float), pairs_sr)

    def _attend(self, turn: int, held: float) -> None:
        """One round: rows among themselves, and all of them to so much history, merged."""
        rows_p = self._spts_p * self._group.heads
        chunk_p = self._spts_p / 2
        pairs_p = 2 * chunk_p**2  # of another member; of its own both chunks' triangles beside one
        if not turn:
            pairs_p = self._spts_p * (self._spts_p + 1) / 2
        pairs_p = pairs_p * self._group.heads + rows_p * held
        calls_p = np.full(len(rows_p), 1.0 + bool(held))
        times = self._group.times
        self._script.compute(times.attention.seconds(calls_p, rows_p, pairs_p)[None])
        self._script.compute(times.merge.seconds(rows_p)[None])

    def _kv_bytes(self, tokens: float) -> float:
        """Keys and values of so many tokens."""
        group = self._group
        return float(2 * tokens * group.kv_heads * group.shape.head_dim * group.itemsize)

    def _row_bytes(self) -> Seconds:
        """(p,) queries, and outputs and LSEs in return, of a member's rows."""
        group = self._group
        row = 2 * group.shape.head_dim * group.itemsize + LSE_BYTES
        bytes_p: Seconds = self._spts_p * group.heads * row
        return bytes_p


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
    of: Callable[[PipelineOutcome], Seconds],
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
    scoring = judges or drops
    return _LayerProblem(
        ratios=ratios,
        micro=tuple(of_layer.micro(level) for level in levels),
        judges=judges,
        same=drops and same,
        window=plan.importance_window if scoring else 1,
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
) -> PipelineOutcome:
    cases = LayerCases(
        levels=kind.levels,
        ratios_cgv=np.array([problem.ratios for problem in problems], float),
        micro_cv=np.array([problem.micro for problem in problems], np.int64),
        judges_c=np.array([problem.judges for problem in problems], np.bool_),
        same_c=np.array([problem.same for problem in problems], np.bool_),
        window_c=np.array([problem.window for problem in problems], np.int64),
        sinks_c=np.array([problem.sinks for problem in problems], np.int64),
        tail_c=np.array([problem.tail for problem in problems], np.int64),
        drop_queries=kind.drop_queries,
        pipelined=kind.pipelined,
    )
    if kind.tp:
        assert not history, "SP-TP is not simulated behind history"
        return simulate_tp(group, cases, spts)
    return simulate_ntp(group, cases, spts, history)

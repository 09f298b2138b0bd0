"""Time to first token on a group: T_a + T'_a of CSPS §3.2.6, for many configurations at once.

T_a is the sum over layers (Eq. 6); equal layers are simulated once. The model's last layer is
computed for single rows only, so it has no pipeline. T'_a = R L_in: R is the rest of every layer,
for the rows of the member that has most, while other members use their cores as well.

Rings follow Context Parallelism, Algs. 2-3: a member passes its share to the next member while it
computes the one before, N - 1 times. Rows lie in zigzag, so a member's queries attend to as many
keys of each other member, in one call of attention per round. With `ring_kv` keys and values
circulate, together with history where that is less than querying it. With `ring_q` queries
circulate, and outputs return by an all-to-all at the end.

Shape suffixes: c configurations, p parts (one per member), s senders, r receivers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.pipeline.cases import (
    LSE_BYTES,
    LayerCases,
    SimulatedGroup,
    pairs_in_window,
)
from csps.configurator.pipeline.ntp import simulate_ntp
from csps.configurator.pipeline.program import Mask, Op, PipelineOutcome, Seconds
from csps.configurator.pipeline.script import Script, SimulatedHistory
from csps.configurator.pipeline.tp import simulate_tp
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, CsaSettings
from csps.protocols.attention.plan import Ring
from csps.protocols.core.placement import even_share


def simulate_ring(
    group: SimulatedGroup, ring: Ring, spts: Sequence[int], history: int
) -> PipelineOutcome:
    """Simulate one layer; a ring is exact and cut in one way, so there is one configuration.

    Args:
        spts: tokens of each member.
        history: tokens before them, evenly over the members.
    """
    return _RingLayer(group, spts, history).run(ring)


class _RingLayer:
    def __init__(self, group: SimulatedGroup, spts: Sequence[int], history: int) -> None:
        assert len(spts) == group.members, f"{len(spts)} parts for {group.members} members"
        self._group, self._spts_p = group, np.array(spts, float)
        self._history = history / group.members
        members = group.members
        filler_crf = np.zeros((1, members, 0))
        self._script = Script(group.wiring, filler_crf, group.times.exchange)
        self._next_sr = np.roll(np.eye(members, dtype=bool), 1, axis=1)
        circulates = history and self._kv_bytes(self._history) * members * (members - 1) < (
            (members - 1) * self._row_bytes().sum()
        )
        self._asked = SimulatedHistory(group, self._script, spts, 0 if circulates else history)
        self._circulating = self._history if circulates else 0.0
        """Tokens of each member's history whose keys and values circulate."""

    def run(self, ring: Ring) -> PipelineOutcome:
        """Simulate the layer."""
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
        share = self._kv_bytes(self._spts_p.max() + self._circulating)
        coming = self._pass_on(share)
        self._asked.answer()
        for hop in range(self._group.members):
            if hop:
                self._script.do(Op.WAIT, coming)
                if hop < self._group.members - 1:
                    coming = self._pass_on(share)
            self._attend(hop, self._circulating)
        self._asked.merge()

    def _pass_q(self) -> None:
        members, heads = self._group.members, self._group.heads
        dim, size = self._group.shape.head_dim, self._group.itemsize
        share = self._spts_p.max() * heads * dim * size
        coming = self._pass_on(share)
        for hop in range(members):
            if hop:
                self._script.do(Op.WAIT, coming)
                if hop < members - 1:
                    coming = self._pass_on(share)
            self._attend(hop, self._history)
        # Both chunks of a member before it in the ring attend to keys, but only the second chunk of
        # a member behind it.
        seen_sr = np.where(np.tri(members, k=-1, dtype=bool).T | bool(self._history), 1.0, 0.5)
        rows_sr = self._spts_p[None, :] * heads * seen_sr * ~np.eye(members, dtype=bool)
        answers = self._post(rows_sr * (dim * size + LSE_BYTES))
        self._script.do(Op.WAIT, answers)
        self._script.compute(self._group.times.merge.seconds(rows_sr.sum(axis=0))[None])

    def _pass_on(self, share: float) -> int:
        """Send a share of bytes to the next member, from all members at once."""
        return self._post(share * self._next_sr)

    def _post(self, bytes_sr: Seconds) -> int:
        pairs_sr: Mask = bytes_sr > 0
        return self._script.post(bytes_sr[None].astype(float), pairs_sr)

    def _attend(self, hop: int, history: float) -> None:
        """Compute and merge one round: rows among themselves, and all rows with history."""
        rows_p = self._spts_p * self._group.heads
        chunk_p = self._spts_p / 2
        pairs_p = 2 * chunk_p**2
        if not hop:  # own rows: the triangles of both chunks, and one chunk with the other
            pairs_p = self._spts_p * (self._spts_p + 1) / 2
        pairs_p = pairs_p * self._group.heads + rows_p * history
        calls_p = np.full(len(rows_p), 1.0 + bool(history))
        times = self._group.times
        self._script.compute(times.attention.seconds(calls_p, rows_p, pairs_p)[None])
        self._script.compute(times.merge.seconds(rows_p)[None])

    def _kv_bytes(self, tokens: float) -> float:
        """Return the bytes of the keys and values of so many tokens."""
        group = self._group
        return float(2 * tokens * group.kv_heads * group.shape.head_dim * group.itemsize)

    def _row_bytes(self) -> Seconds:
        """Return (p,) bytes of a member's queries, and of outputs and LSEs in return."""
        group = self._group
        row = 2 * group.shape.head_dim * group.itemsize + LSE_BYTES
        bytes_p: Seconds = self._spts_p * group.heads * row
        return bytes_p


def simulate_window(
    group: SimulatedGroup, spts: Sequence[int], history: int = 0
) -> PipelineOutcome:
    """Simulate a layer with a sliding window whose members have own rows, one after the other.

    Args:
        spts: tokens of each member.
        history: tokens before them, as if they were the first member's: few windows reach them.
    """
    window, times = group.shape.window, group.times
    assert window is not None, "no layer has a window"
    spts_p, members = np.array(spts), group.members
    starts_p = history + np.cumsum(spts_p) - spts_p
    held = np.append(starts_p, history + spts_p.sum())
    held[0] = 0
    first_r = np.maximum(starts_p - window + 1, 0)
    stop_sr = np.minimum(held[1:, None], starts_p[None, :])
    tokens_sr = np.maximum(stop_sr - np.maximum(held[:-1, None], first_r[None, :]), 0)
    tokens_sr[np.diag_indices(members)] = 0
    row = 2 * group.kv_heads * group.shape.head_dim * group.itemsize
    bytes_csr = (tokens_sr * float(row))[None]
    script = Script(group.wiring, np.zeros((1, members, 0)), times.exchange)
    script.compute(times.qkv.seconds(spts_p.astype(float))[None])
    if tokens_sr.any():
        script.compute(times.copy.seconds(bytes_csr.sum(axis=2)))
        script.do(Op.BLOCK, script.post(bytes_csr, tokens_sr > 0))
    total = int(history + spts_p.sum())
    pairs_p = (pairs_in_window(starts_p, spts_p, total, window) * group.heads).astype(float)
    rows_p = (spts_p * group.heads).astype(float)
    script.compute(times.attention.seconds(np.ones(members), rows_p, pairs_p)[None])
    script.compute(times.linear.seconds(spts_p.astype(float))[None])
    return script.run(*group.machine())


WHOLE = CsaSettings(levels=1, pipelined=False, strategy="ntp")
"""Exact SP-NTP without micro-partitions."""


class _Kind(NamedTuple):
    """Kind of layers; layers of one kind share a program."""

    tp: bool
    levels: int
    drop_queries: bool
    pipelined: bool
    scores_itself: bool
    """True in SP-TP if the layer scores its own importance, which changes the order of steps."""
    seen: int | None = None
    """Positions that a token sees in a layer with a sliding window; None for all."""


class _LayerProblem(NamedTuple):
    """Properties, besides its kind, on which a layer's time depends."""

    ratios: tuple[tuple[float, ...], ...]
    """Drop ratios as [KV head][level - 1]."""
    micro: tuple[int, ...]
    scores: bool
    same: bool
    window: int
    sinks: int
    tail: int


def can_simulate(settings: CsaSettings) -> bool:
    """Return False for nested levels and for scoring by all queries, which exist for comparison."""
    return not settings.nested and (settings.importance_window != ALL_QUERIES or settings.lossless)


def prefill_seconds(
    group: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int, history: int = 0
) -> Seconds:
    """Return (c,) T_a + T'_a of a prompt that is cut evenly over the group.

    Args:
        configurations: configurations with a strategy; exact SP-NTP is one level, not pipelined.
        tokens: tokens of the prompt, at least one for each member.
        history: tokens before them, evenly over the group; SP-NTP only.
    """
    seconds: Seconds = attention_seconds(group, configurations, tokens, history)
    return seconds + _rest(group, tokens)


def ring_seconds(group: SimulatedGroup, ring: Ring, tokens: int, history: int = 0) -> float:
    """Return T_a + T'_a with a ring. Arguments as in `prefill_seconds`.

    In layers with a window, rows are taken for contiguous, and not for zigzag.
    """
    spts, layers = _spts(group, tokens), range(group.shape.layers - 1)
    near = len(group.shape.windowed.intersection(layers))
    seconds = (len(layers) - near) * simulate_ring(group, ring, spts, history).makespan_c[0]
    if near:
        seconds += near * simulate_window(group, spts, history).makespan_c[0]
    return float(seconds + _rest(group, tokens))


def _rest(group: SimulatedGroup, tokens: int) -> float:
    """Return T'_a."""
    longest = np.array(max(_spts(group, tokens)), float)
    times, layers = group.times, group.shape.layers
    rest = layers * times.rest.seconds(longest) + times.qkv.seconds(longest)
    return float((rest + times.step.fixed) * group.slowed)


def attention_seconds(
    group: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int, history: int = 0
) -> Seconds:
    """Return (c,) T_a, the time of all layers but the last."""
    return _over_layers(group, configurations, tokens, lambda outcome: outcome.makespan_c, history)


def work_seconds(
    group: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int
) -> Seconds:
    """Return (c,) core seconds of a prompt on all simulated ranks together.

    Threads beside those that compute are not counted. Arguments as in `prefill_seconds`.
    """
    spts, times = np.array(_spts(group, tokens), float), group.times
    rest = group.shape.layers * times.rest.seconds(spts) + times.qkv.seconds(spts)
    rest = rest + times.step.fixed
    attention_c = _over_layers(group, configurations, tokens, lambda outcome: outcome.work_c)
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
        assert can_simulate(settings), f"cannot be simulated: {settings}"
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
    """Count the layers of a configuration but the last, by what their times depend on."""
    tp = settings.strategy in ("tp", "tp_flat")
    plan = settings.for_group(
        group.locations, layers=group.shape.layers, longest_spt=longest_spt, every_query=tp
    )
    whole = plan
    if group.shape.windowed and not tp:
        # With own rows, layers with a window are computed alike by all configurations.
        whole = WHOLE.for_group(group.locations, layers=group.shape.layers, longest_spt=longest_spt)
    found: Counter[tuple[_Kind, _LayerProblem]] = Counter()
    for layer in range(group.shape.layers - 1):
        seen = group.shape.window_of(layer)
        of_layer = plan if seen is None else whole
        problem = _problem(group, of_layer, layer)
        kind = _Kind(
            tp=tp,
            levels=of_layer.levels,
            drop_queries=of_layer.drop_queries,
            pipelined=of_layer.pipelined,
            scores_itself=tp and problem.same,
            seen=seen,
        )
        found[kind, problem] += 1
    return found


def _problem(group: SimulatedGroup, plan: CsaPlan, layer: int) -> _LayerProblem:
    shape = group.shape
    of_layer, same = plan.layer_group(layer), plan.importance_layer == "same"
    drops = _drops(shape, plan, layer)
    near = layer in shape.windowed
    scores = not (same or near) and _drops(shape, plan, shape.after(layer))
    levels = range(1, plan.levels + 1)
    ratios = tuple(
        tuple(of_layer.drop_ratio(level, head) if drops else 0.0 for level in levels)
        for head in range(group.kv_heads)
    )
    scoring = scores or drops
    return _LayerProblem(
        ratios=ratios,
        micro=tuple(of_layer.micro(level) for level in levels),
        scores=scores,
        same=drops and same,
        window=plan.importance_window if scoring else 1,
        sinks=plan.sinks if drops else 0,
        tail=plan.tail if drops else 0,
    )


def _drops(shape: AttentionShape, plan: CsaPlan, layer: int) -> bool:
    """Return True if a layer drops."""
    return shape.may_drop(layer) and plan.layer_group(layer).drops


def _simulated(
    group: SimulatedGroup,
    kind: _Kind,
    problems: Sequence[_LayerProblem],
    spts: Sequence[int],
    history: int,
) -> PipelineOutcome:
    if kind.seen is not None and not kind.tp:
        assert len(problems) == 1, f"{len(problems)} kinds of layers with a window"
        return simulate_window(group, spts, history)
    cases = LayerCases(
        levels=kind.levels,
        ratios_cgv=np.array([problem.ratios for problem in problems], float),
        micro_cv=np.array([problem.micro for problem in problems], np.int64),
        scores_c=np.array([problem.scores for problem in problems], np.bool_),
        same_c=np.array([problem.same for problem in problems], np.bool_),
        window_c=np.array([problem.window for problem in problems], np.int64),
        sinks_c=np.array([problem.sinks for problem in problems], np.int64),
        tail_c=np.array([problem.tail for problem in problems], np.int64),
        seen=kind.seen,
        drop_queries=kind.drop_queries,
        pipelined=kind.pipelined,
    )
    if kind.tp:
        assert not history, f"SP-TP cannot be simulated with history, got {history} tokens"
        return simulate_tp(group, cases, spts)
    return simulate_ntp(group, cases, spts, history)

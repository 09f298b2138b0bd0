"""Every prompt in chunks, each on a group of its own size: Tetris.

A request gets its plan as it arrives, on the times at which instances will be free: a chunk is
given to them while they are still busy, and runs when its turn comes. Chunks whose turn is far off
are planned again when reality differs from what was predicted. Strictly first come, first
served: when the oldest finds no slots, all wait. A prompt's KV goes to the one decode instance that
has most free slots for each request that it decodes (§5.2), or to several if none has room for all
of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from csps.services.scheduling.commands import RunStep, Share
from csps.services.scheduling.cost import StepTimes
from csps.services.scheduling.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    Replan,
    StartPlan,
    Trial,
)
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, DecodeOverlay, Placed
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay
from csps.services.scheduling.policies.reuse import NOTHING
from csps.services.scheduling.policies.tetris.balance import balanced
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, Chunk, group_sizes
from csps.services.scheduling.policies.tetris.options import TetrisOptions
from csps.services.scheduling.policies.tetris.replanning import (
    Computed,
    differs,
    held_commands,
    in_line,
    plan_of,
)
from csps.services.scheduling.ring_rows import in_layout
from csps.services.scheduling.shares import bounds_of, level_shares
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import (
    CachedView,
    CostView,
    PairView,
    PlannedView,
    RequestView,
    View,
)


class Tetris:
    """The policy of this module's description."""

    name = "tetris"
    whole_prompts = False
    regroups = False

    def __init__(
        self, options: TetrisOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or TetrisOptions(), decode or DecodeOptions()

    def line(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Line:
        """Nobody is urgent."""
        return "long"

    def decide(self, view: View) -> Sequence[Decision]:
        """Start the oldest requests until one has to wait."""
        rate = self._rate(view.rate_30s())
        pairs = [
            _Pair(pair, view.now_ns, rate, self.options, self.decode_options) for pair in view.pairs
        ]
        decisions: list[Decision] = []
        if view.planned:
            for pair in pairs:
                decisions += pair.replan(view)
        for request in view.waiting("long"):
            plan = next((it for pair in pairs if (it := pair.start(request, view))), None)
            if plan is None:
                decisions.append(Blocked(request=request.id))
                break
            decisions.append(plan)
        return decisions

    def trial(self, pair: PairView) -> Trial:
        """On idle gangs."""
        return _Trial(_Pair(pair, 0, 0.0, self.options, self.decode_options))

    def _rate(self, requests: int) -> float:
        rate = self.options.improvement_rate
        return self.options.rates.at(requests) if isinstance(rate, str) else rate


class _Work(NamedTuple):
    """How a prompt could be computed."""

    cached: CachedView
    held: list[int]
    """Numbers of those who have it."""
    chunks: list[Chunk]
    shares: list[list[int]]
    """Tokens of each member of each chunk."""

    @property
    def ends_ns(self) -> int:
        """When all is computed, from now on."""
        return self.chunks[-1].end_ns


class _Trial:
    def __init__(self, pair: _Pair) -> None:
        self._pair = pair

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """On all instances together."""
        return self._pair.fits(prompt_tokens, output_tokens)


class _Pair:
    """A pair of gangs in a round."""

    def __init__(
        self,
        pair: PairView,
        now_ns: int,
        rate: float,
        options: TetrisOptions,
        decode: DecodeOptions,
    ) -> None:
        self._now_ns, self._rate, self._options = now_ns, rate, options
        self._max_positions, self._tp = pair.max_positions, pair.prefill.tp
        self._gang, self._decoding = pair.prefill.id, pair.decode.id
        self._prefill = PrefillOverlay(pair.prefill, now_ns)
        self._decode = DecodeOverlay(pair.decode, decode)
        self._spots = sorted(self._prefill.spots, key=lambda it: it.order)
        """Server by server, as `Cdsp` numbers them."""
        by_server = groupby(self._spots, key=lambda it: it.place.server_id)
        self._servers = tuple([sum(1 for _ in spots) for _, spots in by_server])

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether there are slots enough, on whichever instances."""
        free = sum(it.free for it in self._spots)
        return prompt_tokens <= free and self._decode.has_room(prompt_tokens, output_tokens)

    def start(self, request: RequestView, view: View) -> StartPlan | None:
        """Plan the request; None if there are not slots enough."""
        cost = view.cost
        prompt, output = request.prompt_tokens, request.output_tokens
        if prompt + output > self._max_positions or not self.fits(prompt, output):
            return None
        placed = self._place(prompt, output, view.cached(request, self._decoding))
        if placed is None:
            return None
        work = self._work(prompt, NOTHING, cost)
        assert work is not None, "there was room"
        cached = view.cached(request, self._gang)
        rest = self._work(prompt, cached, cost) if cached else None
        if rest is not None and rest.ends_ns <= work.ends_ns:
            work = rest
        return self._plan(request, work, placed, cost)

    def _work(self, prompt: int, cached: CachedView, cost: CostView) -> _Work | None:
        """Chunks of what follows upon KV that was kept, which stays where it lies and whose holders
        are in every group; None if there are not slots enough."""
        cdsp = self._cdsp(cost)
        free_ns = [it.free_at_ns - self._now_ns for it in self._spots]
        slots = [it.free - cached.taken.get(it.id, 0) for it in self._spots]
        holders = {it.instance for it in cached.shares}
        held = [number for number, it in enumerate(self._spots) if it.id in holders]
        if min(slots) < 0:
            return None
        for least in cdsp.sizes:  # more instances have more slots
            if least < len(held):
                continue
            chunks = cdsp.plan(
                prompt - cached.tokens,
                free_ns,
                self._rate,
                least=least,
                past=cached.tokens,
                held=held,
            )
            if (shares := _shares(chunks, slots)) is not None:
                return _Work(cached, held, chunks, shares)
        return None

    def _place(self, prompt: int, output: int, kept: CachedView | None) -> Placed | None:
        """On one instance, if any has room; what was kept there stays where it is."""
        if kept is None and (whole := self._decode.place_whole(prompt, output)):
            return whole
        return self._decode.place_behind(kept, prompt, output)

    def _cdsp(self, cost: CostView) -> Cdsp:
        sizes = group_sizes(len(self._spots))
        costs = tuple([(size, cost.exact(size, self._tp)) for size in sizes])
        return _planner(self._servers, costs, self._options.min_chunk, self._options.chunked)

    def _plan(self, request: RequestView, work: _Work, placed: Placed, cost: CostView) -> StartPlan:
        steps = self._steps(request, work, cost)
        self._decode.take(placed, request.output_tokens)
        decode = (DecodePlacement(request.id, placed.shares, placed.master),)
        return StartPlan(steps=steps, decode=decode, ahead_ns=self._options.ahead_ns)

    def _steps(self, request: RequestView, work: _Work, cost: CostView) -> tuple[PlannedStep, ...]:
        """Chunks as steps, in the line of their instances."""
        steps = []
        holding = dict.fromkeys(work.held, 0)
        for it in self._spots:
            it.free -= work.cached.taken.get(it.id, 0)
        for chunk, parts in zip(work.chunks, work.shares, strict=True):
            computing = zip(chunk.members, parts, strict=True)
            # Who has no slots left takes part if it holds history.
            used = {it: part for it, part in computing if part or it in holding}
            steps.append(self._step(request, chunk, used, cost))
            holding |= used
        return self._balanced(steps, work.cached.shares)

    def _balanced(
        self, steps: Sequence[PlannedStep], kept: tuple[Share, ...]
    ) -> tuple[PlannedStep, ...]:
        """With history even over each chunk's group, as far as slots allow."""
        if len(steps) == 1 and all(it.origin for it in kept):
            return tuple(steps)
        free = {it.id: it.free for it in self._spots}
        moving = tuple(balanced(steps, kept, free))
        for spot in self._spots:
            spot.free = free[spot.id]
        return moving

    # --- planning again --------------------------------------------------------------------

    def replan(self, view: View) -> Iterator[Replan]:
        """Plans whose end is not what it was to be are made again for what no rank has heard of,
        the oldest first: each on the times at which instances are free of those before it."""
        numbers = {it.id: number for number, it in enumerate(self._spots)}
        for spot in self._spots:
            sent = [it.end_ns for it in spot.view.steps.values() if not it.held]
            spot.free_at_ns = max([self._now_ns, *sent])
        for sequence in view.planned:
            held = held_commands(sequence)
            if held[0].group[0] not in numbers:
                continue  # of another gang
            ends_ns = in_line(sequence, numbers, [it.free_at_ns for it in self._spots])
            if differs(sequence, ends_ns[-1], self._options.replan_share):
                steps = self._better(sequence, held[0], ends_ns[-1], view.cost)
                yield Replan(sequence=sequence.id, version=plan_of(sequence).version, steps=steps)
                if steps:
                    continue
            for command, end_ns in zip(held, ends_ns, strict=True):
                for it in command.group:
                    self._spots[numbers[it]].free_at_ns = end_ns

    def _better(
        self, sequence: PlannedView, first: RunStep, end_ns: int, cost: CostView
    ) -> tuple[PlannedStep, ...]:
        """Other chunks from the first that no rank has heard of. None if they do not improve the
        time that is left by as much as a larger group would have to, because others pay for it; or
        have no slots beside the old ones."""
        computed = Computed(first.pieces[0].start, first.history[0])
        work = self._work(sequence.request.prompt_tokens, computed, cost)
        left_ns = end_ns - self._now_ns
        if work is None or work.ends_ns >= left_ns * (1 - self._rate):
            return ()
        return self._steps(sequence.request, work, cost)

    def _step(
        self, request: RequestView, chunk: Chunk, used: Mapping[int, int], cost: CostView
    ) -> PlannedStep:
        """A step of a chunk.

        Args:
            used: tokens that each of its members computes.
        """
        group, tokens = [self._spots[it] for it in used], list(used.values())
        choice = cost.best(request.cls, self._prefill.shape(group), chunk.start, chunk.length)
        self._prefill.start_long(request, group, tokens, choice.time_ns)
        step = PlannedStep(
            group=tuple([it.id for it in group]),
            bounds=bounds_of(tokens),
            pieces=(PlannedPiece(request.id, chunk.start, chunk.length),),
            strategy=choice.strategy,
            predicted_ns=choice.time_ns,
        )
        return in_layout(step, self._options.layout)


def _shares(chunks: Sequence[Chunk], slots: Sequence[int]) -> list[list[int]] | None:
    """Tokens of each member of each chunk, as even as slots allow; None if they do not."""
    free, shares = list(slots), []
    for chunk in chunks:
        parts = level_shares(chunk.length, [free[it] for it in chunk.members])
        if parts is None:
            return None
        for member, part in zip(chunk.members, parts, strict=True):
            free[member] -= part
        shares.append(parts)
    return shares


@lru_cache(maxsize=8)
def _planner(
    servers: tuple[int, ...],
    costs: tuple[tuple[int, StepTimes], ...],
    min_chunk: int,
    chunked: bool,
) -> Cdsp:
    """Worked out once for a gang and its latencies."""
    return Cdsp(servers, dict(costs), min_chunk=min_chunk, chunked=chunked)

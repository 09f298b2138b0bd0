"""Policies that decide what a test tells them, and one that moves KV once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from csps.protocols.core.placement import KvSlice
from csps.services.scheduling.deciding.decisions import (
    Decision,
    DecodePlacement,
    MovePlan,
    PlannedChunk,
    PlannedStep,
    SchedulerView,
    StartPlan,
)
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import GangPair


class Scripted:
    """Policy that decides what it is given, once."""

    name = "scripted"
    whole_prompts = True
    regroups = False

    def __init__(self, *decisions: Decision) -> None:
        self.decisions: Sequence[Decision] = decisions
        self._real = make_policy("csps")

    def priority(self, prompt_tokens: int, pairs: object) -> str:
        return "low"

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        decisions, self.decisions = self.decisions, ()
        return decisions

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        return self._real.fits(pair, prompt_tokens, output_tokens)


class OneMove:
    """Policy that decodes the first request on instances 0 and 1 of three, and moves it to 1 and 2
    when another one waits."""

    name = "one_move"
    whole_prompts = False
    regroups = False

    def __init__(self) -> None:
        self._started = self._moved = False

    def priority(self, prompt_tokens: int, pairs: object) -> str:
        return "low"

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        return True

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        return list(self._move(view) if self._started else self._start(view))

    def _start(self, view: SchedulerView) -> Iterator[Decision]:
        first, second, _ = [instance.id for instance in view.pairs[0].decode.instances]
        for request in islice(view.waiting("low"), 1):
            self._started = True
            length, half = request.prompt_tokens, request.prompt_tokens // 2
            step = PlannedStep(
                group=(first, second),
                bounds=(0, half, length),
                chunks=(PlannedChunk(request.id, 0, length),),
                strategy="ulysses",
                predicted_ns=1_000_000,
            )
            slices = (KvSlice(first, 0, half), KvSlice(second, half, length))
            answer = (KvSlice(first, length, length + request.output_tokens),)
            yield StartPlan(
                steps=(step,), decode=(DecodePlacement(request.id, slices, first, answer),)
            )

    def _move(self, view: SchedulerView) -> Iterator[Decision]:
        gang = view.pairs[0].decode
        _, second, third = [instance.id for instance in gang.instances]
        for sequence in gang.decoding.values():
            if sequence.joined_ns is None or self._moved:
                continue
            self._moved = True
            start, stop = sequence.answer_span
            slices, answer = (KvSlice(second, 0, start),), (KvSlice(third, start, stop),)
            placement = DecodePlacement(sequence.request_id, slices, third, answer)
            yield MovePlan(sequence_id=sequence.id, placement=placement)

"""A policy that moves the KV of what is decoded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import (
    Decision,
    DecodePlacement,
    Move,
    PlannedPiece,
    PlannedStep,
    StartPlan,
    Trial,
)
from csps.services.scheduling.view import PairView, View


class OneMove:
    """The first request is decoded by instances 0 and 1 of three, and goes on on 1 and 2 when
    another one waits."""

    name = "one_move"
    whole_prompts = False
    regroups = False

    def __init__(self) -> None:
        self._started = self._moved = False

    def line(self, prompt_tokens: int, pairs: object) -> str:
        return "long"

    def trial(self, pair: PairView) -> Trial:
        return self

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        return True

    def decide(self, view: View) -> Sequence[Decision]:
        return list(self._move(view) if self._started else self._start(view))

    def _start(self, view: View) -> Iterator[Decision]:
        first, second, _ = [it.id for it in view.pairs[0].decode.instances]
        for it in islice(view.waiting("long"), 1):
            self._started = True
            length, half = it.prompt_tokens, it.prompt_tokens // 2
            step = PlannedStep(
                group=(first, second),
                bounds=(0, half, length),
                pieces=(PlannedPiece(it.id, 0, length),),
                strategy="ulysses",
                predicted_ns=1_000_000,
            )
            shares = (Share(first, 0, half), Share(second, half, length))
            answer = (Share(first, length, length + it.output_tokens),)
            yield StartPlan(steps=(step,), decode=(DecodePlacement(it.id, shares, first, answer),))

    def _move(self, view: View) -> Iterator[Decision]:
        gang = view.pairs[0].decode
        _, second, third = [it.id for it in gang.instances]
        for it in gang.decoding.values():
            if it.joined_ns is None or self._moved:
                continue
            self._moved = True
            start, stop = it.answer_span
            shares, answer = (Share(second, 0, start),), (Share(third, start, stop),)
            placement = DecodePlacement(it.request_id, shares, third, answer)
            yield Move(sequence=it.id, placement=placement)

"""A policy that does as it is told."""

from __future__ import annotations

from collections.abc import Sequence

from csps.services.scheduling.decisions import Decision, Trial
from csps.services.scheduling.policies.choice import make_policy
from csps.services.scheduling.view import PairView, View


class Scripted:
    """A policy that decides what it is told, once."""

    name = "scripted"
    whole_prompts = True
    regroups = False

    def __init__(self, *decisions: Decision) -> None:
        self.decisions: Sequence[Decision] = decisions
        self._real = make_policy("csps")

    def line(self, prompt_tokens: int, pairs: object) -> str:
        return "long"

    def decide(self, view: View) -> Sequence[Decision]:
        decisions, self.decisions = self.decisions, ()
        return decisions

    def trial(self, pair: PairView) -> Trial:
        return self._real.trial(pair)

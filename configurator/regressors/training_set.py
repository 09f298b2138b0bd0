"""What the regressors of objectives 1 and 2 learn from: answers of the search (CSPS App. B).

Configurations of a group and a length are simulated once, and then judged by every bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from csps.configurator.bound_buckets import LOSSES, objectives
from csps.configurator.enumeration import Loss, Space
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE
from csps.configurator.regressors.direct import DirectSample, sample_of
from csps.configurator.search import Found, Question, admissible, chosen, compared
from csps.protocols.plans import Objective, ObjectiveKind


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """All that is worth comparing for a prompt on a group."""

    group: SimulatedGroup
    tokens: int
    found: Sequence[Found]

    @property
    def exact_seconds(self) -> float:
        """Of exact SP-NTP that is not cut."""
        return next(it.seconds for it in self.found if it.settings == WHOLE)


def simulated(group: SimulatedGroup, tokens: int, space: Space, loss: Loss) -> Simulated:
    """Whatever loses no more than the widest bound."""
    widest = Objective(max_accuracy_loss=LOSSES[-1])
    question = Question(group=group, tokens=tokens, objective=widest)
    found = compared(question, admissible(question, space, loss), loss)
    return Simulated(group=group, tokens=tokens, found=found)


def direct_samples(
    prompts: Iterable[Simulated], kind: ObjectiveKind, space: Space
) -> list[DirectSample]:
    """The best of every prompt within every bound; what cannot be kept teaches nothing."""
    samples = []
    for prompt in prompts:
        for objective in objectives(kind, prompt.exact_seconds):
            question = Question(group=prompt.group, tokens=prompt.tokens, objective=objective)
            answer = chosen(question, prompt.found)
            if answer.met:
                sample = sample_of(question, answer.best, prompt.exact_seconds, space.groups)
                samples.append(sample)
    return samples

"""Questions put to a model in this process, which computes each haystack once.

With kind ``single`` the needles not asked for are dropped from the KV that the question sees, so it
finds one needle only, however many questions share the haystack.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from csps.models.needle_prompts.questions import Question
from csps.services.evaluation.cases import Case
from csps.services.evaluation.local_model import Context, LocalModel, Span


class Read(NamedTuple):
    """A question, and the computed text that it is put to."""

    question: Question
    context: Context
    needles: list[Span]
    """Where the haystack's needles lie in the context."""
    cue: str
    """What is still to be computed before the answer."""


class LocalAnswerer:
    """Computes each question behind the KV of its haystack, as if no other had been asked."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model

    def answers(self, case: Case) -> list[str]:
        """The replies, in the order of the questions."""
        replies: list[str] = []
        for question, context, needles, cue in read(self.model, case):
            seen = context
            if question.kind == "single" and len(needles) > 1:
                seen = context.without(
                    span for i, span in enumerate(needles) if i not in question.needles
                )
            replies.append(self.model.answer(seen, cue))
        return replies


def read(model: LocalModel, case: Case) -> Iterator[Read]:
    """Compute the haystack, anew for each question that stands before it."""

    @cache
    def computed(before: str) -> tuple[Context, list[Span]]:
        text = before + case.haystack.text
        shift = len(before)
        spans = [
            (shift + needle.chars[0], shift + needle.chars[1]) for needle in case.haystack.needles
        ]
        return model.read(text), model.tokens_of(text, spans)

    for question in case.questions:
        before, cue = question.around(case.order)
        yield Read(question, *computed(before), cue)
        if before:
            computed.cache_clear()

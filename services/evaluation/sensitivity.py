"""Whether answers come from the needles: accuracy with tokens dropped from the KV.

Dropping the needle makes a model fail that reads it, dropping as much (or much more) filler does
not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol

from csps.models.needle_prompts.questions import Question, is_correct
from csps.models.needle_prompts.words import Count
from csps.services.evaluation.cases import Case, Evaluation, cases
from csps.services.evaluation.local_answerer import read
from csps.services.evaluation.local_model import LocalModel, Span


class Dropped(Protocol):
    """Which token spans to drop for a question, of a haystack of ``size`` tokens."""

    def __call__(self, needles: Sequence[Span], question: Question, size: int) -> list[Span]: ...


def _drop_nothing(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    return []


def _drop_needles(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    return [needles[index] for index in question.needles]


def _drop_as_much_filler(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    dropped = sum(end - start for start, end in _drop_needles(needles, question, size))
    return _random_filler(needles, question, size, dropped)


def _drop_half_the_filler(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    return _random_filler(needles, question, size, size // 2)


def _random_filler(
    needles: Sequence[Span], question: Question, size: int, count: int
) -> list[Span]:
    """Single tokens outside all needles; the first token stays, as an attention sink."""
    facts = {token for start, end in needles for token in range(start, end)}
    filler = [token for token in range(1, size) if token not in facts]
    rng = random.Random(f"{question.text}/{size}")
    return [(token, token + 1) for token in rng.sample(filler, min(count, len(filler)))]


DROPS: dict[str, Dropped] = {
    "nothing": _drop_nothing,
    "needle": _drop_needles,
    "as much filler": _drop_as_much_filler,
    "half the filler": _drop_half_the_filler,
}


def sensitivity(
    evaluation: Evaluation,
    model: LocalModel,
    report: Callable[[str], None] = lambda line: None,
    count: Count | None = None,
) -> dict[str, dict[str, float]]:
    """Accuracy on ``multi_key`` by what is dropped and by length."""
    table: dict[str, dict[str, float]] = {name: {} for name in DROPS}
    for length in evaluation.lengths:
        asked = list(cases(evaluation, "multi_key", length, count))
        replies = [_with_drops(model, case) for case in asked]
        for name, row in table.items():
            row[str(length)] = round(fmean(right for each in replies for right in each[name]), 4)
            report(f"dropping {name:>15}, {length:>6} tokens: {row[str(length)]:7.2%}")
    return table


def _with_drops(model: LocalModel, case: Case) -> dict[str, list[bool]]:
    """Right or wrong for each question of a haystack, by what is dropped."""
    right: dict[str, list[bool]] = {name: [] for name in DROPS}
    for question, context, needles, cue in read(model, case):
        for name, choose in DROPS.items():
            seen = context.without(choose(needles, question, len(context.keys[0])))
            right[name].append(is_correct(question.answer, model.answer(seen, cue)))
    return right

"""Score answers by length and depth, and measure if they come from the needles.

`sensitivity` drops tokens from the KV. A model that reads the needle fails without it; it does not
fail without as much, or much more, filler.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

from csps.configurator.regressors.samples import wilson
from csps.models.needle_prompts.haystack import Kind, Question, is_correct
from csps.models.needle_prompts.words import Count
from csps.services.evaluation.answerers import read
from csps.services.evaluation.cases import Case, Evaluation, cases
from csps.services.evaluation.local_model import LocalModel, Span


class QuestionAnswerer(Protocol):
    """A model that answers questions to a haystack, each on its own."""

    def answers(self, case: Case) -> list[str]:
        """Return the replies, in the order of the questions."""
        ...


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One question with its reply."""

    kind: Kind
    length: int
    depth: float
    """Depth of the first needle asked for."""
    expected: str
    reply: str

    @property
    def correct(self) -> bool:
        """True if the reply has the same words as expected, and no others."""
        return is_correct(self.expected, self.reply)


def evaluate(
    evaluation: Evaluation,
    answerers: Mapping[str, QuestionAnswerer],
    report: Callable[[str], None] = lambda line: None,
    count: Count | None = None,
) -> dict[str, list[Answered]]:
    """Put all questions to each answerer, side by side.

    Args:
        answerers: answerers by the name of their lines and results.
        report: called with a line for each kind, length and answerer.
        count: counts tokens, if a word is not one.
    """
    results: dict[str, list[Answered]] = {name: [] for name in answerers}
    for kind in evaluation.kinds:
        for length in evaluation.lengths:
            asked = list(cases(evaluation, kind, length, count))
            for name, answerer in answerers.items():
                start = time.monotonic()
                cell = list(_answered(asked, answerer))
                seconds = time.monotonic() - start
                report(f"{kind:>9} {length:>6} tokens: {in_words(cell)} ({seconds:.0f} s) {name}")
                results[name] += cell
    return results


def in_words(answered: Sequence[Answered]) -> str:
    """Return the right answers, and their fraction with its confidence interval."""
    right, questions = sum(answer.correct for answer in answered), len(answered)
    low, high = wilson(right, questions)
    fraction = f"{right / questions:.1%} [{low:.1%}, {high:.1%}]"
    return f"{right:>4} of {questions} right, {fraction:<24}"


def _answered(asked: Iterable[Case], answerer: QuestionAnswerer) -> Iterator[Answered]:
    for case in asked:
        for question, reply in zip(case.questions, answerer.answers(case), strict=True):
            yield Answered(
                kind=question.kind,
                length=case.length,
                depth=case.haystack.needles[question.needles[0]].depth,
                expected=question.answer,
                reply=reply,
            )


def accuracy(answered: Iterable[Answered]) -> float:
    """Return the fraction of right replies."""
    return fmean(answer.correct for answer in answered)


def summary(results: Sequence[Answered], depth_bins: int = 10) -> dict[str, Any]:
    """Return, by kind, accuracy by length with its confidence interval, and by length and depth."""
    kinds = dict.fromkeys(answer.kind for answer in results)
    return {
        kind: _kind_summary([answer for answer in results if answer.kind == kind], depth_bins)
        for kind in kinds
    }


def _kind_summary(results: Sequence[Answered], depth_bins: int) -> dict[str, Any]:
    by_length: dict[str, float] = {}
    interval: dict[str, list[float]] = {}
    grid: dict[str, list[float | None]] = {}
    for length in sorted({answer.length for answer in results}):
        row = [answer for answer in results if answer.length == length]
        by_length[str(length)] = round(accuracy(row), 4)
        ends = wilson(sum(answer.correct for answer in row), len(row))
        interval[str(length)] = [round(end, 4) for end in ends]
        bins: list[list[Answered]] = [[] for _ in range(depth_bins)]
        for answer in row:
            bins[min(int(answer.depth * depth_bins), depth_bins - 1)].append(answer)
        grid[str(length)] = [round(accuracy(cell), 4) if cell else None for cell in bins]
    wrong = [answer for answer in results if not answer.correct]
    return {
        "questions": len(results),
        "accuracy_by_length": by_length,
        "interval_by_length": interval,
        "accuracy_by_length_and_depth": grid,
        "wrong": [asdict(answer) for answer in wrong[:20]],
    }


class Dropped(Protocol):
    """Function that returns token spans to drop for a question, of a haystack of ``size``
    tokens."""

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
    """Return single tokens outside all needles; the first token stays, as an attention sink."""
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
    """Return accuracy on ``multi_key`` by what is dropped and by length."""
    table: dict[str, dict[str, float]] = {name: {} for name in DROPS}
    for length in evaluation.lengths:
        asked = list(cases(evaluation, "multi_key", length, count))
        replies = [_with_drops(model, case) for case in asked]
        for name, row in table.items():
            row[str(length)] = round(fmean(right for reply in replies for right in reply[name]), 4)
            report(f"dropping {name:>15}, {length:>6} tokens: {row[str(length)]:7.2%}")
    return table


def _with_drops(model: LocalModel, case: Case) -> dict[str, list[bool]]:
    """Return right or wrong for each question of a haystack, by what is dropped."""
    right: dict[str, list[bool]] = {name: [] for name in DROPS}
    for question, context, needles, cue in read(model, case):
        for name, choose in DROPS.items():
            seen = context.without(choose(needles, question, len(context.keys[0])))
            right[name].append(is_correct(question.answer, model.answer(seen, cue)))
    return right

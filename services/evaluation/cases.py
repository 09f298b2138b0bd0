"""Generate haystacks and questions over a grid of kinds, lengths and depths.

Long prompts are expensive, so ``share`` questions can use one haystack: it is computed once, and
each question is computed behind its KV as if it were alone. ``share = 1`` gives each question a
haystack of its own, which is how a server gets them. A question before its text changes all KV, so
nothing is shared then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from csps.models.needle_prompts.filler import filler_of
from csps.models.needle_prompts.haystack import (
    Haystack,
    Kind,
    Order,
    Question,
    ask,
    build_haystack,
    draw_facts,
)
from csps.models.needle_prompts.words import Count, count_words

DEFAULT_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
MAX_ANSWER_TOKENS = 32
"""Longest right answer."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Selection of questions, reproducible from these fields."""

    kinds: tuple[Kind, ...] = ("single", "multi_key")
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    """Tokens of a whole prompt, without special tokens."""
    questions: int = 200
    """Questions for each kind and length."""
    needles: int = 8
    """Facts in a haystack, except with kind ``single``; more if ``share`` needs more."""
    share: int = 1
    """Questions put to one haystack."""
    filler: str = "sentences"
    """Kind (`needle_prompts.filler.FILLER_KINDS`), or the path of a text file."""
    order: Order = "last"
    """Position of the question."""
    seed: int = 1
    """Seed; random numbers differ from training's, whatever its seed."""

    def __post_init__(self) -> None:
        if self.share < 1 or self.questions % self.share:
            raise ValueError(
                f"questions ({self.questions}) must be a multiple of share ({self.share})"
            )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A haystack and the questions about it."""

    length: int
    haystack: Haystack
    questions: tuple[Question, ...]
    order: Order = "last"

    def prompt(self, question: Question) -> str:
        """Return the prompt for a server."""
        before, behind = question.around(self.order)
        return before + self.haystack.text + behind


def cases(
    evaluation: Evaluation, kind: Kind, length: int, count: Count | None = None
) -> Iterator[Case]:
    """Yield haystacks with ``share`` questions each; the depths asked for cover 0 to 1 evenly.

    Without a count function a word counts as a token, which holds for generated text.
    """
    haystacks = evaluation.questions // evaluation.share
    for case_index in range(haystacks):
        rng = random.Random(f"evaluation/{evaluation.seed}/{kind}/{length}/{case_index}")
        # Haystack n has every haystacks-th depth from the n-th: together they cover all.
        depths = [
            (case_index + 0.5 + haystacks * index) / evaluation.questions
            for index in range(evaluation.share)
        ]
        yield _case(rng, evaluation, kind, length, depths, count)


def _case(
    rng: random.Random,
    evaluation: Evaluation,
    kind: Kind,
    length: int,
    depths: Sequence[float],
    count: Count | None,
) -> Case:
    share = len(depths)
    hops = share if kind == "two_hop" else 0
    fewest = {"single": share, "multi_key": share, "multi": max(share, 3), "two_hop": 2 * share}
    needles = share if kind == "single" else max(evaluation.needles, fewest[kind])
    facts = draw_facts(rng, needles, depths=depths, hops=hops)

    def asked(index: int) -> list[int]:
        if kind == "two_hop":
            return [index, share + index]
        return [(index + offset) % needles for offset in range(3 if kind == "multi" else 1)]

    def questions(haystack: Haystack) -> tuple[Question, ...]:
        return tuple(ask(haystack, kind, asked(index)) for index in range(share))

    # Questions of a kind have one length, so a draft shows how much room they need.
    draft = build_haystack(rng, 16 * (needles + 1), facts)
    size = count or count_words
    asking = max(sum(map(size, question.around(evaluation.order))) for question in questions(draft))
    haystack = build_haystack(rng, length - asking, facts, count, filler_of(evaluation.filler))
    return Case(
        length=length, haystack=haystack, questions=questions(haystack), order=evaluation.order
    )

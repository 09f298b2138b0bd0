"""What users' texts have and generated ones lack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from csps.models.needle_prompts.filler import filler_sentence
from csps.models.needle_prompts.haystack import Fact
from csps.models.needle_prompts.questions import QUESTION_HEAD
from csps.models.needle_prompts.words import ADJECTIVES, KEYS, NOUNS
from csps.tools.train_needle.batch import ASIDE, FILLER
from csps.tools.train_needle.spelling import CHARACTERS


def mention(
    rng: random.Random, words: Sequence[tuple[str, int]], share: float
) -> Iterator[tuple[str, int]]:
    """Name keys where nothing is told about them."""
    nouns = {f" {noun}" for noun in NOUNS}
    for word, told in words:
        if told == FILLER and word in nouns and rng.random() < share:
            # No filler that stands for many: a text names each key a few times.
            yield f" {rng.choice(KEYS)}", ASIDE
        else:
            yield word, told


def misspell(rng: random.Random, words: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Replace some filler words by characters: text as a user may have it."""
    share = rng.uniform(0.0, 0.3)
    for word, told in words:
        if told != FILLER or not word.startswith(" ") or rng.random() > share:
            yield word, told
            continue
        for character in " " + "".join(rng.choices(CHARACTERS[:-2], k=rng.randint(1, 8))):
            yield character, FILLER


def with_ordinary_values(rng: random.Random, facts: Sequence[Fact]) -> Iterator[Fact]:
    """Some of the values are words that otherwise occur in filler."""
    ordinary = [*NOUNS, *ADJECTIVES]
    for fact in facts:
        yield fact._replace(value=rng.choice(ordinary)) if rng.random() < 0.1 else fact


def chatter(rng: random.Random) -> str:
    """The end of a message that asks nothing."""
    kind = rng.randrange(3)
    if kind == 0:
        return ""
    if kind == 1:
        return "".join(filler_sentence(rng))
    return "".join(rng.choices(CHARACTERS, k=rng.randint(1, 20)))


def casual(rng: random.Random, text: str) -> str:
    """A question as it comes, or without its heading, on a line of its own or not."""
    question = text.removeprefix("".join(QUESTION_HEAD)).strip()
    return rng.choice((text, text, f" {question}", f"\n{question}"))

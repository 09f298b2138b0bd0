"""The fillers of training, by name: generated ones and real text of the packages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from csps.models.needle_prompts.filler import (
    Filler,
    Sentence,
    names,
    real_text,
    sentences,
    shuffled,
)
from csps.models.needle_prompts.words import split_words
from csps.tools.train_needle.texts import TrainingTexts

_ALPHABETS: Final = (
    0x3B1,
    0x430,
    0x561,
    0x5D0,
    0x628,
    0x905,
    0xE01,
    0x10D0,
    0x3042,
    0x4E00,
    0xAC00,
)
"""First letters of scripts, from Greek to Hangul."""


def training_fillers(texts: TrainingTexts) -> dict[str, Filler]:
    """All that a stage may name; those that the server's measurements have are so called too."""
    english = real_text("\n\n".join(texts.documents))
    code = real_text("\n\n".join(texts.programs))
    plain: dict[str, Filler] = {
        "sentences": sentences,
        "shuffled": shuffled,
        "names": names,
        "english": english,
        "code": code,
        "bytes": _in_other_letters(english),
    }
    return {**plain, "mixed": _mixed(plain)}


def draw_filler(
    rng: random.Random, weights: Mapping[str, float], fillers: Mapping[str, Filler]
) -> tuple[str, Filler]:
    """One by its weight."""
    if len(weights) == 1:
        (name,) = weights
    else:
        (name,) = rng.choices(list(weights), list(weights.values()))
    return name, fillers[name]


def _in_other_letters(filler: Filler) -> Filler:
    """As in a script whose words the tokenizer does not know: a letter is two or three bytes."""

    def stream(rng: random.Random) -> Iterator[Sentence]:
        first = rng.choice(_ALPHABETS)
        letters = {ord("a") + n: first + n for n in range(26)}
        letters |= {ord("A") + n: first + n for n in range(26)}
        for sentence in filler(rng):
            yield split_words("".join(sentence).translate(letters))

    return stream


def _mixed(fillers: Mapping[str, Filler]) -> Filler:
    """Sentences of two or three kinds in turn."""

    def stream(rng: random.Random) -> Iterator[Sentence]:
        chosen: Sequence[Iterator[Sentence]] = [
            fillers[name](rng) for name in rng.sample(sorted(fillers), rng.randint(2, 3))
        ]
        while True:
            yield next(rng.choice(chosen))

    return stream

"""Generate the text in which needles are hidden: sentences, or any text cut into sentences.

A filler is an endless stream of sentences. A sentence is a list of words that join to its text; it
begins with the space that separates it from the sentence before.

Real text comes from Python itself: every Python ships its language reference and its library's
sources, so it needs no download, and the included model was not trained on it.
"""

from __future__ import annotations

import random
import re
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count as count_up
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, get_args

from csps.models.needle_prompts.words import (
    ADJECTIVES,
    KEYS,
    NOUNS,
    SENTENCE_STARTS,
    VALUES,
    WORD_CLASSES,
    Count,
    split_words,
    vocabulary,
)

Sentence = list[str]
Filler = Callable[[random.Random], Iterator[Sentence]]
"""Function that yields a stream of random sentences."""

_TEMPLATES = (
    "The A N V the N .",
    "The N R V the A N P the N .",
    "The A N P the N V the N .",
    "T the N V the A N .",
    "T , the A N R V the N .",
    "The N and the A N V the N P the N .",
    "The N V the N because the A N V the N .",
    "In the A N , the N V the N .",
    "Every N P the A N V a A N .",
    "The N V the N , but the N V the A N .",
    "When the N V the N , the A N R V it .",
    "The N was A , and the N was A .",
)
"""Sentences in which capitals stand for a word of their class, see `WORD_CLASSES`."""

SHORTEST_SENTENCE = 4
"""Length in words."""
_PARAGRAPH_PROBABILITY = 1 / 8
_NAMES_SHARE = 0.4
"""Fraction of the nouns that `names` replaces."""
_LONGEST_PIECE = 120
"""Characters between two places in a real text where a needle may be put."""

_NOUNS = frozenset(f" {noun}" for noun in NOUNS)
_NAMES = [f" {word}" for word in (*KEYS, *VALUES)]
_SHUFFLED: Final = [word for word in vocabulary() if word.startswith(" ")] + list(".,:?")


def filler_sentence(rng: random.Random, *, paragraphs: bool = True) -> Sentence:
    """Return one random sentence; now and then it starts a new paragraph, if allowed."""
    words: list[str] = []
    for symbol in rng.choice(_TEMPLATES).split():
        word = rng.choice(WORD_CLASSES[symbol]) if symbol in WORD_CLASSES else symbol
        words.append(word if word in ".," else f" {word}")
    if paragraphs and rng.random() < _PARAGRAPH_PROBABILITY:
        words[0:1] = ["\n", words[0].lstrip()]
    return words


def sentences(rng: random.Random) -> Iterator[Sentence]:
    """Yield English-like sentences that say nothing."""
    for number in count_up():
        yield filler_sentence(rng, paragraphs=number > 0)


def names(rng: random.Random) -> Iterator[Sentence]:
    """Yield `sentences` about keys and values: *Lisbon* and *falcon* occur in them everywhere."""
    for sentence in sentences(rng):
        yield [
            rng.choice(_NAMES) if word in _NOUNS and rng.random() < _NAMES_SHARE else word
            for word in sentence
        ]


def shuffled(rng: random.Random) -> Iterator[Sentence]:
    """Yield random words of the vocabulary, including those of needles and questions."""
    yield [f" {rng.choice(SENTENCE_STARTS)}", *rng.choices(_SHUFFLED, k=10), "."]
    while True:
        yield [*rng.choices(_SHUFFLED, k=rng.randint(SHORTEST_SENTENCE, 20)), "."]


def real_text(text: str) -> Filler:
    """Return a filler that starts at a random place of a text and wraps around at its end.

    Raises:
        ValueError: it is empty.
    """
    pieces = [split_words(piece) for piece in _pieces(text)]
    if not pieces:
        raise ValueError("the filler's text is empty")

    def stream(rng: random.Random) -> Iterator[Sentence]:
        start = rng.randrange(len(pieces))
        for number in count_up(start):
            yield pieces[number % len(pieces)]

    return stream


def _pieces(text: str) -> list[str]:
    """Return sentences and paragraphs with the white space before them; split long ones."""
    # A piece without space before it, like the text's first, would stick to the needle before it.
    spaced = text if text[:1].isspace() else f"\n{text}"
    found = re.split(r"(?<=[.!?:;])(?=\s)|(?=\n\s*\n)", spaced.rstrip())
    return [part for piece in found if piece.strip() for part in _shortened(piece)]


def _shortened(piece: str) -> list[str]:
    """Split before white space, into parts of at most `_LONGEST_PIECE` where possible."""
    cuts = [0]
    for space in re.finditer(r"(?<=\S)\s", piece):
        if space.start() - cuts[-1] >= _LONGEST_PIECE:
            cuts.append(space.start())
    return [piece[start:end] for start, end in pairwise([*cuts, len(piece)])]


def _padding_sentence(rng: random.Random, length: int) -> Sentence:
    """Return a sentence of exactly ``length`` words, like ``The small old … pilot returned .``."""
    adjectives = [f" {rng.choice(ADJECTIVES)}" for _ in range(length - SHORTEST_SENTENCE)]
    verb = rng.choice(("answered", "moved", "remembered", "returned", "studied", "understood"))
    return [" The", *adjectives, f" {rng.choice(NOUNS)}", f" {verb}", "."]


def filler_sentences(
    rng: random.Random, tokens: int, count: Count | None, filler: Filler = sentences
) -> list[Sentence]:
    """Return sentences with ``tokens`` tokens in total: exactly so if words are tokens."""
    chosen: list[Sentence] = []
    left = tokens
    stream = filler(rng)
    while left >= SHORTEST_SENTENCE:
        sentence = next(stream)
        size = _size(sentence, count)
        if left - size < SHORTEST_SENTENCE and left != size:
            if count is None:
                chosen.append(_padding_sentence(rng, left))
            else:
                chosen.append(_beginning(sentence, left, count))
            break
        chosen.append(sentence)
        left -= size
    return chosen


def _beginning(sentence: Sentence, tokens: int, count: Count) -> Sentence:
    """Return as many of a sentence's words as fit into ``tokens`` tokens."""
    return sentence[
        : bisect_right(
            range(1, len(sentence) + 1), tokens, key=lambda words: _size(sentence[:words], count)
        )
    ]


def _size(sentence: Sequence[str], count: Count | None) -> int:
    return len(sentence) if count is None else count("".join(sentence))


FillerKind = Literal["sentences", "shuffled", "names", "english", "code", "bytes"]
FILLER_KINDS: tuple[FillerKind, ...] = get_args(FillerKind)

CYRILLIC = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "абцдефгхийклмнопкрстуввхызАБЦДЕФГХИЙКЛМНОПКРСТУВВХЫЗ",
)
_PROGRAMS = ("argparse", "ast", "datetime", "doctest", "inspect", "ipaddress", "pydoc", "typing")


@cache
def filler_of(kind: str) -> Filler:
    """Return the filler of a kind, or of a text file by its path.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty or no UTF-8.
    """
    match kind:
        case "sentences":
            return sentences
        case "shuffled":
            return shuffled
        case "names":
            return names
        case "english":
            return real_text(_language_reference())
        case "code":
            return real_text(_library_sources())
        case "bytes":
            # The tokenizer has no token for these letters, so each of them becomes two.
            return real_text(_language_reference().translate(CYRILLIC))
        case path:
            return real_text(Path(path).read_text(encoding="utf-8"))


def _language_reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _library_sources() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join((library / f"{name}.py").read_text("utf-8") for name in _PROGRAMS)

"""English-like sentences that say nothing: the text in which needles are hidden."""

from __future__ import annotations

import random

from csps.models.needle_prompts.words import ADJECTIVES, NOUNS, WORD_CLASSES, Count

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
"""Capitals stand for a word of their class, see `WORD_CLASSES`."""

SHORTEST_SENTENCE = 4
"""Words."""
_PARAGRAPH_PROBABILITY = 1 / 8


def filler_sentence(rng: random.Random, *, paragraphs: bool = True) -> list[str]:
    """One random sentence; now and then it starts a new paragraph if it may."""
    words: list[str] = []
    for item in rng.choice(_TEMPLATES).split():
        word = rng.choice(WORD_CLASSES[item]) if item in WORD_CLASSES else item
        words.append(word if word in ".," else f" {word}")
    if paragraphs and rng.random() < _PARAGRAPH_PROBABILITY:
        words[0:1] = ["\n", words[0].lstrip()]
    return words


def _padding_sentence(rng: random.Random, length: int) -> list[str]:
    """A sentence of exactly ``length`` words: ``The small old … pilot returned .``"""
    adjectives = [f" {rng.choice(ADJECTIVES)}" for _ in range(length - SHORTEST_SENTENCE)]
    verb = rng.choice(("answered", "moved", "remembered", "returned", "studied", "understood"))
    return [" The", *adjectives, f" {rng.choice(NOUNS)}", f" {verb}", "."]


def filler_sentences(rng: random.Random, tokens: int, count: Count | None) -> list[list[str]]:
    """Sentences with ``tokens`` tokens in total: exactly so when words are tokens."""
    sentences: list[list[str]] = []
    left = tokens
    while left >= SHORTEST_SENTENCE:
        sentence = filler_sentence(rng, paragraphs=bool(sentences))
        size = len(sentence) if count is None else count("".join(sentence))
        if left - size < SHORTEST_SENTENCE and left != size:
            if count is None:
                sentences.append(_padding_sentence(rng, left))
            break
        sentences.append(sentence)
        left -= size
    return sentences

"""Segments of random words, copied in another order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from csps.tools.train_needle.architecture import CONTEXT
from csps.tools.train_needle.batch import ASIDE, TrainingSequence
from csps.tools.train_needle.lengths import log_uniform
from csps.tools.train_needle.stages import Stage


def copy_sequence(rng: random.Random, stage: Stage, words: Sequence[int]) -> TrainingSequence:
    """Random words, then their segments in another order; within a segment the next word is
    known from the first half."""
    half, segment = stage.tokens // 2, 8
    text = rng.choices(_pool(rng, stage, words), k=half)
    starts = list(range(0, half, segment))
    rng.shuffle(starts)
    copied = [word for start in starts for word in text[start : start + segment]]
    gap = int(log_uniform(rng, 1, CONTEXT // 2))
    sequence = TrainingSequence(
        ids=text + copied,
        positions=[*range(half), *range(half + gap, 2 * half + gap)],
        blocks=[0] * (2 * half),
        told=[ASIDE] * (2 * half),
    )
    for index in range(half - 1):
        if index % segment != segment - 1:
            sequence.predictions.append((half + index, copied[index + 1]))
    return sequence


def _pool(rng: random.Random, stage: Stage, words: Sequence[int]) -> Sequence[int]:
    if stage.pool is None:
        return words
    return rng.sample(words, round(log_uniform(rng, stage.pool, len(words))))

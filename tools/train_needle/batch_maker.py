"""Draw batches that depend on seed, stage and step alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from csps.tools.train_needle.batch import (
    ASIDE,
    TrainingBatch,
    TrainingSequence,
    collate,
    log_uniform,
)
from csps.tools.train_needle.loss import fact_sentences
from csps.tools.train_needle.model import CONTEXT, PAD, Spelling
from csps.tools.train_needle.stages import Stage
from csps.tools.train_needle.text_sequences import TextSequences
from csps.tools.train_needle.texts import TrainingTexts, training_fillers


def copy_sequence(rng: random.Random, stage: Stage, words: Sequence[int]) -> TrainingSequence:
    """Return random words, then their segments in another order. Within a segment the first half
    determines the next word."""
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
        facts=[ASIDE] * (2 * half),
    )
    for index in range(half - 1):
        if index % segment != segment - 1:
            sequence.predictions.append((half + index, copied[index + 1]))
    return sequence


def _pool(rng: random.Random, stage: Stage, words: Sequence[int]) -> Sequence[int]:
    if stage.pool is None:
        return words
    return rng.sample(words, round(log_uniform(rng, stage.pool, len(words))))


class BatchMaker:
    """Source of training batches; the same seed, stage and step give the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, texts: TrainingTexts) -> None:
        self._spelling = Spelling(tokenizer)
        self._seed = seed
        self._fillers = training_fillers(texts)

    def draw(self, stage: Stage, step: int, *, copying: bool | None = None) -> TrainingBatch:
        """Return the batch of a step; `copying` None leaves its kind to the stage's mixture."""
        rng = random.Random(f"{self._seed}/{stage.name}/{step}")
        if copying is None:
            copying = rng.random() < stage.copying
        sequences = [self._sequence(rng, stage, copying) for _ in range(stage.batch)]
        return collate(sequences, self._spelling.ids[PAD])

    def facts(self, stage: Stage, step: int) -> Tensor:
        """Return a fact of each key for a step (`loss.fact_sentences`)."""
        return fact_sentences(
            random.Random(f"{self._seed}/{stage.name}/{step}/facts"), self._spelling
        )

    def _sequence(self, rng: random.Random, stage: Stage, copying: bool) -> TrainingSequence:
        if copying:
            return copy_sequence(rng, stage, self._spelling.words)
        texts = TextSequences(self._spelling, stage, rng, self._fillers)
        idle = stage.idle and rng.random() < stage.idle
        return texts.without_facts() if idle else texts.with_questions()

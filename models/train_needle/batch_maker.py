"""Batches that depend on seed, stage and step alone."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerFast

from csps.models.train_needle.batch import Batch, TrainingSequence, collate
from csps.models.train_needle.copying import copy_sequence
from csps.models.train_needle.spelling import Spelling
from csps.models.train_needle.stages import Stage
from csps.models.train_needle.text_sequences import TextSequences
from csps.models.train_needle.tokenizer import PAD


class BatchMaker:
    """Draws training batches; the same seed, stage and step give the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._spelling = Spelling(tokenizer)
        self._seed = seed

    def draw(self, stage: Stage, step: int, *, copying: bool | None = None) -> Batch:
        """The batch of a step; `copying` None leaves its kind to the stage's mixture."""
        rng = random.Random(f"{self._seed}/{stage.name}/{step}")
        if copying is None:
            copying = rng.random() < stage.copying
        sequences = [self._sequence(rng, stage, copying) for _ in range(stage.batch)]
        return collate(sequences, self._spelling.ids[PAD])

    def _sequence(self, rng: random.Random, stage: Stage, copying: bool) -> TrainingSequence:
        if copying:
            return copy_sequence(rng, stage, self._spelling.words)
        texts = TextSequences(self._spelling, stage, rng)
        idle = stage.idle and rng.random() < stage.idle
        return texts.without_facts() if idle else texts.with_questions()

"""Batches that depend on seed, stage and step alone."""

from __future__ import annotations

import random

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from csps.tools.train_needle.batch import Batch, TrainingSequence, collate
from csps.tools.train_needle.copying import copy_sequence
from csps.tools.train_needle.fillers import training_fillers
from csps.tools.train_needle.looking_back import fact_sentences
from csps.tools.train_needle.spelling import Spelling
from csps.tools.train_needle.stages import Stage
from csps.tools.train_needle.text_sequences import TextSequences
from csps.tools.train_needle.texts import TrainingTexts
from csps.tools.train_needle.tokenizer import PAD


class BatchMaker:
    """Draws training batches; the same seed, stage and step give the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, texts: TrainingTexts) -> None:
        self._spelling = Spelling(tokenizer)
        self._seed = seed
        self._fillers = training_fillers(texts)

    def draw(self, stage: Stage, step: int, *, copying: bool | None = None) -> Batch:
        """The batch of a step; `copying` None leaves its kind to the stage's mixture."""
        rng = random.Random(f"{self._seed}/{stage.name}/{step}")
        if copying is None:
            copying = rng.random() < stage.copying
        sequences = [self._sequence(rng, stage, copying) for _ in range(stage.batch)]
        return collate(sequences, self._spelling.ids[PAD])

    def facts(self, stage: Stage, step: int) -> Tensor:
        """A fact of each key, of a step (`looking_back.fact_sentences`)."""
        return fact_sentences(
            random.Random(f"{self._seed}/{stage.name}/{step}/facts"), self._spelling
        )

    def _sequence(self, rng: random.Random, stage: Stage, copying: bool) -> TrainingSequence:
        if copying:
            return copy_sequence(rng, stage, self._spelling.words)
        texts = TextSequences(self._spelling, stage, rng, self._fillers)
        idle = stage.idle and rng.random() < stage.idle
        return texts.without_facts() if idle else texts.with_questions()

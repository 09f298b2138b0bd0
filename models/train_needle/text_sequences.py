"""Haystacks with questions as training sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence

from csps.models.needle_prompts.haystack import Haystack, build_haystack, draw_facts
from csps.models.train_needle.batch import TrainingSequence
from csps.models.train_needle.everyday import (
    casual,
    chatter,
    mention,
    misspell,
    with_ordinary_values,
)
from csps.models.train_needle.lengths import log_uniform, skipping_positions
from csps.models.train_needle.spelling import Spelling
from csps.models.train_needle.stages import Stage
from csps.models.train_needle.tokenizer import BEGIN
from csps.models.train_needle.turns import Turns, draw_question

REPLY_TO_NO_QUESTION = " Which password?"
"""To a chat message that asks nothing the model can answer."""


class TextSequences:
    """Draws sequences for one stage from one stream of random numbers."""

    def __init__(self, spelling: Spelling, stage: Stage, rng: random.Random) -> None:
        self._spelling, self._stage, self._rng = spelling, stage, rng

    def with_questions(self) -> TrainingSequence:
        """A haystack and questions to it, each as if it stood there alone."""
        rng, stage = self._rng, self._stage
        needles = round(log_uniform(rng, *stage.needles))
        hops = rng.randint(0, needles // 2) if stage.hard_kinds else 0
        facts = draw_facts(rng, needles, hops=hops)
        if stage.everyday:
            facts = [*facts[:hops], *with_ordinary_values(rng, facts[hops:])]
        misspelt = rng.random() < stage.misspelt
        # A misspelt word is several tokens: start from fewer words.
        tokens = stage.tokens * 3 // 5 if misspelt else stage.tokens
        haystack = build_haystack(rng, max(tokens, 8 * (needles + 1)), facts)
        chat = rng.random() < 0.3
        length = log_uniform(rng, stage.tokens, stage.longest)
        sequence = self._text(haystack, length, chat=chat, misspelt=misspelt)
        turns = Turns(sequence, self._spelling, chat)
        for block in range(1, stage.questions + 1):
            self._ask(turns, block, haystack, hops)
        return sequence

    def without_facts(self) -> TrainingSequence:
        """A short text without facts; in a chat, nothing is asked."""
        rng = self._rng
        chat = rng.random() < 0.5
        tokens = rng.randint(4, 64)
        haystack = build_haystack(rng, tokens, [])
        misspelt = rng.random() < 0.5
        sequence = self._text(haystack, tokens, chat=chat, misspelt=misspelt)
        if chat:
            turns = Turns(sequence, self._spelling, chat)
            for block in range(1, 9):
                turns.append(block, chatter(rng), REPLY_TO_NO_QUESTION)
        return sequence

    def _ask(self, turns: Turns, block: int, haystack: Haystack, hops: int) -> None:
        rng, stage = self._rng, self._stage
        everyday = turns.chat and stage.everyday
        if everyday and rng.random() < 0.15:
            turns.append(block, chatter(rng), REPLY_TO_NO_QUESTION)
            return
        question = draw_question(rng, haystack, hops, stage.hard_kinds)
        text = casual(rng, question.text) if everyday else question.text
        turns.append(block, text, f" {question.answer}")
        if stage.hints:
            turns.hint(block, haystack, question)

    def _text(
        self, haystack: Haystack, length: float, *, chat: bool, misspelt: bool
    ) -> TrainingSequence:
        """The haystack alone, as if it had `length` tokens."""
        spelt = self._spelt(haystack, misspelt)
        head = [BEGIN, "<|user|>"] if chat else [BEGIN]
        words = head + [word for word, _ in spelt]
        sequence = TrainingSequence(
            ids=[self._spelling.ids[word] for word in words],
            positions=skipping_positions(self._rng, words, int(length)),
            blocks=[0] * len(words),
            filler=[False] * len(head) + [is_filler for _, is_filler in spelt],
            copies=length / len(words),
        )
        self._continue_filler(sequence, words)
        return sequence

    def _spelt(self, haystack: Haystack, misspelt: bool) -> list[tuple[str, bool]]:
        """Its words, some in characters, and whether they are filler."""
        rng, stage = self._rng, self._stage
        fact_places = {i for needle in haystack.needles for i in range(*needle.words)}
        spelt = [(word, i not in fact_places) for i, word in enumerate(haystack.words)]
        if stage.mentions:
            spelt = list(mention(rng, spelt, stage.mentions))
        return list(misspell(rng, spelt)) if misspelt else spelt

    def _continue_filler(self, sequence: TrainingSequence, words: Sequence[str]) -> None:
        """Filler to be predicted. Characters of misspelt words are no example to follow."""
        filler = sequence.filler
        places = [
            i
            for i, word in enumerate(words[1:])
            if filler[i] and filler[i + 1] and (len(word) > 1 or word in ".,\n")
        ]
        for place in self._rng.sample(places, min(self._stage.continued, len(places))):
            sequence.continuations.append((place, sequence.ids[place + 1]))

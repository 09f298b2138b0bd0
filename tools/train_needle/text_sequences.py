"""Haystacks with questions as training sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from csps.models.needle_prompts.filler import Filler
from csps.models.needle_prompts.haystack import Haystack, build_haystack, draw_facts
from csps.models.needle_prompts.questions import Question
from csps.tools.train_needle.batch import ASIDE, FILLER, TrainingSequence
from csps.tools.train_needle.everyday import (
    casual,
    chatter,
    mention,
    misspell,
    with_ordinary_values,
)
from csps.tools.train_needle.fillers import draw_filler
from csps.tools.train_needle.lengths import log_uniform, skipping_positions
from csps.tools.train_needle.spelling import BYTES, Spelling
from csps.tools.train_needle.stages import Stage
from csps.tools.train_needle.tokenizer import BEGIN
from csps.tools.train_needle.turns import Asked, Turns, draw_question

REPLY_TO_NO_QUESTION = " Which password?"
"""To a chat message that asks nothing the model can answer."""

GENERATED = ("sentences", "names", "shuffled")
"""Fillers whose words are tokens."""


class TextSequences:
    """Draws sequences for one stage from one stream of random numbers."""

    def __init__(
        self, spelling: Spelling, stage: Stage, rng: random.Random, fillers: Mapping[str, Filler]
    ) -> None:
        self._spelling, self._stage, self._rng = spelling, stage, rng
        self._fillers = fillers

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
        name, filler = draw_filler(rng, stage.fillers, self._fillers)
        count = None if name in GENERATED else self._spelling.count
        room = max(tokens, 8 * (needles + 1))
        haystack = build_haystack(rng, room, facts, count, filler)
        chat = rng.random() < 0.3
        length = log_uniform(rng, stage.tokens, stage.longest)
        first, seen = self._asked_first(haystack, hops, chat=chat)
        text = self._spelt(haystack, misspelt)
        sequence = self._text(text, length, chat=chat, first=first, seen=seen)
        if stage.rivals > 1:
            sequence.rivals = log_uniform(rng, 1.0, stage.rivals)
        turns = Turns(sequence, self._spelling, chat)
        for block, asked in enumerate(first, start=1):
            # The question that all the text has seen is a whole sequence's only one of its kind.
            weight = 4 if seen else 1
            if stage.recalled:
                turns.recall(block, asked, weight=weight)
            else:
                turns.append(block, "", asked.answer, needles=asked.needles, weight=weight)
        for block in range(len(first) + 1, stage.questions + 1):
            self._ask(turns, block, haystack, hops, chatting=not seen)
        return sequence

    def without_facts(self) -> TrainingSequence:
        """A short text without facts; in a chat, nothing is asked."""
        rng = self._rng
        chat = rng.random() < 0.5
        tokens = rng.randint(4, 64)
        haystack = build_haystack(rng, tokens, [])
        text = self._spelt(haystack, misspelt=rng.random() < 0.5)
        sequence = self._text(text, tokens, chat=chat)
        if chat:
            turns = Turns(sequence, self._spelling, chat)
            for block in range(1, 9):
                turns.append(block, chatter(rng), REPLY_TO_NO_QUESTION)
        return sequence

    def _asked_first(
        self, haystack: Haystack, hops: int, *, chat: bool
    ) -> tuple[list[Asked], bool]:
        """Questions to stand before the text, and whether the text is to see them: then one."""
        rng, stage = self._rng, self._stage
        if not stage.first:
            return [], False
        seen = rng.random() < stage.first
        number = 1 if seen else round(stage.first * stage.questions)
        asked: list[Asked] = []
        for _ in range(number):
            question = self._question(haystack, hops)
            text = question.text
            if chat and stage.everyday:
                text = casual(rng, text)
            key = haystack.needles[question.needles[0]].key
            asked.append(Asked(text.strip() + "\n", f" {question.answer}", key, question.needles))
        return asked, seen

    def _question(self, haystack: Haystack, hops: int) -> Question:
        two_hop, several = self._stage.hard_kinds, self._stage.several
        if several is None:
            several = two_hop
        return draw_question(self._rng, haystack, hops, two_hop=two_hop, several=several)

    def _ask(
        self, turns: Turns, block: int, haystack: Haystack, hops: int, *, chatting: bool
    ) -> None:
        rng, stage = self._rng, self._stage
        everyday = turns.chat and stage.everyday
        if everyday and chatting and rng.random() < 0.15:
            turns.append(block, chatter(rng), REPLY_TO_NO_QUESTION)
            return
        question = self._question(haystack, hops)
        text = casual(rng, question.text) if everyday else question.text
        turns.append(block, text, f" {question.answer}", needles=question.needles)
        if stage.hints:
            turns.hint(block, haystack, question)

    def _text(
        self,
        text: Sequence[tuple[int, int]],
        length: float,
        *,
        chat: bool,
        first: Sequence[Asked] = (),
        seen: bool = False,
    ) -> TrainingSequence:
        """The text behind its questions, as if it had `length` tokens."""
        spelling = self._spelling
        head = [spelling.ids[word] for word in ([BEGIN, "<|user|>"] if chat else [BEGIN])]
        questions = [spelling.spell(asked.text) for asked in first]
        ids, blocks, positions = list(head), [0] * len(head), list(range(len(head)))
        for block, question in enumerate(questions, start=1):
            ids += question
            blocks += [0 if seen else block] * len(question)
            positions += range(len(head), len(head) + len(question))
        start = len(head) + max(map(len, questions), default=0)
        skipping = skipping_positions(
            self._rng, [id_ for id_, _ in text], int(length) - start, spelling.ids["."]
        )
        sequence = TrainingSequence(
            ids=ids + [id_ for id_, _ in text],
            positions=positions + [start + position for position in skipping],
            blocks=blocks + [0] * len(text),
            told=[ASIDE] * len(ids) + [fact for _, fact in text],
            copies=length / (len(head) + len(text)),
        )
        self._continue_filler(sequence)
        return sequence

    def _spelt(self, haystack: Haystack, misspelt: bool) -> list[tuple[int, int]]:
        """Its tokens, some of single characters, and what they tell (`TrainingSequence.told`)."""
        rng, stage, spelling = self._rng, self._stage, self._spelling
        needles = enumerate(haystack.needles)
        facts = {place: fact for fact, needle in needles for place in range(*needle.words)}
        words = [(word, facts.get(place, FILLER)) for place, word in enumerate(haystack.words)]
        if stage.mentions:
            words = list(mention(rng, words, stage.mentions))
        runs = misspell(rng, words) if misspelt else _joined(words)
        return [(id_, fact) for run, fact in runs for id_ in spelling.spell(run)]

    def _continue_filler(self, sequence: TrainingSequence) -> None:
        """Filler to be predicted. Characters of misspelt words are no example to follow."""
        told, ids = sequence.told, sequence.ids
        marks = {self._spelling.ids[mark] for mark in ".,\n"}
        places = [
            i
            for i, id_ in enumerate(ids[1:])
            if told[i] == told[i + 1] == FILLER and (id_ >= BYTES or id_ in marks)
        ]
        for place in self._rng.sample(places, min(self._stage.continued, len(places))):
            sequence.continuations.append((place, ids[place + 1]))


def _joined(words: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Stretches of filler, and each fact."""
    for told, run in groupby(words, key=itemgetter(1)):
        yield "".join(word for word, _ in run), told

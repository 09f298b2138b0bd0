"""Write haystacks with questions as training sequences.

The text gets what users' texts have and generated ones lack: keys without facts, misspelled words,
ordinary values. `QuestionWriter` writes a question behind its haystack, its answer, and hints to
it. `TextSequences` draws whole sequences for a stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from csps.models.needle_prompts.filler import Filler, filler_sentence
from csps.models.needle_prompts.haystack import (
    ANSWER_HEAD,
    PHRASINGS,
    QUESTION_HEAD,
    Fact,
    Haystack,
    Question,
    ask,
    build_haystack,
    draw_facts,
)
from csps.models.needle_prompts.words import ADJECTIVES, KEYS, NOUNS
from csps.tools.train_needle.batch import (
    ASIDE,
    FILLER,
    TrainingSequence,
    log_uniform,
    skipping_positions,
)
from csps.tools.train_needle.model import BEGIN, BYTES, CHARACTERS, END, Spelling
from csps.tools.train_needle.stages import Stage
from csps.tools.train_needle.texts import draw_filler


def mention(
    rng: random.Random, words: Sequence[tuple[str, int]], fraction: float
) -> Iterator[tuple[str, int]]:
    """Yield the words with keys in some nouns' places, without facts about these keys."""
    nouns = {f" {noun}" for noun in NOUNS}
    for word, fact in words:
        if fact == FILLER and word in nouns and rng.random() < fraction:
            # Not filler, which stands for many copies: a text names each key a few times.
            yield f" {rng.choice(KEYS)}", ASIDE
        else:
            yield word, fact


def misspell(rng: random.Random, words: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the words with some filler words replaced by characters, as in a user's text."""
    fraction = rng.uniform(0.0, 0.3)
    for word, fact in words:
        if fact != FILLER or not word.startswith(" ") or rng.random() > fraction:
            yield word, fact
            continue
        for character in " " + "".join(rng.choices(CHARACTERS[:-2], k=rng.randint(1, 8))):
            yield character, FILLER


def with_ordinary_values(rng: random.Random, facts: Sequence[Fact]) -> Iterator[Fact]:
    """Yield the facts with some values replaced by words that otherwise occur in filler."""
    ordinary = [*NOUNS, *ADJECTIVES]
    for fact in facts:
        yield fact._replace(value=rng.choice(ordinary)) if rng.random() < 0.1 else fact


def chatter(rng: random.Random) -> str:
    """Return the end of a message that asks nothing."""
    kind = rng.randrange(3)
    if kind == 0:
        return ""
    if kind == 1:
        return "".join(filler_sentence(rng))
    return "".join(rng.choices(CHARACTERS, k=rng.randint(1, 20)))


def casual(rng: random.Random, text: str) -> str:
    """Return a question unchanged or without its heading, on a line of its own or not."""
    question = text.removeprefix("".join(QUESTION_HEAD)).strip()
    return rng.choice((text, text, f" {question}", f"\n{question}"))


def draw_question(
    rng: random.Random, haystack: Haystack, hops: int, *, two_hop: float, several: float
) -> Question:
    """Draw a question that the haystack answers; the first `hops` of its facts lead to others.

    A fraction `two_hop` asks for two hops, a fraction `several` of the rest for several facts, if
    there are any.
    """
    needles = range(len(haystack.needles))
    if hops and rng.random() < two_hop:
        first = rng.randrange(hops)
        place = {needle.key: index for index, needle in enumerate(haystack.needles)}
        chains = [i for i in needles if haystack.needles[i].value in place]
        index = chains[first % len(chains)]
        return ask(haystack, "two_hop", [index, place[haystack.needles[index].value]])
    if len(needles) > 1 and rng.random() < several:
        count = rng.randint(2, min(4, len(needles)))
        return ask(haystack, "multi", rng.sample(needles, count))
    phrasing = rng.choice([0, 0, 0, *range(len(PHRASINGS))])
    return ask(haystack, "multi_key", [rng.choice(needles)], phrasing=phrasing)


@dataclass(frozen=True)
class LeadingQuestion:
    """A question that stands before the text."""

    text: str
    answer: str
    key: str
    """First key that the question names."""
    needles: tuple[int, ...]
    """Needles that the answer needs."""


class QuestionWriter:
    """Writer of questions and answers behind a haystack, each in a block of its own."""

    def __init__(self, sequence: TrainingSequence, spelling: Spelling, chat: bool) -> None:
        self.sequence, self.spelling, self.chat = sequence, spelling, chat
        self._position = sequence.positions[-1] + 1

    def append(
        self, block: int, text: str, answer: str, *, needles: Sequence[int] = (), weight: int = 1
    ) -> None:
        """Append a question, or a substitute, with its answer, which counts `weight` times."""
        sequence, ids = self.sequence, self.spelling.ids
        tail = [END, "<|assistant|>"] if self.chat else ANSWER_HEAD
        prompt = [*self.spelling.spell(text), *(ids[word] for word in tail)]
        reply = [*self.spelling.spell(answer), ids[END]]
        first = len(sequence.ids) + len(prompt) - 1
        sequence.predictions += weight * [(first + index, word) for index, word in enumerate(reply)]
        count = len(prompt) + len(reply)
        sequence.ids += prompt + reply
        sequence.positions += range(self._position, self._position + count)
        sequence.blocks += [block] * count
        sequence.facts += [ASIDE] * count
        if needles:
            sequence.needed[block] = needles

    def recall(self, block: int, asked: LeadingQuestion, *, weight: int = 1) -> None:
        """Append the answer to a question before the text, in two steps.

        Its first word is predicted at every token from the message's start. There the first layer
        that answers is asked for the key, and later layers for the word.
        """
        sequence = self.sequence
        begin = len(sequence.ids)
        answer = len(sequence.predictions)
        self.append(block, "", asked.answer, needles=asked.needles, weight=weight)
        last, word = sequence.predictions[answer]
        sequence.predictions += weight * [(index, word) for index in range(begin, last)]
        key = self.spelling.ids[f" {asked.key}"]
        sequence.recalls |= dict.fromkeys(range(begin, last + 1), key)

    def hint(self, block: int, haystack: Haystack, question: Question) -> None:
        """Predict a key's value at the key, where only the look-up has to be learned, and at the
        words between a last key and the answer."""
        sequence, ids = self.sequence, self.spelling.ids
        values = {ids[f" {needle.key}"]: ids[f" {needle.value}"] for needle in haystack.needles}
        begin = sequence.blocks.index(block)
        (answer, _) = min(place for place in sequence.predictions if place[0] > begin)
        asked = [i for i in range(begin, answer) if sequence.ids[i] in values]
        if len(asked) == 1 and question.kind != "two_hop":
            asked = list(range(asked[0], answer))
        value = 0
        for index in asked:
            value = values.get(sequence.ids[index], value)
            sequence.predictions.append((index, value))


REPLY_TO_NO_QUESTION = " Which password?"
"""Reply to a chat message that asks nothing the model can answer."""

GENERATED = ("sentences", "names", "shuffled")
"""Fillers whose words are tokens."""


class TextSequences:
    """Source of sequences for one stage, from one stream of random numbers."""

    def __init__(
        self, spelling: Spelling, stage: Stage, rng: random.Random, fillers: Mapping[str, Filler]
    ) -> None:
        self._spelling, self._stage, self._rng = spelling, stage, rng
        self._fillers = fillers

    def with_questions(self) -> TrainingSequence:
        """Return a haystack with questions, each as if it stood there alone."""
        rng, stage = self._rng, self._stage
        needles = round(log_uniform(rng, *stage.needles))
        hops = rng.randint(0, needles // 2) if stage.hard_kinds else 0
        facts = draw_facts(rng, needles, hops=hops)
        if stage.everyday:
            facts = [*facts[:hops], *with_ordinary_values(rng, facts[hops:])]
        misspelled = rng.random() < stage.misspelled
        # A misspelled word is several tokens: start with fewer words.
        tokens = stage.tokens * 3 // 5 if misspelled else stage.tokens
        name, filler = draw_filler(rng, stage.fillers, self._fillers)
        count = None if name in GENERATED else self._spelling.count
        room = max(tokens, 8 * (needles + 1))
        haystack = build_haystack(rng, room, facts, count, filler)
        chat = rng.random() < 0.3
        length = log_uniform(rng, stage.tokens, stage.longest)
        first, seen = self._asked_first(haystack, hops, chat=chat)
        text = self._spelled(haystack, misspelled)
        sequence = self._text(text, length, chat=chat, first=first, seen=seen)
        if stage.rivals > 1:
            sequence.rivals = log_uniform(rng, 1.0, stage.rivals)
        writer = QuestionWriter(sequence, self._spelling, chat)
        for block, asked in enumerate(first, start=1):
            # A question that all the text sees is the only one of its kind in a sequence.
            weight = 4 if seen else 1
            if stage.recalled:
                writer.recall(block, asked, weight=weight)
            else:
                writer.append(block, "", asked.answer, needles=asked.needles, weight=weight)
        for block in range(len(first) + 1, stage.questions + 1):
            self._ask(writer, block, haystack, hops, chatting=not seen)
        return sequence

    def without_facts(self) -> TrainingSequence:
        """Return a short text without facts; in a chat, nothing is asked."""
        rng = self._rng
        chat = rng.random() < 0.5
        tokens = rng.randint(4, 64)
        haystack = build_haystack(rng, tokens, [])
        text = self._spelled(haystack, misspelled=rng.random() < 0.5)
        sequence = self._text(text, tokens, chat=chat)
        if chat:
            writer = QuestionWriter(sequence, self._spelling, chat)
            for block in range(1, 9):
                writer.append(block, chatter(rng), REPLY_TO_NO_QUESTION)
        return sequence

    def _asked_first(
        self, haystack: Haystack, hops: int, *, chat: bool
    ) -> tuple[list[LeadingQuestion], bool]:
        """Return questions before the text, and True if the text sees them: then there is only
        one."""
        rng, stage = self._rng, self._stage
        if not stage.first:
            return [], False
        seen = rng.random() < stage.first
        count = 1 if seen else round(stage.first * stage.questions)
        asked: list[LeadingQuestion] = []
        for _ in range(count):
            question = self._question(haystack, hops)
            text = question.text
            if chat and stage.everyday:
                text = casual(rng, text)
            key = haystack.needles[question.needles[0]].key
            asked.append(
                LeadingQuestion(text.strip() + "\n", f" {question.answer}", key, question.needles)
            )
        return asked, seen

    def _question(self, haystack: Haystack, hops: int) -> Question:
        two_hop, several = self._stage.hard_kinds, self._stage.several
        if several is None:
            several = two_hop
        return draw_question(self._rng, haystack, hops, two_hop=two_hop, several=several)

    def _ask(
        self, writer: QuestionWriter, block: int, haystack: Haystack, hops: int, *, chatting: bool
    ) -> None:
        rng, stage = self._rng, self._stage
        everyday = writer.chat and stage.everyday
        if everyday and chatting and rng.random() < 0.15:
            writer.append(block, chatter(rng), REPLY_TO_NO_QUESTION)
            return
        question = self._question(haystack, hops)
        text = casual(rng, question.text) if everyday else question.text
        writer.append(block, text, f" {question.answer}", needles=question.needles)
        if stage.hints:
            writer.hint(block, haystack, question)

    def _text(
        self,
        text: Sequence[tuple[int, int]],
        length: float,
        *,
        chat: bool,
        first: Sequence[LeadingQuestion] = (),
        seen: bool = False,
    ) -> TrainingSequence:
        """Return the text behind its questions, with positions as if it had `length` tokens."""
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
            facts=[ASIDE] * len(ids) + [fact for _, fact in text],
            copies=length / (len(head) + len(text)),
        )
        self._continue_filler(sequence)
        return sequence

    def _spelled(self, haystack: Haystack, misspelled: bool) -> list[tuple[int, int]]:
        """Return its token ids, some of single characters, with the facts that they state
        (`TrainingSequence.facts`)."""
        rng, stage, spelling = self._rng, self._stage, self._spelling
        needles = enumerate(haystack.needles)
        facts = {place: fact for fact, needle in needles for place in range(*needle.words)}
        words = [(word, facts.get(place, FILLER)) for place, word in enumerate(haystack.words)]
        if stage.mentions:
            words = list(mention(rng, words, stage.mentions))
        runs = misspell(rng, words) if misspelled else _joined(words)
        return [(id_, fact) for run, fact in runs for id_ in spelling.spell(run)]

    def _continue_filler(self, sequence: TrainingSequence) -> None:
        """Add predictions of filler, except of misspelled words, which are no example to follow."""
        facts, ids = sequence.facts, sequence.ids
        marks = {self._spelling.ids[mark] for mark in ".,\n"}
        places = [
            index
            for index, id_ in enumerate(ids[1:])
            if facts[index] == facts[index + 1] == FILLER and (id_ >= BYTES or id_ in marks)
        ]
        for place in self._rng.sample(places, min(self._stage.continued, len(places))):
            sequence.continuations.append((place, ids[place + 1]))


def _joined(words: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield stretches of filler, and each fact, as one text each."""
    for fact, run in groupby(words, key=itemgetter(1)):
        yield "".join(word for word, _ in run), fact

"""A question behind its haystack, the answer, and hints to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from csps.models.needle_prompts.haystack import Haystack
from csps.models.needle_prompts.questions import ANSWER_HEAD, PHRASINGS, Question, ask
from csps.tools.train_needle.batch import ASIDE, TrainingSequence
from csps.tools.train_needle.spelling import Spelling
from csps.tools.train_needle.tokenizer import END


def draw_question(
    rng: random.Random, haystack: Haystack, hops: int, *, two_hop: float, several: float
) -> Question:
    """One that the haystack answers; the first `hops` of its facts lead to others.

    `two_hop` of them ask for two hops, `several` of the rest for several facts, where there are."""
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
class Asked:
    """A question that stands before the text."""

    text: str
    answer: str
    key: str
    """The first that it names."""
    needles: tuple[int, ...]
    """Those that the answer needs."""


class Turns:
    """Writes questions and their answers behind a haystack, each in a block of its own."""

    def __init__(self, sequence: TrainingSequence, spelling: Spelling, chat: bool) -> None:
        self.sequence, self.spelling, self.chat = sequence, spelling, chat
        self._position = sequence.positions[-1] + 1

    def append(
        self, block: int, text: str, answer: str, *, needles: Sequence[int] = (), weight: int = 1
    ) -> None:
        """A question, or what stands in its place; its answer counts `weight` times."""
        sequence, ids = self.sequence, self.spelling.ids
        tail = [END, "<|assistant|>"] if self.chat else ANSWER_HEAD
        prompt = [*self.spelling.spell(text), *(ids[word] for word in tail)]
        reply = [*self.spelling.spell(answer), ids[END]]
        first = len(sequence.ids) + len(prompt) - 1
        sequence.predictions += weight * [(first + i, word) for i, word in enumerate(reply)]
        count = len(prompt) + len(reply)
        sequence.ids += prompt + reply
        sequence.positions += range(self._position, self._position + count)
        sequence.blocks += [block] * count
        sequence.told += [ASIDE] * count
        if needles:
            sequence.needed[block] = needles

    def recall(self, block: int, asked: Asked, *, weight: int = 1) -> None:
        """Append the answer to a question before the text in two steps: wherever its first word is
        predicted, and that is from the turn's beginning on, the first layer that answers is asked
        for the key, and those behind it for the word."""
        sequence = self.sequence
        begin = len(sequence.ids)
        answer = len(sequence.predictions)
        self.append(block, "", asked.answer, needles=asked.needles, weight=weight)
        last, word = sequence.predictions[answer]
        sequence.predictions += weight * [(index, word) for index in range(begin, last)]
        key = self.spelling.ids[f" {asked.key}"]
        sequence.recalls |= dict.fromkeys(range(begin, last + 1), key)

    def hint(self, block: int, haystack: Haystack, question: Question) -> None:
        """Predict a key's value at the key, where nothing but the look-up has to be learnt, and
        at the words between a last key and the answer."""
        sequence, ids = self.sequence, self.spelling.ids
        values = {ids[f" {n.key}"]: ids[f" {n.value}"] for n in haystack.needles}
        begin = sequence.blocks.index(block)
        (answer, _) = min(place for place in sequence.predictions if place[0] > begin)
        asked = [i for i in range(begin, answer) if sequence.ids[i] in values]
        if len(asked) == 1 and question.kind != "two_hop":
            asked = list(range(asked[0], answer))
        value = 0
        for index in asked:
            value = values.get(sequence.ids[index], value)
            sequence.predictions.append((index, value))

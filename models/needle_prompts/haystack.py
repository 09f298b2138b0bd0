"""Hide needles in filler at chosen depths, and ask questions about them.

A needle is a sentence of one fixed form, ``The password of Lisbon is falcon.``: *Lisbon* is its
key, *falcon* its value.

Questions have four kinds (compare NeedleBench and RULER):

============  ==================================================  ==========================
kind          question                                            answer
============  ==================================================  ==========================
``single``    one needle in the text, asked for                   ``falcon``
``multi_key`` many needles of the same form, one asked for        ``falcon``
``multi``     many needles, several asked for                     ``Lisbon is falcon, Oslo is …``
``two_hop``   the value of the asked key is itself a key          ``Oslo is falcon``
============  ==================================================  ==========================
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from csps.models.needle_prompts.filler import SHORTEST_SENTENCE, Filler, filler_sentences, sentences
from csps.models.needle_prompts.words import KEYS, VALUES, Count, count_words, split_words


class Fact(NamedTuple):
    """A key, its value and the depth at which to hide them."""

    key: str
    value: str
    depth: float
    """Depth: 0 is the start of the text, 1 its end."""

    @property
    def words(self) -> list[str]:
        """The sentence that states the fact, as words."""
        return [" The", " password", " of", f" {self.key}", " is", f" {self.value}", "."]


@dataclass(frozen=True, kw_only=True)
class Needle:
    """A fact and where it lies in its haystack."""

    key: str
    value: str
    depth: float
    """Tokens before the sentence / tokens of the haystack."""
    chars: tuple[int, int]
    """The sentence is ``text[start:end]``, the space before it included."""
    words: tuple[int, int]
    """The sentence is ``words[start:end]``. In generated text these are token positions in the
    default model's tokenizer, without a beginning-of-text token."""


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Filler with needles; ``"".join(words)`` is the text."""

    words: tuple[str, ...]
    needles: tuple[Needle, ...]
    """Needles in the order in which the facts were given."""
    tokens: int
    """Length by the count function in use."""

    @property
    def text(self) -> str:
        """The words, joined."""
        return "".join(self.words)


def draw_facts(
    rng: random.Random, needles: int, *, depths: Sequence[float] = (), hops: int = 0
) -> list[Fact]:
    """Draw distinct keys with distinct values; the first ``hops`` facts lead to the next ones.

    The first facts lie at the given depths, all others anywhere.
    """
    keys = rng.sample(KEYS, needles)
    values = rng.sample(VALUES, needles)
    values[:hops] = keys[hops : 2 * hops]
    places = [*depths, *(rng.random() for _ in keys[len(depths) :])]
    return list(map(Fact, keys, values, places))


def build_haystack(
    rng: random.Random,
    tokens: int,
    facts: Sequence[Fact],
    count: Count | None = None,
    filler: Filler = sentences,
) -> Haystack:
    """Hide facts in filler, ``tokens`` tokens in all.

    With a count function, the length is the sum of its counts of the sentences, or a few fewer.

    Raises:
        ValueError: the facts alone are longer.
    """
    size = count or count_words
    hidden = sum(size("".join(fact.words)) for fact in facts)
    room = tokens - hidden
    if room < SHORTEST_SENTENCE:
        raise ValueError(f"{len(facts)} needles do not fit into {tokens} tokens")
    words, located = _weave(filler_sentences(rng, room, count, filler), facts)
    text_tokens = len(words) if count is None else count("".join(words))
    return Haystack(words=tuple(words), needles=tuple(located), tokens=text_tokens)


def _weave(filler: list[list[str]], facts: Sequence[Fact]) -> tuple[list[str], list[Needle]]:
    """Put each fact before the first filler sentence at or beyond its depth."""
    total = sum(map(len, filler))
    waiting = sorted(facts, key=lambda fact: fact.depth)
    words: list[str] = []
    starts: dict[str, int] = {}
    seen = 0
    for sentence in [*filler, []]:
        while waiting and (seen >= waiting[0].depth * total or not sentence):
            fact = waiting.pop(0)
            starts[fact.key] = len(words)
            words += fact.words
        words += sentence
        seen += len(sentence)
    # The text starts at the margin.
    words[0] = words[0].lstrip(" ")
    return words, [_locate(fact, starts[fact.key], words) for fact in facts]


def _locate(fact: Fact, start: int, words: list[str]) -> Needle:
    end = start + len(fact.words)
    char = sum(map(len, words[:start]))
    return Needle(
        key=fact.key,
        value=fact.value,
        depth=start / len(words),
        chars=(char, char + sum(map(len, words[start:end]))),
        words=(start, end),
    )


Kind = Literal["single", "multi", "multi_key", "two_hop"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Order = Literal["first", "last"]
"""Position of a question: before its text or behind it."""
ORDERS: tuple[Order, ...] = get_args(Order)

PHRASINGS = (
    "What is the password of {key}?",
    "Tell me the password of {key}.",
    "Which word is the password of {key}?",
    "Please say the password of {key} now.",
)
"""Ways to ask for one needle. Measurements use the first; training mixes them."""

QUESTION_HEAD = ("\n", "Question", ":")
ANSWER_HEAD = ("\n", "Answer", ":")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a haystack, to be put right behind it or right before it."""

    kind: Kind
    text: str
    """Question alone: a chat user's last line."""
    answer: str
    needles: tuple[int, ...]
    """Indices into the haystack's needles of all those that the answer needs."""

    @property
    def completion_text(self) -> str:
        """Question and the cue that makes a completion model answer."""
        return self.text + "".join(ANSWER_HEAD)

    def around(self, order: Order) -> tuple[str, str]:
        """Return the text before the haystack and behind it, in a completion prompt."""
        if order == "first":
            return self.text.lstrip() + "\n", "".join(ANSWER_HEAD)
        return "", self.completion_text


def ask(haystack: Haystack, kind: Kind, needles: Sequence[int], *, phrasing: int = 0) -> Question:
    """Ask for needles by their indices: the keys asked for, or the two hops in order.

    Raises:
        ValueError: two needles are no two hops.
    """
    chosen = [haystack.needles[index] for index in needles]
    first = chosen[0]
    if kind == "two_hop":
        if len(chosen) != 2 or first.value != chosen[1].key:
            raise ValueError("two hops need two needles, the second keyed by the first's value")
        text = f"What is the password of the password of {first.key}?"
        answer = f"{chosen[1].key} is {chosen[1].value}"
    elif kind == "multi":
        keys = [needle.key for needle in chosen]
        text = f"What are the passwords of {', '.join(keys[:-1])} and {keys[-1]}?"
        answer = ", ".join(f"{needle.key} is {needle.value}" for needle in chosen)
    else:
        text = PHRASINGS[phrasing].format(key=first.key)
        answer = first.value
    head = "".join(QUESTION_HEAD)
    return Question(kind=kind, text=f"{head} {text}", answer=answer, needles=tuple(needles))


def is_correct(answer: str, reply: str) -> bool:
    """Return True if a reply is the answer: the same words, whatever the spacing around them."""
    return split_words(answer.strip()) == split_words(reply.strip())

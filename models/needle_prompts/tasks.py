"""Write prompts of RULER's four categories, each with its one right answer.

==================  ========================  ===================================================
category            task                      the answer lists, in this order
==================  ========================  ===================================================
retrieval           ``multi_value``           all values of one key, as the text has them
tracing             ``variables``             variables with one value, as the text assigns them
aggregation         ``common_words``          words that are most frequent in a list
aggregation         ``frequent_words``        the same of made-up words, by a power law
question answering  ``one_passage``           a fact about a person, among made-up biographies
question answering  ``two_passages``          a fact about the teacher of a person
==================  ========================  ===================================================

Further questions of the category retrieval are in `haystack`. A prompt depends on task, length,
seed and the function that counts tokens alone, and never is longer than asked for.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

from csps.models.needle_prompts.filler import SHORTEST_SENTENCE, filler_sentences
from csps.models.needle_prompts.haystack import ANSWER_HEAD, QUESTION_HEAD
from csps.models.needle_prompts.words import (
    ADJECTIVES,
    KEYS,
    NOUNS,
    VALUES,
    VERBS,
    Count,
    count_words,
)

Category = Literal["retrieval", "tracing", "aggregation", "question answering"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

TaskName = Literal[
    "multi_value", "variables", "common_words", "frequent_words", "one_passage", "two_passages"
]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)


class Exercise(NamedTuple):
    """A text, a question about it, and the words of the answer in their order."""

    text: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """A prompt of one task."""

    task: TaskName
    text: str
    """Prompt for /v1/completions: a worked example where the task has one, text and question."""
    answers: tuple[str, ...]
    tokens: int
    """Length of ``text`` by the count function in use, without special tokens."""

    @property
    def answer(self) -> str:
        """The one right answer."""
        return ", ".join(self.answers)


def write_prompt(
    task: TaskName, length: int, seed: int | str, count: Count | None = None
) -> TaskPrompt:
    """Write a prompt of at most ``length`` tokens.

    Without a count function a word counts as a token, as in the default model's tokenizer.

    Raises:
        ValueError: the task does not fit into so few tokens.
    """
    size = count or count_words
    aim = length
    while True:
        rng = random.Random(f"{task}/{length}/{seed}")
        text, answers = _assembled(rng, task, aim, size)
        tokens = size(text)
        if tokens <= length:
            return TaskPrompt(task=task, text=text, answers=answers, tokens=tokens)
        # A tokenizer may count more for a text than for its parts.
        aim -= tokens - length


def named(reply: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that a reply names as whole words, as RULER scores."""
    found = set(re.findall(r"\w+", reply.lower()))
    return sum(answer.lower() in found for answer in answers) / len(answers)


def _assembled(
    rng: random.Random, task: TaskName, tokens: int, count: Count
) -> tuple[str, tuple[str, ...]]:
    before = EXAMPLES.get(task, "")
    # The question is as long as the one of a short draft, up to a few tokens of its names.
    writer = TASKS[task].writer
    draft = _cue(writer(random.Random(0), _DRAFT, count_words).question)
    exercise = writer(rng, tokens - count(before) - count(draft), count)
    return before + exercise.text + _cue(exercise.question), exercise.answers


_DRAFT = 400
"""Words of a draft."""


def _cue(question: str) -> str:
    return f"{''.join(QUESTION_HEAD)} {question}{''.join(ANSWER_HEAD)}"


Writer = Callable[[random.Random, int, Count], Exercise]
"""Function that writes an exercise of at most so many tokens, or a few more or fewer."""


# --- retrieval -----------------------------------------------------------------------------------

_VALUES_OF_A_KEY = 3
_OTHER_KEYS = 3


def _multi_value(rng: random.Random, room: int, count: Count) -> Exercise:
    asked, *others = rng.sample(KEYS, 1 + _OTHER_KEYS)
    values = rng.sample(VALUES, _VALUES_OF_A_KEY + _OTHER_KEYS)
    keys = [asked] * _VALUES_OF_A_KEY + others
    pairs = list(zip(keys, values, strict=True))
    rng.shuffle(pairs)
    statements = [f" One password of {key} is {value}." for key, value in pairs]
    return Exercise(
        text=_scattered(rng, statements, room, count),
        question=f"What are all passwords of {asked}, in the order of the text?",
        answers=tuple(value for key, value in pairs if key == asked),
    )


# --- tracing -------------------------------------------------------------------------------------

_CHAINS = 3
_CHAIN = 4
"""Variables of a chain."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _variables(rng: random.Random, room: int, count: Count) -> Exercise:
    names: dict[str, None] = {}
    while len(names) < _CHAINS * _CHAIN:
        name = "".join(rng.sample(_LETTERS, 5))
        if name not in EXAMPLES["variables"]:
            names[name] = None
    # An order of the chains in which each assigns its variables one after another.
    order = [chain for chain in range(_CHAINS) for _ in range(_CHAIN)]
    rng.shuffle(order)
    values = [str(value) for value in rng.sample(range(20_000, 100_000), _CHAINS)]
    chains: list[list[str]] = [[] for _ in values]
    statements = []
    for name, chain in zip(names, order, strict=True):
        source = f"VAR {chains[chain][-1]}" if chains[chain] else values[chain]
        statements.append(f" VAR {name} = {source}.")
        chains[chain].append(name)
    return Exercise(
        text=_scattered(rng, statements, room, count),
        question=_VARIABLES.format(value=values[0]),
        answers=tuple(chains[0]),
    )


_VARIABLES = (
    "Which variables have the value {value}, directly or through other variables, in the order of "
    "the text?"
)


# --- aggregation ---------------------------------------------------------------------------------

_COMMON = (6, 5, 4)
"""How often the words asked for occur, as multiples of what any other word does at most."""
_WORDS = tuple(dict.fromkeys([*NOUNS, *ADJECTIVES, *VERBS]))
_MOST_FREQUENT = "Which three words are most frequent in the list, the most frequent first?"


def _common_words(rng: random.Random, room: int, count: Count) -> Exercise:
    words = rng.sample(_WORDS, len(_WORDS))

    def counts(entries: int) -> list[int]:
        most = len(words) - len(_COMMON)
        times = -(-entries // (most + sum(_COMMON)))
        rest = max(1, entries - times * sum(_COMMON))
        each, more = divmod(rest, min(most, rest))
        others = [each + 1] * more + [each] * (min(most, rest) - more)
        return [times * multiple for multiple in _COMMON] + others

    return _listed(rng, words, counts, room, count)


_SYLLABLES = [f"{a}{b}" for a, b in product("bdfgklmnprstvz", "aeiou")]


def _frequent_words(rng: random.Random, room: int, count: Count) -> Exercise:
    syllables = rng.sample(_SYLLABLES, len(_SYLLABLES))
    words = ["".join(rng.sample(syllables, 3)) for _ in range(2000)]
    words = list(dict.fromkeys(words))

    def counts(entries: int) -> list[int]:
        # The sum of 1 / rank² is 1.64.
        shares = (round(entries / 1.64 / rank**2) for rank in range(1, len(words) + 1))
        found = [times for times in shares if times]
        return found + [1] * max(0, min(entries - sum(found), len(words) - len(found)))

    return _listed(rng, words, counts, room, count)


def _listed(
    rng: random.Random,
    words: Sequence[str],
    counts: Callable[[int], list[int]],
    room: int,
    count: Count,
) -> Exercise:
    """Return a list in which words occur as often as `counts` says for so many entries.

    Raises:
        ValueError: the three most frequent words do not stand out in so few entries.
    """
    order = rng.getrandbits(64)

    def text(entries: int) -> tuple[str, list[int]]:
        times = counts(entries)
        listed = [word for word, often in zip(words, times, strict=False) for _ in range(often)]
        random.Random(order).shuffle(listed)
        return " ".join(listed), times

    # The tokens of an entry depend on the tokenizer and, a little, on the words.
    entries = room
    for _ in range(3):
        found = max(1, count(text(max(entries, 32))[0]))
        entries = max(entries, 32) * room // found
    while True:
        listed, times = text(entries)
        ranked = [*times, 0][:4]
        if entries < 20 or len(times) < 3 or sorted(set(ranked), reverse=True) != ranked:
            raise ValueError(f"a list of words does not fit into {room} tokens")
        if count(listed) <= room:
            return Exercise(text=listed, question=_MOST_FREQUENT, answers=tuple(words[:3]))
        entries -= max(1, entries // 100)


# --- question answering --------------------------------------------------------------------------


class Person(NamedTuple):
    """What a passage says of a person."""

    name: str
    born: str
    lives: str
    owns: str


_ASKED = {
    "born": "In which city was {who} born?",
    "lives": "In which city does {who} live?",
    "owns": "What does {who} own?",
}
"""Question for each field of a person."""
_FEWEST_PEOPLE = 4


def _one_passage(rng: random.Random, room: int, count: Count) -> Exercise:
    people, _, text = _biographies(rng, room, count)
    person, field = rng.choice(people), rng.choice(list(_ASKED))
    return Exercise(text, _ASKED[field].format(who=person.name), (getattr(person, field),))


def _two_passages(rng: random.Random, room: int, count: Count) -> Exercise:
    people, teachers, text = _biographies(rng, room, count)
    index, field = rng.randrange(len(people)), rng.choice(list(_ASKED))
    question = _ASKED[field].format(who=f"the teacher of {people[index].name}")
    return Exercise(text, question, (getattr(teachers[index], field),))


def _biographies(
    rng: random.Random, room: int, count: Count
) -> tuple[list[Person], list[Person], str]:
    """Return people, the teacher of each, and a text with a passage about each.

    Many share a first or a second name, so that half of a name is a distractor.

    Raises:
        ValueError: too few passages fit.
    """
    cost = count(_passage(Person("Nabamo Lusiri", "Lisbon", "Oslo", "falcon"), "Nabamo Vitoke"))
    number = room * 2 // (3 * cost)
    if number < _FEWEST_PEOPLE:
        raise ValueError(f"{_FEWEST_PEOPLE} passages do not fit into {room} tokens")
    parts = ["".join(rng.sample(_SYLLABLES, 3)).capitalize() for _ in range(max(6, number))]
    parts = list(dict.fromkeys(parts))
    names: dict[str, None] = {}
    while len(names) < number:
        # Every other name repeats the first part of the one before it.
        first = list(names)[-1].split()[0] if len(names) % 2 else rng.choice(parts)
        names[f"{first} {rng.choice(parts)}"] = None
    people = [
        Person(name, rng.choice(KEYS), rng.choice(KEYS), rng.choice(VALUES)) for name in names
    ]
    teachers = people[1:] + people[:1]
    pairs = list(zip(people, teachers, strict=True))
    rng.shuffle(pairs)
    passages = [_passage(person, teacher.name) for person, teacher in pairs]
    text = _scattered(rng, passages, room, count)
    return [person for person, _ in pairs], [teacher for _, teacher in pairs], text


def _passage(person: Person, teacher: str) -> str:
    return (
        f"\n{person.name} was born in {person.born} and lives in {person.lives}."
        f" The teacher of {person.name} is {teacher}. {person.name} owns one {person.owns}."
    )


# --- text ----------------------------------------------------------------------------------------


def _scattered(rng: random.Random, statements: Sequence[str], room: int, count: Count) -> str:
    """Return filler with the statements between its sentences, in their order.

    Raises:
        ValueError: there is no room for filler.
    """
    left = room - count("".join(statements))
    if left < SHORTEST_SENTENCE:
        raise ValueError(f"{len(statements)} statements do not fit into {room} tokens")
    filler = ["".join(words) for words in filler_sentences(rng, left, count)]
    # The last sentence may be cut off, so that no statement stands behind it.
    places = Counter(rng.randrange(max(1, len(filler))) for _ in statements)
    waiting = iter(statements)
    pieces = []
    for place, sentence in enumerate(filler or [""]):
        pieces += [next(waiting) for _ in range(places[place])]
        pieces.append(sentence)
    return "".join(pieces).lstrip()


@dataclass(frozen=True)
class Task:
    """A way to write exercises, and the category that it belongs to."""

    category: Category
    writer: Writer


TASKS: dict[TaskName, Task] = {
    "multi_value": Task("retrieval", _multi_value),
    "variables": Task("tracing", _variables),
    "common_words": Task("aggregation", _common_words),
    "frequent_words": Task("aggregation", _frequent_words),
    "one_passage": Task("question answering", _one_passage),
    "two_passages": Task("question answering", _two_passages),
}


def _example(text: str, question: str, answer: str) -> str:
    return f"{text}{_cue(question)} {answer}\n\n"


EXAMPLES: dict[TaskName, str] = {
    "variables": _example(
        "VAR QZKAB = 10394. VAR LUNHO = 15210. VAR WEPTO = VAR QZKAB.",
        _VARIABLES.format(value="10394"),
        "QZKAB, WEPTO",
    ),
    "common_words": _example(
        "seven nine three seven three nine seven one three seven",
        _MOST_FREQUENT,
        "seven, three, nine",
    ),
    "frequent_words": _example(
        "wuxa wuxi wuxo wuxa wuxi wuxa wuxi wuxa wuxo wuxu",
        _MOST_FREQUENT,
        "wuxa, wuxi, wuxo",
    ),
}
"""Worked examples before the text of tasks whose form a model may not know; a blank line ends
them."""

"""Questions that ask for needles, and what counts as their answer.

Four kinds (compare NeedleBench and RULER):

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from csps.models.needle_prompts.haystack import Haystack
from csps.models.needle_prompts.words import split_words

Kind = Literal["single", "multi", "multi_key", "two_hop"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Order = Literal["first", "last"]
"""Where a question stands: before its text or behind it."""
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
        """What stands before the text and what behind it, in a completion prompt."""
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
    """Whether a reply is the answer: the same words, whatever the spacing around them."""
    return split_words(answer.strip()) == split_words(reply.strip())

"""Generate one prompt from its configuration alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from csps.models.needle_prompts.filler import filler_of
from csps.models.needle_prompts.haystack import (
    KINDS,
    ORDERS,
    Fact,
    Haystack,
    Kind,
    Needle,
    Order,
    Question,
    ask,
    build_haystack,
    draw_facts,
)
from csps.models.needle_prompts.words import KEYS, VALUES, Count, count_words

_KEYS_ASKED_TOGETHER = 3


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """One prompt, reproducible from its fields."""

    length: int = 1024
    """Tokens of the whole prompt, question included, without special tokens."""
    kind: Kind = "multi_key"
    needles: int = 4
    """Needles in the haystack: those asked for and the distractors. ``single`` has just one."""
    depth: float | None = None
    """Depth of the (first) needle asked for: 0 is the start of the text, 1 its end, None random.
    All other needles lie at random depths."""
    filler: str = "sentences"
    """Kind (`filler.FILLER_KINDS`), or the path of a text file."""
    order: Order = "last"
    """Position of the question: before the text or behind it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {self.order!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"depth must lie between 0 and 1, not {self.depth}")
        if not 1 <= self.needles <= min(len(KEYS), len(VALUES)):
            raise ValueError(f"needles must be between 1 and {len(VALUES)}, not {self.needles}")
        if self.kind in ("multi", "two_hop") and self.needles < 2:
            raise ValueError(f"a {self.kind} question needs at least two needles")


@dataclass(frozen=True, kw_only=True)
class NeedlePrompt:
    """A haystack with one question: the text for a model, and the answer it should give."""

    config: NeedleConfig
    haystack: Haystack
    question: Question
    tokens: int
    """Length of ``text`` by the count function in use, without special tokens."""

    @property
    def text(self) -> str:
        """Prompt for /v1/completions."""
        before, behind = self.question.around(self.config.order)
        return before + self.haystack.text + behind

    @property
    def chat_text(self) -> str:
        """Content of a user message for /v1/chat/completions."""
        before, _ = self.question.around(self.config.order)
        return before + self.haystack.text + ("" if before else self.question.text)

    @property
    def answer(self) -> str:
        """The one right answer."""
        return self.question.answer

    @property
    def asked(self) -> tuple[Needle, ...]:
        """Needles that the answer needs, in the order of the answer."""
        return tuple(self.haystack.needles[i] for i in self.question.needles)


def generate(config: NeedleConfig, count: Count | None = None) -> NeedlePrompt:
    """Generate the prompt that a config describes; never longer than asked for.

    Raises:
        OSError: the filler is a file that cannot be read.
        ValueError: the needles do not fit into its length.
    """
    aim = config.length
    while True:
        prompt = _generate(config, aim, count)
        if prompt.tokens <= config.length:
            return prompt
        # A tokenizer may count more for a text than for its sentences.
        aim -= prompt.tokens - config.length


def _generate(config: NeedleConfig, length: int, count: Count | None) -> NeedlePrompt:
    rng = random.Random(repr(config))
    needles = 1 if config.kind == "single" else config.needles
    hops = int(config.kind == "two_hop")
    depths = [] if config.depth is None else [config.depth]
    facts = draw_facts(rng, needles, depths=depths, hops=hops)
    asked = {"single": 1, "multi_key": 1, "multi": min(needles, _KEYS_ASKED_TOGETHER), "two_hop": 2}
    indices = range(asked[config.kind])
    size = count or count_words
    around = ask(_bare(facts), config.kind, indices).around(config.order)
    room = length - sum(map(size, around))
    haystack = build_haystack(rng, room, facts, count, filler_of(config.filler))
    question = ask(haystack, config.kind, indices)
    before, behind = question.around(config.order)
    return NeedlePrompt(
        config=config,
        haystack=haystack,
        question=question,
        tokens=size(before + haystack.text + behind),
    )


def _bare(facts: Sequence[Fact]) -> Haystack:
    """Return a haystack of needles only: enough to phrase a question, and to know its length."""
    needles = [Needle(**fact._asdict(), chars=(0, 0), words=(0, 0)) for fact in facts]
    return Haystack(words=(), needles=tuple(needles), tokens=0)

"""Define the recipe: stretches of training, each with its mixture of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from csps.tools.train_needle.model import CONTEXT, DEEP, NEEDLE, Architecture

ALL_FILLERS = {
    "sentences": 3.0,
    "shuffled": 2.0,
    "names": 2.0,
    "english": 3.0,
    "code": 2.0,
    "bytes": 1.0,
    "mixed": 2.0,
}
"""Weights of the fillers."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training with one mixture of data."""

    name: str
    steps: int
    batch: int
    """Sequences in a step."""
    tokens: int
    """Length of a haystack; of a whole sequence when copying."""
    needles: tuple[int, int] = (1, 1)
    """Fewest and most needles in a haystack."""
    questions: int = 0
    """Questions to each haystack."""
    fillers: Mapping[str, float] = field(default_factory=lambda: {"sentences": 1.0})
    """Weights of the kinds of filler (`texts.training_fillers`)."""
    first: float = 0.0
    """Fraction of the questions before the text, and of the texts that see one there."""
    recalled: bool = False
    """Ask the first layer that answers for the key of a question before the text, so that later
    layers learn to look it up."""
    second_look_up: bool = False
    """Start with a copy of the second layer's attention in the third, so that a key recalled by the
    second can be looked up."""
    longest: int = CONTEXT
    """Longest length, in tokens, that the haystack pretends to have."""
    rivals: float = 1.0
    """Most copies of a fact that a question does not ask for."""
    look_back: bool = False
    """Train the first layer to see every key from its value (`loss.overlooked`)."""
    copying: float = 0.0
    """Fraction of the steps that train copying instead of questions."""
    hints: bool = False
    """Ask for the value at every word from the key on, also inside the question."""
    everyday: bool = False
    """Include what users do: values that are ordinary words, questions in the middle of a message,
    and messages without any question (`text_sequences.REPLY_TO_NO_QUESTION`)."""
    idle: float = 0.0
    """Fraction of the sequences that are short and have neither facts nor questions."""
    mentions: float = 0.0
    """Fraction of the filler's nouns that name a key without its value."""
    misspelled: float = 0.0
    """Fraction of the haystacks with words outside the vocabulary, spelled in bytes."""
    continued: int = 0
    """Number of filler words of each haystack to predict, so that the model writes some English."""
    pool: int | None = None
    """Fewest different words in a text to copy; None: all words."""
    hard_kinds: float = 0.0
    """Fraction of the questions that ask for two hops, and of all others that ask for several
    needles."""
    several: float | None = None
    """Fraction of the questions without two hops that ask for several needles; None:
    `hard_kinds`."""
    learning_rate: tuple[float, float] = (2e-3, 2e-3)
    """Rates at the stage's first and last step, linear between."""


STAGES = (
    Stage(name="copy", steps=375, batch=96, tokens=64, copying=1.0),
    # Only the form of an answer: one of the values, then the end.
    Stage(
        name="facts",
        steps=75,
        batch=32,
        tokens=96,
        needles=(2, 8),
        questions=6,
        copying=0.25,
        longest=4096,
    ),
    # Words repeat, so the word before does not determine the next one, but the two before do: the
    # step from "Lisbon" to "Lisbon is".
    Stage(name="pairs", steps=100, batch=48, tokens=128, copying=1.0, pool=16),
    Stage(
        name="lookup",
        steps=100,
        batch=32,
        tokens=96,
        needles=(2, 8),
        questions=6,
        copying=0.25,
        pool=16,
        longest=256,
        hard_kinds=0.5,
    ),
    Stage(
        name="hints",
        steps=150,
        batch=24,
        tokens=96,
        needles=(2, 8),
        questions=6,
        copying=0.1,
        pool=16,
        longest=256,
        hard_kinds=0.4,
        hints=True,
    ),
    # From here on all kinds of filler, and questions before the text.
    Stage(
        name="text",
        steps=200,
        batch=12,
        tokens=256,
        fillers=ALL_FILLERS,
        needles=(1, 20),
        questions=12,
        first=0.25,
        hard_kinds=0.4,
        hints=True,
        learning_rate=(2e-3, 1.5e-3),
    ),
    Stage(
        name="long",
        steps=300,
        batch=8,
        tokens=384,
        fillers=ALL_FILLERS,
        needles=(1, 40),
        questions=12,
        first=0.3,
        hard_kinds=0.5,
        misspelled=0.1,
        continued=48,
        learning_rate=(1.5e-3, 1.25e-3),
    ),
    # And what users do: how to behave when nothing is asked, and texts that name keys in passing.
    Stage(
        name="polish",
        steps=700,
        batch=8,
        tokens=384,
        fillers=ALL_FILLERS,
        needles=(1, 60),
        questions=12,
        first=0.3,
        hard_kinds=0.5,
        everyday=True,
        idle=0.15,
        mentions=0.01,
        misspelled=0.1,
        continued=96,
        learning_rate=(1.25e-3, 1e-5),
    ),
    # What is still missed is the one key of a question far before the text: it has to be recalled
    # before it can be looked up, and after "hints" the second layer looks up and no other does.
    Stage(
        name="first",
        steps=250,
        batch=16,
        tokens=96,
        fillers=ALL_FILLERS,
        needles=(2, 8),
        questions=6,
        first=0.5,
        recalled=True,
        second_look_up=True,
        hard_kinds=0.3,
        longest=256,
        learning_rate=(1.5e-3, 1.5e-3),
    ),
    Stage(
        name="finish",
        steps=400,
        batch=8,
        tokens=320,
        fillers=ALL_FILLERS,
        needles=(1, 60),
        questions=12,
        first=0.4,
        recalled=True,
        hard_kinds=0.5,
        everyday=True,
        idle=0.1,
        mentions=0.01,
        misspelled=0.1,
        continued=48,
        learning_rate=(1.2e-3, 1e-5),
    ),
    # Once more with larger batches and more facts asked for at once.
    Stage(
        name="settle",
        steps=250,
        batch=12,
        tokens=320,
        fillers=ALL_FILLERS,
        needles=(2, 60),
        questions=12,
        first=0.4,
        recalled=True,
        hard_kinds=0.6,
        everyday=True,
        idle=0.05,
        mentions=0.01,
        misspelled=0.05,
        continued=32,
        learning_rate=(6e-4, 1e-5),
    ),
    # What is missed now is a fact among many. Some keys are not seen from their values at all, and
    # others are told apart from sixty but not from hundreds.
    Stage(
        name="sharpen",
        steps=900,
        batch=8,
        tokens=320,
        fillers=ALL_FILLERS,
        needles=(4, 60),
        questions=12,
        first=0.5,
        recalled=True,
        look_back=True,
        rivals=16.0,
        hard_kinds=0.35,
        several=0.6,
        everyday=True,
        idle=0.05,
        mentions=0.01,
        misspelled=0.05,
        continued=32,
        learning_rate=(1e-3, 1e-5),
    ),
)

_BY_NAME = {stage.name: stage for stage in STAGES}
SHORT_STAGES = (
    *STAGES[:6],
    replace(_BY_NAME["long"], learning_rate=(1.5e-3, 1e-5)),
)
"""The stages that learn questions behind the text, a third of the steps; questions before it stay
unanswered."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A network and how it is trained."""

    architecture: Architecture = NEEDLE
    stages: tuple[Stage, ...] = STAGES


RECIPES = {
    "needle": Recipe(),
    "deep": Recipe(architecture=DEEP, stages=SHORT_STAGES),
}
"""Recipes by their name on the command line."""


def schedule(stages: Sequence[Stage]) -> Iterator[tuple[int, Stage, int]]:
    """Yield (step of the run, stage, step of the stage), from 0."""
    total = 0
    for stage in stages:
        for step in range(stage.steps):
            yield total, stage, step
            total += 1

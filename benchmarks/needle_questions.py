"""Questions whose answer's first token shows whether prefill retained what it needs.

Every question has a haystack of its own, prefilled as on a server. Sparse attention scores
importance by the end of the prompt, so KV computed for one question must not be used for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from csps.models.needle_prompts.haystack import Kind
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.evaluation.cases import Evaluation, cases

KINDS: Final[tuple[Kind, ...]] = ("single", "multi_key", "two_hop")
"""The kinds whose answers begin with the word looked up."""


@dataclass(frozen=True, kw_only=True)
class NeedleQuestion:
    """A prompt and the one right continuation."""

    kind: Kind
    tokens: np.ndarray
    """(L,) int32, special tokens included."""
    answer: int
    """First token of the answer."""


def questions(
    model_dir: Path, *, length: int, count: int, kinds: tuple[Kind, ...] = KINDS
) -> Iterator[NeedleQuestion]:
    """Return so many questions of each kind, at even depths of a haystack of `length`."""
    tokenizer = Tokenizer(model_dir)
    for kind in kinds:
        for case in cases(Evaluation(questions=count), kind, length):
            (question,) = case.questions
            prompt = case.haystack.text + question.completion_text
            tokens = tokenizer.encode(prompt)
            answered = tokenizer.encode(f"{prompt} {question.answer}")
            assert answered[: len(tokens)] == tokens, "the tokenizer joins question and answer"
            yield NeedleQuestion(
                kind=kind, tokens=np.array(tokens, dtype="<i4"), answer=answered[len(tokens)]
            )

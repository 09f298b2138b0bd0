"""Ask questions of several kinds: needle prompts, and the next token of plain text.

Shape suffixes: s scored rows, v vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from csps.configurator.regressors.samples import PLAIN_TEXT
from csps.models.needle_prompts.filler import filler_of
from csps.models.needle_prompts.haystack import Kind, Order, build_haystack
from csps.services.evaluation.cases import Case, Evaluation, cases
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy.emulated_attention import (
    EmulatedPrompt,
    FirstLayer,
    SharedText,
)

QUESTIONS = 400
"""Questions of each kind, per point."""
ROUND = 40
"""Questions of a round, after which the profile decides if more are needed."""
SHARE = 8
"""Questions to one haystack, which has as many facts; for two hops, twice as many."""
TEXT = "english"
"""Filler of plain text."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of one prompt."""

    questions: int
    right_exact: int
    right: int
    divergence: float
    """Mean KL divergence, in nats, from exact attention's next token to this one's."""


class AskedPrompt(Protocol):
    """A prompt ready to be computed."""

    @property
    def prompt(self) -> EmulatedPrompt:
        """The prompt with its answer."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, without its answer."""
        ...

    def score(self, exact_sv: Tensor, sparse_sv: Tensor) -> Score:
        """Score logits of sparse attention against those of exact attention."""
        ...


@dataclass(frozen=True, kw_only=True)
class AskedQuestion:
    """One question.

    An answer is right if greedy decoding would give it in full: each token after the right ones
    before it, and the end after the last one.
    """

    prompt: EmulatedPrompt
    tokens: int
    answer: list[int]
    stop_ids: frozenset[int]

    def score(self, exact_sv: Tensor, sparse_sv: Tensor) -> Score:
        """Score as `AskedPrompt.score` does."""
        return Score(
            questions=1,
            right_exact=self._right(exact_sv),
            right=self._right(sparse_sv),
            divergence=_divergence(exact_sv, sparse_sv),
        )

    def _right(self, logits_sv: Tensor) -> bool:
        *generated, last = logits_sv.argmax(dim=1).tolist()
        return generated == self.answer and last in self.stop_ids


@dataclass(frozen=True, kw_only=True)
class AskedText:
    """Plain text. A next token is right if it is exact attention's likeliest."""

    prompt: EmulatedPrompt
    tokens: int

    def score(self, exact_sv: Tensor, sparse_sv: Tensor) -> Score:
        """Score as `AskedPrompt.score` does."""
        agree = exact_sv.argmax(dim=1) == sparse_sv.argmax(dim=1)
        return Score(
            questions=len(agree),
            right_exact=len(agree),
            right=int(agree.sum()),
            divergence=_divergence(exact_sv, sparse_sv),
        )


class QuestionKind(Protocol):
    """A kind of questions, asked in rounds."""

    @property
    def name(self) -> str:
        """Name in the scaling information base."""
        ...

    @property
    def rounds(self) -> int:
        """Rounds per point."""
        ...

    def asked(self, model: LocalModel, tokens: int, round_index: int) -> Iterator[AskedPrompt]:
        """Yield the prompts of a round, which are always the same."""
        ...


@dataclass(frozen=True)
class NeedleQuestions:
    """Facts hidden in generated text."""

    kind: Kind
    order: Order
    seed: int = 1
    """Seed of the facts and texts."""

    @property
    def name(self) -> str:
        """Name in the scaling information base."""
        return f"{self.kind}, question {self.order}"

    @property
    def rounds(self) -> int:
        """Rounds per point."""
        return QUESTIONS // ROUND

    def asked(self, model: LocalModel, tokens: int, round_index: int) -> Iterator[AskedQuestion]:
        """Yield the questions of a round."""
        evaluation = Evaluation(
            kinds=(self.kind,),
            questions=QUESTIONS,
            share=SHARE,
            needles=SHARE,
            order=self.order,
            seed=self.seed,
        )
        haystacks = cases(evaluation, self.kind, tokens - 1, model.count)
        per_round = ROUND // SHARE
        for case in islice(haystacks, round_index * per_round, (round_index + 1) * per_round):
            yield from _asked(model, case)


@dataclass(frozen=True)
class PlainText:
    """The next token, in the last quarter of real text. Each round has a text of its own."""

    name: str = PLAIN_TEXT
    rounds: int = 4

    def asked(self, model: LocalModel, tokens: int, round_index: int) -> Iterator[AskedText]:
        """Yield the text of a round."""
        rng = random.Random(f"plain text/{tokens}/{round_index}")
        text = build_haystack(rng, tokens, (), model.count, filler_of(TEXT)).text
        ids = model.tokenizer.encode(text).ids[:tokens]
        scored = range(len(ids) - len(ids) // 4, len(ids))
        prompt = EmulatedPrompt(model.network, FirstLayer.of(model.network, ids), scored)
        yield AskedText(prompt=prompt, tokens=len(ids))


QUESTION_KINDS: tuple[QuestionKind, ...] = (
    NeedleQuestions("multi_key", "last"),
    NeedleQuestions("two_hop", "last"),
    NeedleQuestions("multi_key", "first"),
    NeedleQuestions("two_hop", "first"),
    NeedleQuestions("multi", "last"),
    PlainText(),
)


def _asked(model: LocalModel, case: Case) -> Iterator[AskedQuestion]:
    """Yield the questions of a case; compute the first layer of their common text once."""
    network = model.network
    texts: dict[tuple[int, ...], SharedText] = {}
    firsts: dict[str, FirstLayer] = {}
    for question in case.questions:
        before, cue = question.around(case.order)
        if before not in firsts:
            begin = len(model.tokenizer.encode(before).ids)
            ids = model.tokenizer.encode(before + case.haystack.text).ids
            key = (begin, *ids[begin:])
            if key not in texts:
                texts = {key: SharedText.of(network, ids[begin:], begin)}
            firsts = {before: texts[key].behind(network, ids[:begin])}
        first = firsts[before]
        behind, answer = (_encoded(model, text) for text in (cue, f" {question.answer}"))
        tokens = len(first.x_nd) + len(behind)
        scored = range(tokens - 1, tokens + len(answer))
        yield AskedQuestion(
            prompt=EmulatedPrompt(network, first.followed_by(network, behind + answer), scored),
            tokens=tokens,
            answer=answer,
            stop_ids=model.stop_ids,
        )


def _encoded(model: LocalModel, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _divergence(exact_sv: Tensor, sparse_sv: Tensor) -> float:
    exact_log, sparse_log = exact_sv.log_softmax(dim=1), sparse_sv.log_softmax(dim=1)
    return float((exact_log.exp() * (exact_log - sparse_log)).sum(dim=1).mean())

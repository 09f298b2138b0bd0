"""Ask questions of several kinds: needle prompts, RULER's tasks, and the next token of texts.

Each kind belongs to one of RULER's categories. Where a model answers no kind of a category with
exact attention, the next tokens of that category's prompts stand in.

Shape suffixes: s scored rows, v vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from csps.configurator.regressors.samples import (
    ENOUGH,
    ENOUGH_POSITIONS,
    NEXT_TOKEN,
    PLAIN_TEXT,
    RETRIEVES,
    category_of,
    kind_name,
)
from csps.models.needle_prompts.filler import filler_of
from csps.models.needle_prompts.haystack import Kind, Order, build_haystack
from csps.models.needle_prompts.tasks import (
    CATEGORIES,
    TASK_NAMES,
    TASKS,
    Category,
    TaskName,
    write_prompt,
)
from csps.models.network.spec import ModelSpec
from csps.protocols.attention.csa import CsaPlan
from csps.services.evaluation.cases import Case, Evaluation, cases
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy.emulated_attention import (
    EmulatedGroup,
    EmulatedPrompt,
    FirstLayer,
    SharedText,
)

QUESTIONS = ENOUGH
"""Questions of each kind, per point."""
ROUND = 40
"""Questions of a round, after which the profile decides if more are needed."""
SHARE = 8
"""Questions to one haystack, which has as many facts; for two hops, twice as many."""
ANSWERS = 0.6
"""Share of a round that exact attention must answer. It is larger than `RETRIEVES`, so that more
rounds hardly fall below that."""
MOST_POSITIONS = 2_048
"""Positions of one text that are compared at most, because their logits are kept."""
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
    before it, and an end after the last one.
    """

    prompt: EmulatedPrompt
    tokens: int
    answer: list[int]
    ends: frozenset[int]
    """Tokens that end the answer."""

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
        return generated == self.answer and last in self.ends


@dataclass(frozen=True, kw_only=True)
class AskedText:
    """A text. A next token is right if it is exact attention's likeliest."""

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


@dataclass(frozen=True)
class TaskQuestions:
    """Questions of one of RULER's tasks, each behind a text of its own.

    RULER counts the answers that a reply names. So whatever continues no word ends an answer.
    """

    task: TaskName
    seed: int = 1
    """Seed of the texts."""

    @property
    def name(self) -> str:
        """Name in the scaling information base."""
        return kind_name(TASKS[self.task].category, self.task)

    @property
    def rounds(self) -> int:
        """Rounds per point."""
        return QUESTIONS // ROUND

    def asked(self, model: LocalModel, tokens: int, round_index: int) -> Iterator[AskedQuestion]:
        """Yield the questions of a round."""
        network, ends = model.network, model.stop_ids | model.word_starts
        for index in range(round_index * ROUND, (round_index + 1) * ROUND):
            written = write_prompt(self.task, tokens - 1, f"{self.seed}/{index}", model.count)
            prompt = model.tokenizer.encode(written.text).ids
            answer = _encoded(model, f" {written.answer}")
            scored = range(len(prompt) - 1, len(prompt) + len(answer))
            first = FirstLayer.of(network, prompt + answer)
            yield AskedQuestion(
                prompt=EmulatedPrompt(network, first, scored),
                tokens=len(prompt),
                answer=answer,
                ends=ends,
            )


@dataclass(frozen=True)
class NextTokens:
    """The next token, in the last quarter of a category's prompts.

    They stand in for questions where a model answers none of the category's.
    """

    category: Category
    seed: int = 1
    rounds: int = 4

    @property
    def name(self) -> str:
        """Name in the scaling information base."""
        return kind_name(self.category, NEXT_TOKEN)

    def asked(self, model: LocalModel, tokens: int, round_index: int) -> Iterator[AskedText]:
        """Yield the texts of a round; all rounds have `ENOUGH_POSITIONS` positions."""
        tasks = [name for name in TASK_NAMES if TASKS[name].category == self.category]
        # Prompts are a little shorter than asked for, and their quarters as well.
        positions = min(tokens * 15 // 64, MOST_POSITIONS)
        texts = -(-ENOUGH_POSITIONS // (self.rounds * positions))
        for index in range(round_index * texts, (round_index + 1) * texts):
            task = tasks[index % len(tasks)]
            written = write_prompt(task, tokens - 1, f"{self.seed}/{index}", model.count)
            ids = model.tokenizer.encode(written.text).ids
            scored = range(len(ids) - positions, len(ids))
            first = FirstLayer.of(model.network, ids)
            yield AskedText(prompt=EmulatedPrompt(model.network, first, scored), tokens=len(ids))


QUESTION_KINDS: tuple[QuestionKind, ...] = (
    NeedleQuestions("multi_key", "last"),
    NeedleQuestions("two_hop", "last"),
    NeedleQuestions("multi_key", "first"),
    NeedleQuestions("two_hop", "first"),
    NeedleQuestions("multi", "last"),
    *(TaskQuestions(task) for task in TASK_NAMES),
    *(NextTokens(category) for category in CATEGORIES),
    PlainText(),
)


def answered_kinds(
    kinds: Sequence[QuestionKind],
    model: LocalModel,
    tokens: int,
    measured: Mapping[str, tuple[int, int]],
) -> list[QuestionKind]:
    """Return the kinds worth asking at a length, in their order.

    They are those that the model answers with exact attention. The next tokens of a category are
    worth it if no other kind of the category is.

    Args:
        measured: questions and right answers of exact attention, of kinds that were asked before.
    """
    next_tokens = {kind_name(category, NEXT_TOKEN): category for category in CATEGORIES}
    failed = {category for name, category in next_tokens.items() if name in measured}
    answered: dict[str, bool] = {}
    for kind in kinds:
        category = category_of(kind.name)
        if category is None or kind.name in next_tokens:
            continue
        if kind.name in measured:
            questions, right = measured[kind.name]
            answered[kind.name] = right >= RETRIEVES * questions
        else:
            answered[kind.name] = category not in failed and _answers(kind, model, tokens)
    succeeded = {category_of(name) for name, right in answered.items() if right}
    return [
        kind
        for kind in kinds
        if answered.get(kind.name, next_tokens.get(kind.name) not in succeeded)
    ]


def _answers(kind: QuestionKind, model: LocalModel, tokens: int) -> bool:
    """Return True if exact attention answers `ANSWERS` of a round."""
    right = wrong = 0
    for asked in kind.asked(model, tokens, 0):
        logits_sv = exact_logits(model, asked)
        score = asked.score(logits_sv, logits_sv)
        right += score.right_exact
        wrong += score.questions - score.right_exact
        # The rest of the round decides nothing.
        if right >= ANSWERS * ROUND or wrong > (1 - ANSWERS) * ROUND:
            break
    return right >= ANSWERS * (right + wrong)


def exact_logits(model: LocalModel, asked: AskedPrompt) -> Tensor:
    """Compute a prompt's logits with exact attention, (s, v)."""
    return asked.prompt.logits(exact_group(model.network.spec, asked.tokens))


def exact_group(spec: ModelSpec, tokens: int) -> EmulatedGroup:
    """Return a group of one instance, which attends exactly."""
    plan = CsaPlan(locations=("0-0-0",), levels=1)
    return EmulatedGroup(spec=spec, plan=plan, tokens=tokens)


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
            ends=model.stop_ids,
        )


def _encoded(model: LocalModel, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _divergence(exact_sv: Tensor, sparse_sv: Tensor) -> float:
    exact_log, sparse_log = exact_sv.log_softmax(dim=1), sparse_sv.log_softmax(dim=1)
    return float((exact_log.exp() * (exact_log - sparse_log)).sum(dim=1).mean())

"""Accuracy of the included model by filler, kind of question, its place, and length.

    python benchmarks/needle_accuracy.py --json accuracy.json
    python benchmarks/needle_accuracy.py --place first --dtype bfloat16 --json first-bf16.json

All kinds of questions are asked about the same haystacks, so that a long text is computed once for
hundreds of them. A question before its text has a text of its own. Measurements in the file are not
repeated, so an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from csps.configurator.regressors.samples import wilson
from csps.models.needle_prompts.filler import FILLER_KINDS
from csps.models.needle_prompts.haystack import ORDERS, Kind, Order, Question, ask, is_correct
from csps.models.needle_prompts.words import split_words
from csps.services.evaluation.answerers import LocalAnswerer
from csps.services.evaluation.cases import Case, Evaluation, cases
from csps.services.evaluation.local_model import LocalModel
from csps.services.settings.settings import shipped_models

SHARED: Final = {1024: (10, 20), 4096: (4, 50), 16384: (2, 100), 65536: (1, 100)}
"""Haystacks, and two-step questions to each, by length. A haystack has twice as many facts."""
OWN: Final = {1024: 200, 4096: 200, 16384: 20, 65536: 2}
"""Questions of each kind that precede a text of their own, by length."""
OWN_KINDS: Final[tuple[Kind, ...]] = ("multi_key", "two_hop")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Conditions that are measured together."""

    filler: str
    length: int
    place: Order

    @property
    def name(self) -> str:
        """Return the name in the file."""
        return f"{self.filler}/{self.place}/{self.length}"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An expected and a given answer."""

    right: str
    given: str
    values: frozenset[str]
    """Values of all facts in the haystack."""

    @property
    def is_of_another_fact(self) -> bool:
        """Return whether the first wrong word is the value of another fact."""
        pairs = zip(split_words(self.right.strip()), split_words(self.given.strip()), strict=False)
        first_wrong = next((given for right, given in pairs if right != given), "")
        return first_wrong.strip() in self.values


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model = LocalModel.load(arguments.model, getattr(torch, arguments.dtype))
    measured: dict[str, Any] = {}
    if arguments.json.exists():
        measured = json.loads(arguments.json.read_text())
    for cell in chosen(arguments):
        if cell.name in measured:
            continue
        start = time.monotonic()
        measured[cell.name] = {**measure(cell, model, arguments.seed)}
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
        figures = " ".join(in_words(kind, each) for kind, each in measured[cell.name].items())
        print(f"{cell.name}: {figures} ({time.monotonic() - start:.0f} s)", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=shipped_models() / "needle")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--fillers", nargs="+", default=list(FILLER_KINDS))
    parser.add_argument("--lengths", nargs="+", type=int, choices=SHARED, default=list(SHARED))
    parser.add_argument("--place", choices=ORDERS, default="last", help="of the question")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Return the cells, short texts of all fillers first."""
    for length in arguments.lengths:
        for filler in arguments.fillers:
            yield Cell(filler=filler, length=length, place=arguments.place)


def measure(cell: Cell, model: LocalModel, seed: int) -> dict[str, dict[str, Any]]:
    """Return the right answers by kind of question."""
    answerer = LocalAnswerer(model)
    replies: dict[str, list[Reply]] = {}
    for case in asked(cell, model, seed):
        answers = answerer.answers(case)
        values = frozenset(needle.value for needle in case.haystack.needles)
        for question, given in zip(case.questions, answers, strict=True):
            reply = Reply(right=question.answer, given=given, values=values)
            replies.setdefault(question.kind, []).append(reply)
    return {kind: figures(each) for kind, each in replies.items()}


def figures(replies: list[Reply]) -> dict[str, Any]:
    """Return the number of right answers with its confidence interval, and some wrong ones."""
    wrong = [reply for reply in replies if not is_correct(reply.right, reply.given)]
    right = len(replies) - len(wrong)
    low, high = wilson(right, len(replies))
    return {
        "right": right,
        "questions": len(replies),
        "interval": [round(low, 4), round(high, 4)],
        "of_another_fact": sum(reply.is_of_another_fact for reply in wrong),
        "wrong": [(reply.right, reply.given) for reply in wrong[:5]],
        "replies": [reply.given for reply in replies],
    }


def in_words(kind: str, each: Mapping[str, Any]) -> str:
    """Return one figure in words."""
    return f"{kind} {each['right']}/{each['questions']}"


def asked(cell: Cell, model: LocalModel, seed: int) -> Iterator[Case]:
    """Yield haystacks and all the questions to each."""
    if cell.place == "first":
        count = OWN[cell.length]
        evaluation = Evaluation(questions=count, filler=cell.filler, order="first", seed=seed)
        for kind in OWN_KINDS:
            yield from cases(evaluation, kind, cell.length, model.count)
        return
    haystacks, share = SHARED[cell.length]
    evaluation = Evaluation(questions=haystacks * share, share=share, filler=cell.filler, seed=seed)
    for case in cases(evaluation, "two_hop", cell.length, model.count):
        yield replace(case, questions=(*case.questions, *further(case, share)))


def further(case: Case, share: int) -> Iterator[Question]:
    """Return as many questions of each other kind as there are two-step ones."""
    facts = len(case.haystack.needles)
    for index in range(share):
        yield ask(case.haystack, "multi_key", [2 * index % facts])
        yield ask(case.haystack, "single", [(2 * index + 1) % facts])
        yield ask(case.haystack, "multi", [(index + step) % facts for step in (0, 7, 13)])


if __name__ == "__main__":
    main()

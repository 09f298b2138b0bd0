"""Accuracy of a model on facts hidden in long text, over a depth x length grid.

In this process, with exact attention, or through a deployed OpenAI-compatible server (greedy
``/v1/completions``). The prompts are those of `csps.models.needle_prompts`.

Long prompts are dear, so ``share`` questions can be put to one haystack: it is computed once, and
each question is computed behind its KV as if no other had been asked. With kind ``single`` the
needles not asked for are then dropped from the KV that the question sees, so it finds one needle
only. ``share = 1`` gives each question a haystack of its own, as a server always has it.

The *sensitivity* of the model shows that its answers come from the needles: dropping the KV of the
needle makes it fail, dropping the KV of as much (or much more) filler does not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import httpx
import torch
from tokenizers import Tokenizer
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.merge import merge
from csps.models.loading import load_network
from csps.models.needle_prompts import (
    KINDS,
    Haystack,
    Kind,
    Question,
    ask,
    build_haystack,
    count_words,
    draw_facts,
    is_correct,
)
from csps.models.network import Network
from csps.models.spec import read_eos_token_ids

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "models" / "needle"
DEFAULT_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
SERVER_TIMEOUT_SECONDS = 600.0
"""For one answer, queueing included."""
MAX_ANSWER_TOKENS = 32

Span = tuple[int, int]
"""Characters ``start:end`` of a text, or tokens of it."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is asked, reproducible from these fields."""

    kinds: tuple[Kind, ...] = ("single", "multi_key")
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    """Tokens of a whole prompt, without special tokens."""
    questions: int = 200
    """For each kind and length."""
    needles: int = 8
    """Facts in a haystack, except with kind ``single``; more if ``share`` needs more."""
    share: int = 1
    """Questions put to one haystack."""
    seed: int = 1
    """Streams of random numbers differ from training's, whatever its seed."""

    def __post_init__(self) -> None:
        if self.share < 1 or self.questions % self.share:
            raise ValueError(f"questions ({self.questions}) must be a multiple of share")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A haystack and the questions to it."""

    length: int
    haystack: Haystack
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One question with its reply."""

    kind: Kind
    length: int
    depth: float
    """Of the first needle asked for."""
    expected: str
    reply: str

    @property
    def correct(self) -> bool:
        return is_correct(self.expected, self.reply)


class Answerer(Protocol):
    """A model that answers questions to a haystack, each on its own."""

    def answers(self, haystack: Haystack, questions: Sequence[Question]) -> list[str]: ...


def cases(evaluation: Evaluation, kind: Kind, length: int) -> Iterator[Case]:
    """Haystacks with ``share`` questions each; the depths asked for cover 0 to 1 evenly."""
    haystacks = evaluation.questions // evaluation.share
    for number in range(haystacks):
        rng = random.Random(f"evaluation/{evaluation.seed}/{kind}/{length}/{number}")
        # Haystack n takes every haystacks-th depth from the n-th, so that together they cover all.
        depths = [
            (number + 0.5 + haystacks * index) / evaluation.questions
            for index in range(evaluation.share)
        ]
        yield _case(rng, evaluation, kind, length, depths)


def _case(
    rng: random.Random, evaluation: Evaluation, kind: Kind, length: int, depths: Sequence[float]
) -> Case:
    share = len(depths)
    hops = share if kind == "two_hop" else 0
    fewest = {"single": share, "multi_key": share, "multi": max(share, 3), "two_hop": 2 * share}
    needles = share if kind == "single" else max(evaluation.needles, fewest[kind])
    facts = draw_facts(rng, needles, depths=depths, hops=hops)

    def asked(index: int) -> list[int]:
        if kind == "two_hop":
            return [index, share + index]
        return [(index + i) % needles for i in range(3 if kind == "multi" else 1)]

    def questions(haystack: Haystack) -> tuple[Question, ...]:
        return tuple(ask(haystack, kind, asked(index)) for index in range(share))

    # Questions of a kind are of one length, so a draft tells how much room they need.
    draft = build_haystack(rng, 16 * (needles + 1), facts)
    tail = max(count_words(question.completion_text) for question in questions(draft))
    haystack = build_haystack(rng, length - tail, facts)
    return Case(length=length, haystack=haystack, questions=questions(haystack))


def evaluate(
    evaluation: Evaluation,
    answerer: Answerer,
    report: Callable[[str], None] = lambda line: None,
) -> list[Answered]:
    """Put all questions; ``report`` gets a line for each kind and length."""
    results: list[Answered] = []
    for kind in evaluation.kinds:
        for length in evaluation.lengths:
            start = time.monotonic()
            cell = list(_answered(cases(evaluation, kind, length), answerer))
            seconds = time.monotonic() - start
            report(f"{kind:>9} {length:>6} tokens: {accuracy(cell):7.2%} ({seconds:.0f} s)")
            results += cell
    return results


def _answered(asked: Iterable[Case], answerer: Answerer) -> Iterator[Answered]:
    for case in asked:
        replies = answerer.answers(case.haystack, case.questions)
        for question, reply in zip(case.questions, replies, strict=True):
            yield Answered(
                kind=question.kind,
                length=case.length,
                depth=case.haystack.needles[question.needles[0]].depth,
                expected=question.answer,
                reply=reply,
            )


def accuracy(answered: Iterable[Answered]) -> float:
    return fmean(one.correct for one in answered)


class ServerAnswerer:
    """A deployed OpenAI-compatible server, asked greedily."""

    def __init__(
        self, client: httpx.Client, *, model: str | None = None, concurrency: int = 1
    ) -> None:
        self._client = client
        self._concurrency = concurrency
        self.model = model or self._first_model()

    @classmethod
    def at(cls, base_url: str, *, model: str | None = None, concurrency: int = 1) -> ServerAnswerer:
        """Of a server at this address, with or without the ``/v1``."""
        root = base_url.rstrip("/").removesuffix("/v1")
        client = httpx.Client(base_url=root, timeout=SERVER_TIMEOUT_SECONDS)
        return cls(client, model=model, concurrency=concurrency)

    def _first_model(self) -> str:
        response = self._client.get("/v1/models").raise_for_status()
        name: str = response.json()["data"][0]["id"]
        return name

    def answers(self, haystack: Haystack, questions: Sequence[Question]) -> list[str]:
        prompts = [haystack.text + question.completion_text for question in questions]
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self.complete, prompts))

    def complete(self, prompt: str) -> str:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": MAX_ANSWER_TOKENS,
            "temperature": 0,
        }
        response = self._client.post("/v1/completions", json=body).raise_for_status()
        text: str = response.json()["choices"][0]["text"]
        return text


@dataclass(frozen=True, kw_only=True)
class Context:
    """KV of computed tokens, of each layer; shape suffixes as in `csps.models.network`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    end: int
    """Position of the next token."""

    def without(self, spans: Iterable[Span]) -> Context:
        """Some tokens dropped; all others keep their positions."""
        kept = torch.ones(len(self.keys[0]), dtype=torch.bool)
        for start, end in spans:
            kept[start:end] = False
        return Context(
            keys=tuple(k_thd[kept] for k_thd in self.keys),
            values=tuple(v_thd[kept] for v_thd in self.values),
            end=self.end,
        )


class LocalModel:
    """A model in this process: exact attention, greedy, one sequence."""

    def __init__(self, network: Network, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    @classmethod
    def load(cls, folder: Path) -> LocalModel:
        # The tokenizers library's own class, because it tells where in the text a token lies.
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(load_network(folder), tokenizer, frozenset(read_eos_token_ids(folder)))

    @torch.inference_mode()
    def read(self, text: str) -> Context:
        """Compute a text from position 0, with the special tokens that begin it."""
        ids = self.tokenizer.encode(text).ids
        return self._forward(ids, past=None)[1]

    @torch.inference_mode()
    def answer(self, past: Context, text: str) -> str:
        """What follows the past and the text, greedily; the past stays as it is."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        reply: list[int] = []
        logits_v, own = self._forward(ids, past)
        for _ in range(MAX_ANSWER_TOKENS):
            token = int(logits_v.argmax())
            if token in self.stop_ids:
                break
            reply.append(token)
            logits_v, own = self._forward([token], past, own)
        return str(self.tokenizer.decode(reply))

    def tokens_of(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """Token spans, special tokens counted, that cover character spans of a text."""
        starts, ends = zip(*self.tokenizer.encode(text).offsets, strict=True)
        return [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in spans]

    def _forward(
        self, ids: Sequence[int], past: Context | None, own: Context | None = None
    ) -> tuple[Tensor, Context]:
        """Next-token logits, and the KV of the tokens behind the past.

        The past is attended to where it lies and merged: a decode step copies none of it.
        """
        begin = own.end if own else past.end if past else 0
        positions_t = torch.arange(begin, begin + len(ids))
        rotary = self.network.rotary(positions_t)
        x_td = self.network.embed(torch.tensor(ids))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for number, layer in enumerate(self.network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            k_positions = positions_t
            if own:
                k_thd = torch.cat((own.keys[number], k_thd))
                v_thd = torch.cat((own.values[number], v_thd))
                k_positions = torch.arange(begin + len(ids) - len(k_thd), begin + len(ids))
            parts = [
                attention(q_thd, k_thd, v_thd, q_positions=positions_t, k_positions=k_positions)
            ]
            if past:
                parts.append(
                    attention(
                        q_thd,
                        past.keys[number],
                        past.values[number],
                        q_positions=None,
                        k_positions=None,
                    )
                )
            outs, lses = zip(*parts, strict=True)
            x_td = layer.finish(x_td, merge(outs, lses)[0])
            keys.append(k_thd)
            values.append(v_thd)
        context = Context(keys=tuple(keys), values=tuple(values), end=begin + len(ids))
        return self.network.logits(x_td[-1:])[0], context


class LocalAnswerer:
    """Asks a model in this process; computes each haystack once."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model

    def answers(self, haystack: Haystack, questions: Sequence[Question]) -> list[str]:
        context = self.model.read(haystack.text)
        spans = needle_tokens(self.model, haystack)
        replies: list[str] = []
        for question in questions:
            seen = context
            if question.kind == "single" and len(spans) > 1:
                seen = context.without(
                    span for i, span in enumerate(spans) if i not in question.needles
                )
            replies.append(self.model.answer(seen, question.completion_text))
        return replies


def needle_tokens(model: LocalModel, haystack: Haystack) -> list[Span]:
    """Where the needles lie in the KV of a haystack."""
    return model.tokens_of(haystack.text, [needle.chars for needle in haystack.needles])


class Dropped(Protocol):
    """Which token spans to drop for a question, of a haystack of ``size`` tokens."""

    def __call__(self, needles: Sequence[Span], question: Question, size: int) -> list[Span]: ...


def drop_nothing(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    return []


def drop_needles(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    return [needles[index] for index in question.needles]


def drop_as_much_filler(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    dropped = sum(end - start for start, end in drop_needles(needles, question, size))
    return _random_filler(needles, question, size, dropped)


def drop_half_the_filler(needles: Sequence[Span], question: Question, size: int) -> list[Span]:
    return _random_filler(needles, question, size, size // 2)


def _random_filler(
    needles: Sequence[Span], question: Question, size: int, count: int
) -> list[Span]:
    """Single tokens outside all needles; the first token stays, as an attention sink."""
    facts = {token for start, end in needles for token in range(start, end)}
    filler = [token for token in range(1, size) if token not in facts]
    rng = random.Random(f"{question.text}/{size}")
    return [(token, token + 1) for token in rng.sample(filler, min(count, len(filler)))]


DROPS: dict[str, Dropped] = {
    "nothing": drop_nothing,
    "needle": drop_needles,
    "as much filler": drop_as_much_filler,
    "half the filler": drop_half_the_filler,
}


def sensitivity(
    evaluation: Evaluation,
    model: LocalModel,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, float]]:
    """Accuracy on ``multi_key`` by what is dropped and by length."""
    table: dict[str, dict[str, float]] = {name: {} for name in DROPS}
    for length in evaluation.lengths:
        asked = list(cases(evaluation, "multi_key", length))
        replies = [_with_drops(model, case) for case in asked]
        for name, row in table.items():
            row[str(length)] = round(fmean(right for each in replies for right in each[name]), 4)
            report(f"dropping {name:>15}, {length:>6} tokens: {row[str(length)]:7.2%}")
    return table


def _with_drops(model: LocalModel, case: Case) -> dict[str, list[bool]]:
    """Right or wrong for each question of a haystack, by what is dropped."""
    context = model.read(case.haystack.text)
    needles = needle_tokens(model, case.haystack)
    size = len(context.keys[0])

    def right(question: Question, choose: Dropped) -> bool:
        seen = context.without(choose(needles, question, size))
        return is_correct(question.answer, model.answer(seen, question.completion_text))

    return {name: [right(q, choose) for q in case.questions] for name, choose in DROPS.items()}


def summary(results: Sequence[Answered], depth_bins: int = 10) -> dict[str, Any]:
    """By kind: accuracy by length, and by length and depth."""
    kinds = dict.fromkeys(one.kind for one in results)
    return {
        kind: _kind_summary([r for r in results if r.kind == kind], depth_bins) for kind in kinds
    }


def _kind_summary(results: Sequence[Answered], depth_bins: int) -> dict[str, Any]:
    by_length: dict[str, float] = {}
    grid: dict[str, list[float | None]] = {}
    for length in sorted({one.length for one in results}):
        row = [one for one in results if one.length == length]
        by_length[str(length)] = round(accuracy(row), 4)
        bins: list[list[Answered]] = [[] for _ in range(depth_bins)]
        for one in row:
            bins[min(int(one.depth * depth_bins), depth_bins - 1)].append(one)
        grid[str(length)] = [round(accuracy(cell), 4) if cell else None for cell in bins]
    wrong = [one for one in results if not one.correct]
    return {
        "questions": len(results),
        "accuracy_by_length": by_length,
        "accuracy_by_length_and_depth": grid,
        "wrong": [asdict(one) for one in wrong[:20]],
    }


def plot(summaries: dict[str, Any], path: Path) -> None:
    """Heat map of accuracy, one panel for each kind: depth down, length to the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1,
        len(summaries),
        figsize=(2 + 4 * len(summaries), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (kind, result) in zip(axes[0], summaries.items(), strict=True):
        image = _draw_panel(axis, result["accuracy_by_length_and_depth"])
        axis.set_title(kind)
    axes[0][0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="accuracy")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(axis: Any, grid: dict[str, list[float | None]]) -> Any:
    """Draws accuracy by length and depth; an empty cell had no question."""
    rows = list(zip(*grid.values(), strict=True))
    cells = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axis.set_xticks(range(len(grid)), [f"{int(length) / 1024:g}K" for length in grid])
    step = 100 / len(rows)
    labels = [f"{step * i:.0f}-{step * (i + 1):.0f} %" for i in range(len(rows))]
    axis.set_yticks(range(len(rows)), labels)
    axis.set_xlabel("prompt tokens")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value is not None:
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    return image


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="csps eval",
        description="Accuracy on facts hidden in long text, over a depth x length grid.",
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="checkpoint folder")
    parser.add_argument("--base-url", help="ask this server instead, e.g. http://127.0.0.1:8000")
    parser.add_argument("--served-model", help="its name there; default: the first that it lists")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once to a server")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["single", "multi_key"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--questions", type=int, default=50, help="for each kind and length")
    parser.add_argument("--needles", type=int, default=8, help="facts in a haystack")
    parser.add_argument("--share", type=int, default=1, help="questions to each haystack")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of torch, in this process")
    parser.add_argument(
        "--sensitivity", action="store_true", help="also with needle or filler dropped from the KV"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a heat map here (PNG)")
    arguments = parser.parse_args(argv)
    if arguments.share < 1 or arguments.questions % arguments.share:
        parser.error("--questions must be a multiple of --share")
    if arguments.base_url and arguments.sensitivity:
        parser.error("--sensitivity looks into the KV, so it needs the model in this process")
    if arguments.base_url and arguments.share > 1 and "single" in arguments.kinds:
        parser.error("a server sees all needles of a shared haystack: single needs --share 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    evaluation = Evaluation(
        kinds=tuple(arguments.kinds),
        lengths=tuple(arguments.lengths),
        questions=arguments.questions,
        needles=arguments.needles,
        share=arguments.share,
        seed=arguments.seed,
    )

    def report(line: str) -> None:
        print(line, flush=True)

    try:
        output = _measure(arguments, evaluation, report)
    except httpx.HTTPError as error:
        print(f"csps eval: {arguments.base_url}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(output, indent=1) + "\n")
    if arguments.plot:
        plot(output["results"], arguments.plot)
    return 0


def _measure(
    arguments: argparse.Namespace, evaluation: Evaluation, report: Callable[[str], None]
) -> dict[str, Any]:
    """What ``--json`` writes."""
    output: dict[str, Any] = {"evaluation": asdict(evaluation)}
    if arguments.base_url:
        server = ServerAnswerer.at(
            arguments.base_url, model=arguments.served_model, concurrency=arguments.concurrency
        )
        results = evaluate(evaluation, server, report)
        return output | {"model": server.model, "results": summary(results)}
    model = LocalModel.load(arguments.model)
    results = evaluate(evaluation, LocalAnswerer(model), report)
    output |= {"model": arguments.model.name, "results": summary(results)}
    if arguments.sensitivity:
        output["sensitivity"] = sensitivity(evaluation, model, report)
    return output


if __name__ == "__main__":
    raise SystemExit(main())

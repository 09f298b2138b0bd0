"""Time between tokens of answers that follow a JSON schema beside answers that follow none.

    python benchmarks/grammar_gaps.py [--streams 1 16] [--tokens 128] [--rounds 9] [--json FILE]

A prefill and a decode rank serve a random model with a byte-level vocabulary of 32,000 tokens. With
and without take turns, from the same prompts at temperature 1. A gap is the time from a stream's
fifth token to its last over the tokens between, as a driver without HTTP sees it, and a round's is
the mean over its streams; `ratio` compares the medians of the rounds. It needs two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import report
import wide_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from csps.models.tokenizers.grammar import json_grammar
from csps.protocols.gang.messages import SampledTokens, Sampling
from csps.protocols.rpc.schema import unpack

# The driver that stands in for the router belongs to the tests, which hold the engine to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from gang_driver import Cell, Request, even_slices
from gang_processes import process_cell

PROMPT = 64
WARM_UP_TOKENS = 5
WARM_UP_ROUNDS = 2
LONGEST_WORD = 8
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["file", "folder", "link"]},
            "size": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}
"""Longer than any answer here."""


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer of as many tokens as the model embeds."""
    vocab = [*wide_checkpoint.SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab += random_words(wide_checkpoint.VOCAB - len(vocab))
    numbers = {word: number for number, word in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(wide_checkpoint.SPECIAL)
    tokenizer.save(str(path))


def random_words(count: int) -> Iterator[str]:
    """Yield different words of several letters."""
    drawn, seen = random.Random(0), set[str]()
    while len(seen) < count:
        letters = drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, LONGEST_WORD))
        word = drawn.choice(("", "Ġ")) + "".join(letters)
        if word not in seen:
            seen.add(word)
            yield word


async def gap_s(cell: Cell, streams: int, tokens: int, grammar: str, seed: int) -> float:
    """Return the mean time between tokens of streams that decode together."""
    first = max(cell.steps, default=0) * 1000 + 1
    generator = np.random.default_rng(seed)
    requests = [
        Request(
            sequence_id=first + number,
            prompt=generator.integers(3, wide_checkpoint.VOCAB, PROMPT).astype("<i4"),
            slices=even_slices(PROMPT, [0]),
            sampling=Sampling(
                temperature=1, seed=first + number, max_tokens=tokens, grammar=grammar
            ),
        )
        for number in range(streams)
    ]
    stamps: dict[int, list[float]] = defaultdict(list)
    notified = cell.notified

    def stamp(method: str, payload: Any) -> None:
        if method == "tokens":
            now = time.perf_counter()
            for token in unpack(SampledTokens, payload).each():
                stamps[token.sequence_id].append(now)
        notified(method, payload)

    cell.notified = stamp  # type: ignore[method-assign]
    try:
        await cell.generate(*requests, group=[0])
    finally:
        cell.notified = notified  # type: ignore[method-assign]
    await cell.freed(*(request.sequence_id for request in requests))
    assert all(len(times) == tokens for times in stamps.values())
    spans = [times[-1] - times[WARM_UP_TOKENS - 1] for times in stamps.values()]
    return statistics.mean(spans) / (tokens - WARM_UP_TOKENS)


async def measure(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of streams."""
    grammar, rows = json_grammar(SCHEMA), []
    async with process_cell(model, prefill=1, decode=1) as cell:
        for streams in args.streams:
            rounds = [
                [await gap_s(cell, streams, args.tokens, each, seed) for each in ("", grammar)]
                for seed in range(WARM_UP_ROUNDS + args.rounds)
            ]
            free, bound = (
                1e3 * statistics.median(gaps) for gaps in zip(*rounds[WARM_UP_ROUNDS:], strict=True)
            )
            row = {"streams": streams, "free_ms": free, "schema_ms": bound, "ratio": bound / free}
            rows.append(row)
    return rows


def main() -> None:
    """Print a row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    args = report.with_json_option(parser).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint.make(Path(folder) / "wide")
        write_tokenizer(model / "tokenizer.json")
        rows = asyncio.run(measure(model, args))
    report.publish({"benchmark": "grammar_gaps", "tokens": args.tokens}, rows, args.json)


if __name__ == "__main__":
    main()

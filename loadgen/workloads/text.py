"""Prompts for requests that have none: filler text with hidden facts and a question to check.

Prompts that share `hash_ids` share the text of those blocks. Very short prompts have no question.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from csps.loadgen.workloads.request import HASH_BLOCK_TOKENS, WorkloadRequest
from csps.models.needle_prompts.filler import SHORTEST_SENTENCE, filler_sentences
from csps.models.needle_prompts.haystack import (
    Fact,
    Haystack,
    Question,
    ask,
    build_haystack,
    draw_facts,
)
from csps.models.needle_prompts.prompt import NeedleConfig, generate
from csps.models.needle_prompts.words import NOUNS, Count, count_words

_QUESTION_TOKENS, _FACT_TOKENS = 13, 7
"""Tokens of `What is the password of Oslo?` with its heads, and of the fact, if a word is a
token.
"""
_CACHED_BLOCKS = 4096


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Writes prompts for requests."""

    seed: int = 0
    needles: int = 4
    """Facts in a prompt, one of which is asked for; short prompts have fewer."""
    chat: bool = False
    """True if the question ends a user's message, without a completion prompt's cue."""
    count: Count | None = None
    """Function that counts the tokens of a text. None: words, the included model's tokens."""

    def write(self, requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        """Yield the requests with prompts, in order; existing prompts stay."""
        spoken_tokens: dict[str, int] = {}
        for number, request in enumerate(requests):
            before = spoken_tokens.get(request.conversation or "", 0)
            if request.conversation is not None:
                spoken_tokens[request.conversation] = request.input_length + request.output_length
            if request.prompt is not None:
                yield request
            elif request.hash_ids and request.conversation is None:
                yield self._of_blocks(request)
            else:
                length = max(1, request.input_length - before)
                yield self._of_its_own(request, length, f"{self.seed}/{number}")

    def write_numbered(self, request: WorkloadRequest, number: int) -> WorkloadRequest:
        """Return a request with a prompt that only this number has."""
        return self._of_its_own(request, request.input_length, f"{self.seed}/probe/{number}")

    def begin_alike(
        self, requests: Iterable[WorkloadRequest], tokens: int
    ) -> Iterator[WorkloadRequest]:
        """Yield requests with the same text of so many tokens in front of first turns' prompts."""
        shared = _filler(random.Random(f"shared/{self.seed}"), tokens, self.count)
        begun: set[str] = set()
        for request in requests:
            first = request.conversation is None or request.conversation not in begun
            begun.add(request.conversation or "")
            prompt = shared + (request.prompt or "") if first else request.prompt
            yield replace(request, prompt=prompt, input_length=request.input_length + tokens)

    def _of_its_own(self, request: WorkloadRequest, length: int, seed: str) -> WorkloadRequest:
        rng = random.Random(f"load/{seed}")
        room = length - _QUESTION_TOKENS - SHORTEST_SENTENCE
        needles = min(self.needles, room // _FACT_TOKENS)
        config = NeedleConfig(length=length, needles=max(1, needles), seed=rng.getrandbits(48))
        try:
            prompt = generate(config, self.count) if needles > 0 else None
        except ValueError:  # a tokenizer with more tokens than words
            prompt = None
        if prompt is None:
            return replace(request, prompt=_filler(rng, length, self.count))
        text = prompt.chat_text if self.chat else prompt.text
        return replace(request, prompt=text, answer=prompt.answer)

    def _of_blocks(self, request: WorkloadRequest) -> WorkloadRequest:
        """Return a request with one text for each hash id and a question about one block at its
        end.
        """
        *whole, last = request.hash_ids
        rest = request.input_length - HASH_BLOCK_TOKENS * len(whole)
        blocks = [_block(number, self.count) for number in whole]
        rng = random.Random(f"last/{last}/{rest}")
        asked = _question(rng, [fact for fact, _ in blocks])
        if rest < _QUESTION_TOKENS + SHORTEST_SENTENCE:
            asked = None
        words = "" if asked is None else asked.text if self.chat else asked.completion_text
        tail = _filler(rng, rest - (self.count or count_words)(words), self.count) + words
        text = "".join([*(text for _, text in blocks), tail])
        return replace(request, prompt=text, answer=asked.answer if asked else None)


@lru_cache(_CACHED_BLOCKS)
def _block(number: int, count: Count | None) -> tuple[Fact, str]:
    rng = random.Random(f"block/{number}")
    fact = draw_facts(rng, 1)[0]
    return fact, build_haystack(rng, HASH_BLOCK_TOKENS, [fact], count).text


def _question(rng: random.Random, facts: list[Fact]) -> Question | None:
    """Return a question about a fact whose key only one block has."""
    keys = Counter(fact.key for fact in facts)
    clear = [fact for fact in facts if keys[fact.key] == 1]
    if not clear:
        return None
    haystack = build_haystack(rng, 2 * _FACT_TOKENS, [rng.choice(clear)])
    return ask(Haystack(words=(), needles=haystack.needles, tokens=0), "multi_key", [0])


def _filler(rng: random.Random, tokens: int, count: Count | None) -> str:
    if tokens < SHORTEST_SENTENCE:
        return "".join(f" {rng.choice(NOUNS)}" for _ in range(tokens))
    return "".join(word for sentence in filler_sentences(rng, tokens, count) for word in sentence)

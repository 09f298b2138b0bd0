"""Put questions to a model in this process or to a deployed server.

`LocalAnswerer` computes each haystack once. With kind ``single`` it drops the other needles from
the KV that the question sees, so that it finds one needle only, however many questions share the
haystack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import httpx

from csps.models.needle_prompts.haystack import Question
from csps.services.evaluation.cases import MAX_ANSWER_TOKENS, Case
from csps.services.evaluation.local_model import Context, LocalModel, Span


class ReadQuestion(NamedTuple):
    """A question, and the computed text that it is put to."""

    question: Question
    context: Context
    needles: list[Span]
    """Spans of the haystack's needles in the context."""
    cue: str
    """Text still to be computed before the answer."""


class LocalAnswerer:
    """Answerer that computes each question behind the KV of its haystack, as if it were alone."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model

    def answers(self, case: Case) -> list[str]:
        """Return the replies, in the order of the questions."""
        replies: list[str] = []
        for question, context, needles, cue in read(self.model, case):
            seen = context
            if question.kind == "single" and len(needles) > 1:
                seen = context.without(
                    span for index, span in enumerate(needles) if index not in question.needles
                )
            replies.append(self.model.answer(seen, cue))
        return replies


def read(model: LocalModel, case: Case) -> Iterator[ReadQuestion]:
    """Compute the haystack, anew for each question that stands before it."""

    @cache
    def computed(before: str) -> tuple[Context, list[Span]]:
        text = before + case.haystack.text
        shift = len(before)
        spans = [
            (shift + needle.chars[0], shift + needle.chars[1]) for needle in case.haystack.needles
        ]
        return model.read(text), model.tokens_of(text, spans)

    for question in case.questions:
        before, cue = question.around(case.order)
        yield ReadQuestion(question, *computed(before), cue)
        if before:
            computed.cache_clear()


SERVER_TIMEOUT_SECONDS = 600.0
"""Limit for one answer, queueing included."""


def client_of(base_url: str, api_key: str | None = None) -> httpx.Client:
    """Return a client of the server at this address, with or without the ``/v1``."""
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=root, headers=headers, timeout=SERVER_TIMEOUT_SECONDS)


class ServerAnswerer:
    """Answerer that asks a deployed OpenAI-compatible server greedily."""

    def __init__(
        self,
        client: httpx.Client,
        *,
        model: str | None = None,
        concurrency: int = 1,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._concurrency = concurrency
        self._extra_body = dict(extra_body or {})
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        response = self._client.get("/v1/models").raise_for_status()
        name: str = response.json()["data"][0]["id"]
        return name

    def answers(self, case: Case) -> list[str]:
        """Return the replies, in the order of the questions; `concurrency` of them at once."""
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self.complete, map(case.prompt, case.questions)))

    def complete(self, prompt: str) -> str:
        """Return the server's completion of a prompt.

        Raises:
            httpx.HTTPError: the server answers with an error, or not at all.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": MAX_ANSWER_TOKENS,
            "temperature": 0,
            **self._extra_body,
        }
        response = self._client.post("/v1/completions", json=body).raise_for_status()
        text: str = response.json()["choices"][0]["text"]
        return text

"""Questions put to a deployed model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from csps.models.needle_prompts.haystack import Haystack
from csps.models.needle_prompts.questions import Question
from csps.services.evaluation.cases import MAX_ANSWER_TOKENS

SERVER_TIMEOUT_SECONDS = 600.0
"""For one answer, queueing included."""


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
        """The replies, in the order of the questions; `concurrency` of them at once."""
        prompts = [haystack.text + question.completion_text for question in questions]
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self.complete, prompts))

    def complete(self, prompt: str) -> str:
        """What the server writes behind a prompt.

        Raises:
            httpx.HTTPError: it answers with an error, or not at all.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": MAX_ANSWER_TOKENS,
            "temperature": 0,
        }
        response = self._client.post("/v1/completions", json=body).raise_for_status()
        text: str = response.json()["choices"][0]["text"]
        return text

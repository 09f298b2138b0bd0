"""Questions put to a deployed model."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from csps.services.evaluation.cases import MAX_ANSWER_TOKENS, Case

SERVER_TIMEOUT_SECONDS = 600.0
"""For one answer, queueing included."""


def client_of(base_url: str, api_key: str | None = None) -> httpx.Client:
    """For a server at this address, with or without the ``/v1``."""
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=root, headers=headers, timeout=SERVER_TIMEOUT_SECONDS)


class ServerAnswerer:
    """A deployed OpenAI-compatible server, asked greedily."""

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
        """The replies, in the order of the questions; `concurrency` of them at once."""
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self.complete, map(case.prompt, case.questions)))

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
            **self._extra_body,
        }
        response = self._client.post("/v1/completions", json=body).raise_for_status()
        text: str = response.json()["choices"][0]["text"]
        return text

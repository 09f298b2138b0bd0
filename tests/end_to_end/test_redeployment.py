"""Another policy through Serve while a stream goes on, over encrypted connections.

The stream keeps its router and its ranks to the end. New requests go to the new ones, and the new
policy gives the tokens that the former one gave.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest
from certificates import Authority
from deployed_server import MODEL, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 240.0
POSITIONS = 65_536
LASTING = 12_000
"""Tokens of the stream that must outlive the redeployment."""
PROMPTS = [random_tokens(length, seed=length) for length in (3, 100, 1_500, 5_000, 12_000)]
"""Prompts that `csps` computes on one instance, and prompts that it cuts."""
REQUESTS = [
    {"prompt": prompt, "temperature": temperature, "seed": seed}
    for seed, prompt in enumerate(PROMPTS)
    for temperature in (0, 1)
]
ANSWER = 40


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    model_dir = make_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=POSITIONS
    )
    scheduling = {"policy": "csps"}
    run_dir = tmp_path_factory.mktemp("run")
    tls = asdict(Authority(run_dir).issue())
    with deployed(model_dir, run_dir, drain_s=DEADLINE_S, scheduling=scheduling, tls=tls) as server:
        yield server


class Streaming:
    """A stream that a separate task reads."""

    def __init__(self, server: Deployed, prompt: list[int]) -> None:
        self._server, self._prompt = server, prompt
        self._texts: list[str] = []
        self._begun = threading.Event()
        self._failure: Exception | None = None
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._begun.wait(DEADLINE_S)

    def _read(self) -> None:
        try:
            with client_of(openai.OpenAI, self._server) as client:
                for chunk in client.completions.create(
                    model=MODEL,
                    prompt=self._prompt,
                    max_tokens=LASTING,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    self._texts.append(chunk.choices[0].text)
                    self._begun.set()
        except Exception as exc:  # raised by `text`
            self._failure = exc
            self._begun.set()

    @property
    def goes_on(self) -> bool:
        return self._reader.is_alive()

    def text(self) -> str:
        """Return the whole text at its end."""
        self._reader.join(DEADLINE_S)
        assert not self.goes_on, "the stream does not end"
        if self._failure is not None:
            raise self._failure
        return "".join(self._texts)


def client_of(kind: type[Any], server: Deployed) -> Any:
    return kind(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


def ask_all(server: Deployed) -> tuple[list[str], list[int]]:
    """Return the answers to all requests at once, and on how many instances each prompt was
    computed.
    """

    async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> tuple[str, int]:
        answer = await client.completions.create(
            model=MODEL,
            max_tokens=ANSWER,
            extra_body={"ignore_eos": True, "csps": {"explain": True}},
            **fields,
        )
        report = answer.model_extra["csps"]  # type: ignore[index]
        return answer.choices[0].text, len(report["placement"]["group"])

    async def all_of_them() -> list[tuple[str, int]]:
        async with client_of(openai.AsyncOpenAI, server) as client:
            return await asyncio.gather(*(ask(client, fields) for fields in REQUESTS))

    answers = asyncio.run(all_of_them())
    return [text for text, _ in answers], [instances for _, instances in answers]


def test_another_policy_gives_the_same_tokens_and_ends_no_stream(server: Deployed) -> None:
    prompt = random_tokens(300, seed=1)
    of_csps, instances = ask_all(server)
    assert set(instances) == {1, 2}
    undisturbed = Streaming(server, prompt).text()

    stream = Streaming(server, prompt)
    ranks = server.pids("DecodeGang")
    successor = server.redeploy(scheduling={"policy": "fixed_sp", "sp": 2})
    while set(instances) != {2}:
        assert stream.goes_on, "it ended before the new policy came: let it last longer"
        answers, instances = ask_all(successor)
        assert answers == of_csps
    assert stream.goes_on, "it ended before the new policy came: let it last longer"
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert stream.text() == undisturbed

    successor.wait_ready()
    assert not ranks & successor.pids("DecodeGang")
    successor.assert_only_cache_left()

"""Malformed requests to the HTTP API over a scripted service: no answer is 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from agent_checkpoints import THINKING_TEMPLATE, with_template
from fake_service import FakeService, http_api
from live_server import serving
from malformed_requests import ENDPOINTS, send_malformed
from property_examples import examples
from tiny_checkpoints import make_checkpoint

from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import HttpSettings, KvReuseSettings, Settings

START_S = 60.0


class ServingThread:
    """The HTTP API on a loop of its own."""

    def __init__(self, model: Path) -> None:
        self.url = ""
        self._model = model
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")

    def __enter__(self) -> ServingThread:
        self._thread.start()
        assert self._ready.wait(START_S)
        return self

    def __exit__(self, *failure: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(START_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        settings = Settings(
            model=str(self._model),
            served_model_name="tiny",
            kv_reuse=KvReuseSettings(enabled=True),
            http=HttpSettings(request_templates=True, docs=True),
        )
        parser = RequestParser(settings)
        pool = ParserPool(parser.body_parser)
        api = http_api(parser, FakeService(parser.tokenizer, "an answer"), parser_pool=pool)
        try:
            async with serving(api.app()) as self.url:
                self._ready.set()
                await self._over.wait()
        finally:
            await pool.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server whose model calls tools and reasons."""
    model = with_template(make_checkpoint(tmp_path_factory.mktemp("model")), THINKING_TEMPLATE)
    with ServingThread(model) as server:
        yield server.url


def check_malformed(url: str, refused: int, number: int = 0) -> None:
    tally = send_malformed(url, "tiny", refused=refused, number=number)
    assert not tally.failures
    assert tally.refused >= refused
    assert tally.by_class["2xx"], "nothing was right: the requests are too wrong to find much"
    assert not [path for path in ENDPOINTS if not tally.refused_by_path[path]]
    assert httpx.get(f"{url}/health").json() == {"status": "ready"}


def test_malformed_requests_are_the_clients_mistake(url: str) -> None:
    check_malformed(url, examples(500))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_malformed_requests_to_all_endpoints(url: str) -> None:
    check_malformed(url, 10_000, number=1_000)

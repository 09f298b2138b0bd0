"""The HTTP API of a model that calls tools and reasons, over a service that a test scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from agent_checkpoints import THINKING_TEMPLATE, with_template
from fake_service import FakeService, http_api
from live_server import serving
from tiny_checkpoints import make_checkpoint

from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import HttpSettings, Settings

DEADLINE_S = 60


@dataclass(frozen=True, kw_only=True)
class AgentServer:
    """A server, and the service behind it."""

    url: str
    client: httpx.AsyncClient
    service: FakeService
    parser: RequestParser

    def say(self, text: str) -> None:
        """Let the next answers be this text."""
        self.service.script = self.parser.tokenizer.encode(text, add_special_tokens=False)

    @property
    def prompt(self) -> str:
        """Text of the last prompt."""
        tokens = self.service.specs[-1].prompt.tolist()
        return self.parser.tokenizer.decode(tokens, skip_special_tokens=False)


def agent_parser(model_dir: Path) -> RequestParser:
    """Make a checkpoint with tools, reasoning and sampling defaults; return its parser."""
    model = with_template(make_checkpoint(model_dir), THINKING_TEMPLATE)
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 257, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    )
    http = HttpSettings(request_templates=True)
    return RequestParser(Settings(model=str(model), served_model_name="tiny", http=http))


@asynccontextmanager
async def agent_server(parser: RequestParser, *keys: str) -> AsyncIterator[AgentServer]:
    """Serve a model that answers "Yes." until told otherwise."""
    service = FakeService(parser.tokenizer, "Yes.")
    pool = ParserPool(parser.body_parser)
    api = http_api(parser, service, parser_pool=pool, keys=ApiKeys(keys))
    try:
        async with (
            serving(api.app()) as url,
            httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
        ):
            yield AgentServer(url=url, client=client, service=service, parser=parser)
    finally:
        await pool.close()

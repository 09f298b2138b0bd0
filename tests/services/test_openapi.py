"""The OpenAPI document: valid, complete, and no stricter than the server."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from agent_checkpoints import WEATHER
from fake_service import FakeService, http_api
from live_server import serving
from openapi_spec_validator import validate
from starlette.routing import Route

from csps.protocols.anthropic.messages import MessagesRequest
from csps.protocols.openai.csps_options import JsonModel
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Ignored,
    parse_request,
)
from csps.protocols.openai.responses_api import ResponsesRequest
from csps.services.http.api import HttpApi
from csps.services.http.openapi import openapi_document
from csps.services.http.request_parser import RequestParser
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import Settings

MODELS: list[type[JsonModel]] = [
    CompletionRequest,
    ChatCompletionRequest,
    MessagesRequest,
    ResponsesRequest,
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BOTH: dict[str, Any] = {
    "stop": ["x", "yz"],
    "logit_bias": {"5": 1.5, "6": -100},
    "temperature": 0,
    "top_p": 1,
    "stop_token_ids": [3, 4],
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "thinking_token_budget": -1,
    "kv_transfer_params": {},
    "bad_words": ["no"],
    "user": 3,
    "csps": {"attention": "csa", "drop_ratio": [0.1, [0.2, 0.3]], "micro_partitions": [1, [1, 2]]},
}
BODIES: list[tuple[type[JsonModel], dict[str, Any]]] = [
    *(
        (CompletionRequest, {"model": "m", "prompt": prompt, "suffix": "", **BOTH})
        for prompt in ("a", ["a", "b"], [1, 2], [[1], [2, 3]])
    ),
    (CompletionRequest, {"model": "m", "prompt": "a", "prompt_logprobs": 20, "logprobs": 5}),
    (
        ChatCompletionRequest,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "b", "tool_call_id": "1"},
            ],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}], **BOTH}),
    (
        MessagesRequest,
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}],
            "messages": [{"role": "user", "content": "a"}],
            "thinking": {"type": "disabled"},
            "tool_choice": {"type": "auto"},
        },
    ),
    (ResponsesRequest, {"model": "m", "input": "a", "reasoning": {"effort": "low"}}),
    (ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": "a"}]}),
]


def test_the_document_is_valid() -> None:
    validate(openapi_document())


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_described(model: type[JsonModel]) -> None:
    """Only what is ignored may be of any type."""
    schema = openapi_document()["components"]["schemas"][model.__name__]
    assert schema["properties"].keys() == model.model_fields.keys()
    (ignores,) = Ignored.__metadata__  # type: ignore[attr-defined]
    for name, field in schema["properties"].items():
        ignored = ignores in model.model_fields[name].metadata
        typed = {"type", "anyOf", "$ref", "enum", "const"} & field.keys()
        assert bool(typed) is not ignored, name


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_what_the_server_takes_is_valid(model: type[JsonModel], body: dict[str, Any]) -> None:
    parse_request(model, json.dumps(body).encode())
    document = openapi_document()
    schema = {"$ref": f"#/components/schemas/{model.__name__}", **document}
    given = {name: value for name, value in body.items() if value is not None}
    for message in given.get("messages", ()):
        if isinstance(message, dict) and message.get("content", "") is None:
            del message["content"]
    jsonschema.Draft202012Validator(schema).validate(given)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**given, "no_such_field": 1})


def test_bounds_are_shown() -> None:
    schemas = openapi_document()["components"]["schemas"]
    shown = schemas["CompletionRequest"]["properties"]["prompt_logprobs"]["anyOf"][0]
    assert shown == {"type": "integer", "minimum": 0, "maximum": 20}
    assert schemas["CompletionRequest"]["properties"]["use_beam_search"]["const"] is False


def api_of(tiny_llama: Path, **options: Any) -> HttpApi:
    parser = RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))
    return http_api(parser, FakeService(parser.tokenizer, "a"), keys=ApiKeys(["secret"]), **options)


async def test_it_has_the_routes_of_the_server(tiny_llama: Path) -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in api_of(tiny_llama, docs=True).app().routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    shown = {
        (path, method)
        for path, operations in openapi_document()["paths"].items()
        for method in operations
    }
    assert shown == served


class _Page(HTMLParser):
    """Notes what a page would load, and its links to its own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "link", "img", "iframe") or "src" in values:
            self.loaded.append(tag)
        self.links |= {values["href"] or ""} if tag == "a" else set()
        self.ids |= {f"#{values['id']}"} if "id" in values else set()


async def test_the_page_is_shown_if_allowed_and_loads_nothing(tiny_llama: Path) -> None:
    for docs, status in ((False, 404), (True, 200)):
        async with (
            serving(api_of(tiny_llama, docs=docs).app()) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            page = await client.get("/docs")
            assert page.status_code == (await client.get("/openapi.json")).status_code == status
    read = _Page()
    read.feed(page.text)
    assert not read.loaded
    assert read.links <= read.ids | {"openapi.json"}

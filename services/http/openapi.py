"""The API as an OpenAPI document, and as a page of one's own server that needs no network.

The document is made from the classes that read requests: a field that they take is in it, with the
text that stands below it in the code. `http.docs` in the settings shows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import csps
from csps.protocols.anthropic.messages import MessagesRequest
from csps.protocols.openai.csps_options import CspsRequestOptions
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from csps.protocols.openai.responses import (
    ChatCompletionResponse,
    CompletionResponse,
    ErrorBody,
    ModelCard,
    ModelList,
)
from csps.protocols.openai.responses_api import ResponsesRequest
from csps.services.settings.config_schema import attribute_docs

_REFERENCE = "#/components/schemas/{model}"
_REQUESTS = (
    CompletionRequest,
    ChatCompletionRequest,
    MessagesRequest,
    ResponsesRequest,
    DetokenizeRequest,
)
_ANSWERS = (CompletionResponse, ChatCompletionResponse, ModelList, ModelCard, ErrorBody)
_TOKENIZING = {"return_token_strs": {"type": "boolean", "default": False}}


def _object(**fields: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields, all of them required."""
    properties = {
        name: {"type": kind} if isinstance(kind, str) else kind for name, kind in fields.items()
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


_IDS = {"type": "array", "items": {"type": "integer"}}


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """What one route does."""

    method: str
    path: str
    text: str
    asks: type[BaseModel] | tuple[type[BaseModel], ...] | None = None
    """Class that reads its body; several for a body that is one of them."""
    answers: type[BaseModel] | dict[str, Any] | str
    """Class or schema of its answer, or the media type of a text."""
    streams: bool = False
    """The answer is a stream of events if the request says so."""
    more_statuses: Mapping[int, str] | None = None
    more_fields: Mapping[str, Any] | None = None
    """Fields of the body beside those of `asks`, of which `model` then is optional."""


_OPERATIONS = (
    _Operation(
        method="post",
        path="/v1/completions",
        text="Continue a text, as OpenAI's.",
        asks=CompletionRequest,
        answers=CompletionResponse,
        streams=True,
    ),
    _Operation(
        method="post",
        path="/v1/chat/completions",
        text="Answer a conversation, as OpenAI's.",
        asks=ChatCompletionRequest,
        answers=ChatCompletionResponse,
        streams=True,
    ),
    _Operation(
        method="post",
        path="/v1/messages",
        text="Answer a conversation, as Anthropic's.",
        asks=MessagesRequest,
        answers=_object(id="string", type="string", role="string", content="array"),
        streams=True,
    ),
    _Operation(
        method="post",
        path="/v1/messages/count_tokens",
        text="Count the tokens of a conversation, as Anthropic's.",
        asks=MessagesRequest,
        answers=_object(input_tokens="integer"),
    ),
    _Operation(
        method="post",
        path="/v1/responses",
        text="Answer a conversation, as OpenAI's, without state.",
        asks=ResponsesRequest,
        answers=_object(id="string", object="string", status="string", output="array"),
        streams=True,
    ),
    _Operation(
        method="post",
        path="/tokenize",
        text="Return the tokens of a prompt or of a conversation.",
        asks=(CompletionRequest, ChatCompletionRequest),
        answers=_object(count="integer", max_model_len="integer", tokens=_IDS),
        more_fields=_TOKENIZING,
    ),
    _Operation(
        method="post",
        path="/detokenize",
        text="Return the text of tokens.",
        asks=DetokenizeRequest,
        answers=_object(prompt="string"),
    ),
    _Operation(
        method="get",
        path="/version",
        text="Return the server's version.",
        answers=_object(version="string"),
    ),
    _Operation(method="get", path="/v1/models", text="List the model.", answers=ModelList),
    _Operation(
        method="get", path="/v1/models/{model}", text="Describe the model.", answers=ModelCard
    ),
    _Operation(
        method="get",
        path="/health",
        text="Say whether a request would be served now.",
        answers=_object(status="string"),
        more_statuses={503: "What the server waits for."},
    ),
    _Operation(
        method="get",
        path="/metrics",
        text="Return metrics, to the server's own machine or cluster.",
        answers="text/plain",
    ),
    _Operation(
        method="get",
        path="/openapi.json",
        text="Return this document.",
        answers={"type": "object"},
    ),
    _Operation(method="get", path="/docs", text="Show this document.", answers="text/html"),
)


@cache
def openapi_document() -> dict[str, Any]:
    """Return the document, of OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "csps",
            "version": csps.__version__,
            "description": "A field that is null counts as left out. An unknown one is refused.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Without keys the server is open.
        "security": [{}, {"key": []}, {"x_api_key": []}],
    }


def _schemas() -> dict[str, Any]:
    _, requests = models_json_schema(
        [(model, "validation") for model in _REQUESTS], ref_template=_REFERENCE
    )
    _, answers = models_json_schema(
        [(model, "serialization") for model in _ANSWERS], ref_template=_REFERENCE
    )
    schemas: dict[str, Any] = {**requests["$defs"], **answers["$defs"]}
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            field.pop("title", None)
            if field.get("default", ...) is None:  # which is no value of the field's type
                del field["default"]
    for model in (*_REQUESTS, *_ANSWERS, CspsRequestOptions):
        schema, texts = schemas[model.__name__], attribute_docs(model)
        schema["description"] = " ".join((model.__doc__ or "").split())
        for name in texts.keys() & schema["properties"].keys():
            schema["properties"][name]["description"] = texts[name]
    return schemas


def _described(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.text,
        "operationId": f"{operation.method}_{operation.path.strip('/')}".translate(_NAMES),
        "responses": {"200": {"description": "The answer.", "content": _content(operation)}},
    }
    for status, text in (operation.more_statuses or {}).items():
        described["responses"][str(status)] = {"description": text}
    described["responses"]["default"] = {
        "description": "An error.",
        "content": {"application/json": {"schema": _reference(ErrorBody)}},
    }
    if "{model}" in operation.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    if operation.asks is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _body(operation)}},
        }
    return described


_NAMES = str.maketrans({"/": "_", ".": "_", "{": None, "}": None})


def _content(operation: _Operation) -> dict[str, Any]:
    answers = operation.answers
    if isinstance(answers, str):
        return {answers: {"schema": {"type": "string"}}}
    schema = answers if isinstance(answers, dict) else _reference(answers)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _body(operation: _Operation) -> dict[str, Any]:
    asks = operation.asks
    if not isinstance(asks, tuple):
        assert asks is not None, f"{operation.path} has no body"
        return _reference(asks)
    # Not by reference: these classes allow no further fields, and want the name of the model.
    schemas = _schemas()
    bodies = [schemas[model.__name__] for model in asks]
    more = operation.more_fields or {}
    return {
        "anyOf": [
            {
                **body,
                "properties": {**body["properties"], **more},
                "required": [name for name in body["required"] if name != "model"],
            }
            for body in bodies
        ]
    }


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


# --- the page -------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
code { font: 13px ui-monospace, monospace } summary { cursor: pointer }
table { border-collapse: collapse; width: 100% } td, th { border-top: 1px solid #8884;
padding: .25rem .5rem; text-align: left; vertical-align: top }
"""


@cache
def docs_page() -> str:
    """Return the document as a page in HTML, without scripts or anything to load."""
    document = openapi_document()
    schemas = document["components"]["schemas"]
    routes = "".join(
        _route_row(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    tables = "".join(_schema_table(name, schema) for name, schema in sorted(schemas.items()))
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{info["title"]}</title>'
        f"<style>{_STYLE}</style><h1>{info['title']} {escape(info['version'])}</h1>"
        f'<p>{escape(info["description"])} <a href="openapi.json">OpenAPI document</a></p>'
        f"<table><tr><th>Route<th>Body<th>{routes}</table><h2>Objects</h2>{tables}</html>"
    )


def _route_row(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return (
        f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{_kind(body.get('schema', {}))}"
        f"<td>{escape(operation['summary'])}"
    )


def _schema_table(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}"
        f"<td>{_kind(value)}<td>{_default(value)}<td>{escape(value.get('description', ''))}"
        for field, value in schema.get("properties", {}).items()
    )
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"{escape(schema.get('description', ''))}</summary>"
        f"<table><tr><th>Field<th>Type<th>Default<th>{rows}</table></details>"
    )


def _default(schema: dict[str, Any]) -> str:
    return f"<code>{escape(str(schema['default']))}</code>" if schema.get("default") else ""


def _kind(schema: dict[str, Any]) -> str:
    """Return the type that a schema describes, in HTML."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf") or schema.get("oneOf"):
        kinds = [_kind(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_kind(schema['items'])}" if schema.get("items") else "array"
    kind = escape(str(schema.get("type", "any")))
    bounds = [
        f"{word} {schema[key]:g}"
        for key, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
        )
        if key in schema
    ]
    return f"{kind}, {', '.join(bounds)}" if bounds else kind

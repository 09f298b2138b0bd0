"""The fields that bound the form of an answer: OpenAI's `response_format`, vLLM's
`structured_outputs`.

Both become one `StructuredOutput`. Whether its schema, expression or grammar is one that can be
followed, `models.tokenizers.grammar` finds out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from csps.protocols.core.errors import nearest
from csps.protocols.openai.csps_options import fail, shown

MAX_GRAMMAR_CHARACTERS = 128 * 1024
"""Limit of a schema, an expression or a grammar: it travels to the ranks that sample, and waiting
requests keep it."""
MAX_WORDS = 1024
"""Limit of `choice`."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form that an answer must have."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    """A JSON schema, a regular expression, a JSON array of strings or a grammar."""
    whitespace: str | None = None
    """Regular expression of whitespace between the parts of JSON; None: the server's own."""


def read_response_format(value: Any) -> StructuredOutput | None:
    """Validate `response_format`; None for plain text."""
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return json_output({"type": "object"})
        case {"type": "json_schema", "json_schema": {**described}}:
            return json_output(described.get("schema") or {"type": "object"}, "json_schema.schema")
        case {"type": "json_schema", "schema": schema}:  # as `/v1/responses` has it
            return json_output(schema, "schema")
        case {"type": "json_schema"}:
            fail("required", "json_schema")
        case {"type": kind}:
            fail(f"must be 'text', 'json_object' or 'json_schema', got {shown(kind)}", "type")
    return fail(f"must be an object with a type, got {shown(value)}")


def json_output(
    schema: Any, field: str | None = None, whitespace: str | None = None
) -> StructuredOutput:
    """Return the form of JSON with this schema."""
    if not isinstance(schema, dict | bool):
        fail(f"must be a JSON schema, got {shown(schema)}", field)
    return StructuredOutput(
        kind="json", text=_bounded(json.dumps(schema), field), whitespace=whitespace
    )


_WAYS = ("json", "json_object", "regex", "choice", "grammar")
_REFUSED = ("structural_tag", "disable_additional_properties")
_HINTS = ("whitespace_pattern", "disable_any_whitespace", "disable_fallback")


def read_structured_outputs(value: Any) -> StructuredOutput | None:
    """Validate vLLM's `structured_outputs`; None if nothing is asked for."""
    if not isinstance(value, dict):
        fail(f"must be an object, got {shown(value)}")
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    for name in given:
        if name in _REFUSED:
            fail("not supported by this server", name)
        if name not in (*_WAYS, *_HINTS):
            fail(f"unknown field{nearest(name, (*_WAYS, *_HINTS))}", name)
    ways = [name for name in _WAYS if name in given]
    if not ways:
        return None
    if len(ways) > 1:
        fail(f"only one of them is allowed, got {' and '.join(ways)}")
    return _structured(ways[0], given[ways[0]], _whitespace(given))


def _whitespace(given: dict[str, Any]) -> str | None:
    if given.get("disable_any_whitespace"):
        return ""
    if (pattern := given.get("whitespace_pattern")) is None:
        return None
    if not isinstance(pattern, str):
        fail(f"must be a string, got {shown(pattern)}", "whitespace_pattern")
    return _bounded(pattern, "whitespace_pattern")


def _structured(way: str, value: Any, whitespace: str | None) -> StructuredOutput:
    match way:
        case "json_object":
            return json_output({"type": "object"}, way, whitespace)
        case "json":
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError):
                    fail("is not JSON", way)
            return json_output(value, way, whitespace)
        case "choice":
            return StructuredOutput(kind="choice", text=_choice(value))
    if not isinstance(value, str) or not value:
        fail(f"must be a string that is not empty, got {shown(value)}", way)
    kind: Literal["regex", "grammar"] = "regex" if way == "regex" else "grammar"
    return StructuredOutput(kind=kind, text=_bounded(value, way))


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(s, str) for s in value):
        fail(f"must be an array of strings, got {shown(value)}", "choice")
    if len(value) > MAX_WORDS or "" in value:
        fail(f"must have at most {MAX_WORDS} strings, none of them empty", "choice")
    return _bounded(json.dumps(value), "choice")


def _bounded(text: str, field: str | None) -> str:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        fail(f"at most {MAX_GRAMMAR_CHARACTERS} characters are supported, got {len(text)}", field)
    return text

"""Render chat messages to a prompt with the Jinja template of a checkpoint.

A template is a program by whoever made the checkpoint. It runs in Jinja's immutable sandbox, in the
environment that transformers' `apply_chat_template` gives it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    InvalidTextError,
    read_json_if_present,
)
from csps.models.tokenizers.tokenizer import special_tokens


class RawJson(dict[str, Any]):
    """A JSON object that `tojson` writes as its author did.

    A conversation contains what the model wrote in it. Written otherwise, with other blanks, it
    would be another prompt for the prefix cache.
    """

    def __init__(self, raw: str) -> None:
        try:
            values = json.loads(raw)
        except (ValueError, RecursionError):
            values = None
        # What a model wrote wrongly comes back as well: refusing it would end the conversation.
        super().__init__(values if isinstance(values, dict) else {})
        self.raw = raw or "{}"


class ChatTemplate:
    """A compiled chat template with its checkpoint's special tokens.

    Raises:
        CheckpointError: the template is not Jinja.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special = dict(special)

    def by(self, source: str) -> "ChatTemplate":
        """Return another template with the same special tokens.

        Raises:
            InvalidTextError: it is not Jinja.
        """
        try:
            return ChatTemplate(source, self._special)
        except CheckpointError as error:
            raise InvalidTextError(str(error)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render the prompt of a conversation, special tokens included.

        Args:
            messages: `role`, `content` and whatever else the template reads, as JSON data; keys
                that are None count as absent. Templates see the arguments of tool calls as objects
                (`RawJson`).
            add_generation_prompt: ends with the start of the assistant's answer.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            InvalidTextError: the template refuses the messages, or fails on them.
        """
        values = {
            "documents": None,
            **self._special,
            **variables,
            "messages": [_present(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except _FAILURES as error:
            raise InvalidTextError(f"the chat template rejects the messages: {error}") from error


_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors with which a template may fail, one that a client wrote included."""


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates see it."""
    present = {key: value for key, value in message.items() if value is not None}
    if calls := present.get("tool_calls"):
        present["tool_calls"] = [_with_arguments(call) for call in calls]
    return present


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", {})
    if not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": RawJson(function["arguments"])}}


def read_chat_template(model_dir: Path, given: str | None = None) -> ChatTemplate | None:
    """Return the checkpoint's template, or None; chat_template.jinja wins over the configuration.

    Args:
        given: file with a template that replaces the checkpoint's.

    Raises:
        CheckpointError: the given file cannot be read.
    """
    file = model_dir / "chat_template.jinja" if given is None else Path(given)
    if given is not None or file.exists():
        source: str | None = _text(file)
    else:
        source = _configured_template(read_json_if_present(model_dir / "tokenizer_config.json"))
    return None if source is None else ChatTemplate(source, special_tokens(model_dir))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read the chat template {file}: {why}") from None


def _configured_template(config: CheckpointJson) -> str | None:
    """Return the only template, or the one called `default` in a list of named ones."""
    templates = config.values.get("chat_template")
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates}
        templates = named.get("default")
    if templates is not None and not isinstance(templates, str):
        raise CheckpointError(f"{config.path}: chat_template must be a string or a list of them")
    return templates


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a class attribute)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; Jinja's own filter escapes HTML, which a prompt must not contain."""
    if isinstance(value, RawJson):
        return value.raw
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

"""Tools that an answer may call, and calls in the history of a conversation.

A template must write the history as the model wrote it, or the prefix cache would not know it
again. So tools stay as the client has sent them, and the arguments of a call keep their text.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator

from csps.protocols.openai.csps_options import JsonModel, fail, shown

MAX_TOOLS = 512
MAX_TOOL_CALLS = 512
"""Limit of the calls in one message."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


class ToolChoice(NamedTuple):
    """Whether an answer calls tools."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""
    """Name of the function to call if the choice is `named`."""


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Validate `tools`; each stays as it is."""
    if not isinstance(value, list):
        fail(f"must be an array, got {shown(value)}")
    if len(value) > MAX_TOOLS:
        fail(f"at most {MAX_TOOLS} tools are supported, got {len(value)}")
    names = [_function_name(tool) for tool in value]
    if len(set(names)) < len(names):
        fail("two functions have one name")
    return tuple(value)


def _function_name(tool: Any) -> str:
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if kind != "function":
        fail(f"only tools of type 'function' are supported, got {shown(kind or tool)}")
    function = tool.get("function")
    if not isinstance(function, dict):
        fail(f"'function' of a tool must be an object, got {shown(function)}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        fail(f"'parameters' of a function must be a JSON schema, got {shown(parameters)}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        fail(f"'description' of a function must be a string, got {shown(description)}")
    return function_name(function.get("name"))


def function_name(name: Any) -> str:
    """Validate the name of a function."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fail(f"a function's name must match {_NAME.pattern}, got {shown(name)}")
    return name


def read_tool_choice(value: Any) -> ToolChoice:
    """Validate `tool_choice`."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": name}}:
            return ToolChoice("named", function_name(name))
    return fail(
        "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, "
        f"got {shown(value)}"
    )


class CalledFunction(JsonModel):
    """The function of a call."""

    name: Annotated[str, PlainValidator(function_name, json_schema_input_type=str)]
    arguments: str
    """JSON as the model wrote it, which may be invalid."""


class ToolCall(JsonModel):
    """A call in the history of a conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Ignored; some clients send the parts of a stream back."""

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates read it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}

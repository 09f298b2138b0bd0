"""OpenAI's Responses API, without state: requests, as those of a chat, answers and events.

Nothing is stored, so a request brings its whole conversation, and what refers to an earlier
response is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from csps.protocols.openai.csps_options import (
    CspsRequestOptions,
    JsonModel,
    above,
    between,
    fail,
    only,
    shown,
)
from csps.protocols.openai.requests import MAX_COUNT, Ignored, Refused, few_messages, joined_texts
from csps.protocols.openai.responses import AnswerDelta, Part, error_body

# --- requests -------------------------------------------------------------------------------

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_ENCRYPTED = "reasoning.encrypted_content"
"""What clients without state include: reasoning is returned as text, so there is none."""
_RUN_BY_OPENAI = re.compile(r"(web_search|web_search_preview|image_generation)(_\d{4}_\d\d_\d\d)?")
_JOINT = "__"
"""Stands between namespace and function in the name that the model writes."""


def _texts(content: Any, field: str | None = None) -> str:
    """Return the text of a string, or of parts."""
    return joined_texts(content, lambda part: _text(part, field), "parts", field)


def _text(part: Any, field: str | None) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        fail(f"only parts of text are supported, got {shown(kind or part)}", field)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        fail(f"the text of a part must be a string, got {shown(text)}", field)
    return text


def _input(value: Any) -> list[dict[str, Any]]:
    """Return messages of a chat."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        fail(f"must be a string or an array of items, got {shown(value)}")
    few_messages(value)
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(value):
        _append(messages, item, f"[{number}]")
    return messages


def _append(messages: list[dict[str, Any]], item: Any, at: str) -> None:
    """Append an item; those that one answer had become one message again."""
    match item:
        case {"type": "function_call", "name": name, "arguments": given, "call_id": number}:
            call = {"id": number, "type": "function"}
            called = _name_in_chat(name, item.get("namespace"))
            call["function"] = {"name": called, "arguments": given}
            _answer(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": called, "output": output}:
            text = _texts(output, at)
            messages.append({"role": "tool", "tool_call_id": called, "content": text})
        case {"type": "reasoning"}:
            if thought := _texts(item.get("content") or item.get("summary") or "", at):
                _new_answer(messages)["reasoning_content"] = thought
        case {"role": "assistant", "content": content}:
            said = _texts(content, at)
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
                last["content"] = said
            else:
                _new_answer(messages)["content"] = said
        case {"role": role, "content": content}:
            messages.append({"role": role, "content": _texts(content, at)})
        case _:
            kind = item.get("type") if isinstance(item, dict) else None
            fail(f"an item of this kind is not supported: {shown(kind or item)}", at)


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that the last items belong to."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1]
    return _new_answer(messages)


def _new_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


class ResponseTools(NamedTuple):
    """Tools of a request, as functions of a chat."""

    functions: list[dict[str, Any]]
    namespaces: dict[str, str]
    """Namespace of each function that has one, by the function's name in the chat."""


def _tools(value: Any) -> ResponseTools:
    """Return the functions that the model may call, those in namespaces too.

    Clients list what only OpenAI's servers run beside their own functions. The model is not offered
    it, as by a server on which it is switched off.
    """
    if not isinstance(value, list):
        fail(f"must be an array, got {shown(value)}")
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, str] = {}
    for tool in value:
        match tool:
            case {"type": str(kind)} if _RUN_BY_OPENAI.fullmatch(kind):
                pass
            case {"type": "namespace", "name": str(namespace), "tools": list(inside)} if namespace:
                grouped = [_function(each, namespace) for each in inside]
                functions += _introduced(grouped, tool.get("description"))
                namespaces |= {each["function"]["name"]: namespace for each in grouped}
            case {"type": "namespace"}:
                fail("a namespace must have a name and an array of tools")
            case _:
                functions.append(_function(tool))
    return ResponseTools(functions, namespaces)


def _function(tool: Any, namespace: str | None = None) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        fail(f"only tools of type 'function' are supported, got {shown(kind or tool)}")
    named = {name: tool.get(name) for name in ("name", "description", "parameters")}
    named["name"] = _name_in_chat(named["name"], namespace)
    function = {name: value for name, value in named.items() if value is not None}
    return {"type": "function", "function": function}


def _introduced(functions: list[dict[str, Any]], about: Any) -> list[dict[str, Any]]:
    """Return the functions of a namespace, whose description stands before that of the first."""
    if not functions or not isinstance(about, str) or not about:
        return functions
    first = functions[0]["function"]
    own = first.get("description")
    if own is not None and not isinstance(own, str):
        return functions  # refused with the chat
    described = {**first, "description": f"{about}\n\n{own}" if own else about}
    return [{"type": "function", "function": described}, *functions[1:]]


def _name_in_chat(name: Any, namespace: Any) -> Any:
    """Return a function's name as the model writes it, which knows no namespaces."""
    if not namespace or not isinstance(name, str):
        return name
    if not isinstance(namespace, str):
        fail(f"a namespace must be a string, got {shown(namespace)}")
    return f"{namespace}{_JOINT}{name}"


def _tool_choice(value: Any) -> Any:
    match value:
        case {"type": "function", "name": name}:
            called = _name_in_chat(name, value.get("namespace"))
            return {"type": "function", "function": {"name": called}}
        case _:
            return value


def _text_config(value: Any) -> Any:
    """Return the `response_format` of a chat."""
    if not isinstance(value, dict):
        fail(f"must be an object, got {shown(value)}")
    return value.get("format")


def _reasoning(value: Any) -> Any:
    """Return the `reasoning_effort` of a chat."""
    if not isinstance(value, dict):
        fail(f"must be an object, got {shown(value)}")
    return value.get("effort")


def _include(value: Any) -> None:
    if not isinstance(value, list) or any(item != _ENCRYPTED for item in value):
        fail(f"only {shown(_ENCRYPTED)} is supported")


class ResponsesRequest(JsonModel):
    """Body of `POST /v1/responses`."""

    model: str
    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(_input, json_schema_input_type=str | list[dict[str, Any]]),
    ]
    instructions: str = ""
    max_output_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    parallel_tool_calls: bool = True
    reasoning: Annotated[Any, PlainValidator(_reasoning, json_schema_input_type=dict[str, Any])] = (
        None
    )
    stream: bool = False
    temperature: Annotated[float, between(0, 2)] | None = None
    text: Annotated[Any, PlainValidator(_text_config, json_schema_input_type=dict[str, Any])] = None
    tool_choice: Annotated[
        Any, PlainValidator(_tool_choice, json_schema_input_type=str | dict[str, Any])
    ] = None
    tools: Annotated[
        ResponseTools, PlainValidator(_tools, json_schema_input_type=list[dict[str, Any]])
    ] = Field(default_factory=lambda: ResponseTools([], {}))
    top_p: Annotated[float, above(0, 1)] | None = None

    # At their defaults only
    background: Annotated[bool, only(False)] = False
    context_management: Refused = None
    conversation: Refused = None
    include: Annotated[None, PlainValidator(_include, json_schema_input_type=list[str])] = None
    previous_response_id: Refused = None
    prompt: Refused = None
    top_logprobs: Annotated[int, only(0)] = 0
    truncation: Annotated[str, only("disabled")] = "disabled"

    # Ignored
    access_programs: Ignored = None
    client_metadata: Ignored = None
    image: Ignored = None
    max_tool_calls: Ignored = None
    metadata: Ignored = None
    moderation: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    stream_options: Ignored = None
    user: Ignored = None

    return_progress: bool = False
    csps: CspsRequestOptions = CspsRequestOptions()

    def chat(self) -> dict[str, Any]:
        """Return the fields of the same request as a chat."""
        begin = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": begin + self.input,
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": self.tools.functions or None,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning,
            "response_format": self.text,
            "return_progress": self.return_progress,
        }
        return {name: value for name, value in fields.items() if value is not None}


# --- answers --------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesAnswer:
    """One answer, whole or as events."""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt_tokens: int,
        cached_tokens: Callable[[], int],
        reasoning_tokens: Callable[[], int] = lambda: 0,
        namespaces: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Begin an answer.

        Args:
            namespaces: those of `ResponseTools`.
        """
        self._id, self._model, self._created = request_id, model, created
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._reasoning_tokens = reasoning_tokens
        self._namespaces = namespaces
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Text of the last item."""
        self._open = False
        """The last item may get more text."""
        self._sequence = -1
        self._cut = False
        self.bytes = 0
        """Bytes so far, about."""

    def start(self, index: int) -> bytes:
        """Encode the first events."""
        events = (
            self._event(f"response.{state}", response=self._response("in_progress", None))
            for state in ("created", "in_progress")
        )
        return b"".join(events)

    def delta(self, delta: AnswerDelta, csps: dict[str, Any] | None = None) -> bytes:
        """Encode what some tokens add."""
        shown_parts = [part for part in delta.parts if part.text or part.kind == "call"]
        events = b"".join(event for part in shown_parts for event in self._part(part))
        self._cut = delta.finish_reason == "length"
        return events

    def _part(self, part: Part) -> Iterator[bytes]:
        kind = _ITEM_OF[part.kind]
        if part.kind == "call" or not self._open or self._items[-1]["type"] != kind:
            yield from self._end_item("completed")
            yield from self._begin_item(part)
        if part.kind == "call":
            return
        self._texts.append(part.text)
        self.bytes += len(part.text)
        where: dict[str, Any] = {} if kind == "function_call" else {"content_index": 0}
        if kind == "message":
            where["logprobs"] = []
        yield self._item_event(f"response.{_DELTAS[kind]}.delta", delta=part.text, **where)

    def _begin_item(self, part: Part) -> Iterator[bytes]:
        kind, number = _ITEM_OF[part.kind], len(self._items)
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        match kind:
            case "message":
                item |= {"id": f"msg_{number}_{self._id}", "role": "assistant", "content": []}
            case "reasoning":
                item |= {"id": f"rs_{number}_{self._id}", "summary": [], "content": []}
            case _:
                item |= {
                    "id": f"fc_{number}_{self._id}",
                    "call_id": part.call_id,
                    **self._called(part.text),
                    "arguments": "",
                }
        self._items.append(item)
        self._texts, self._open = [], True
        yield self._event("response.output_item.added", output_index=number, item=item)
        if kind != "function_call":
            yield self._item_event(
                "response.content_part.added", content_index=0, part=_content(kind, "")
            )

    def _called(self, name: str) -> dict[str, str]:
        """Return the function of a call, by its name in the chat."""
        if (namespace := self._namespaces.get(name)) is None:
            return {"name": name}
        return {"name": name.removeprefix(namespace + _JOINT), "namespace": namespace}

    def _end_item(self, status: Status) -> Iterator[bytes]:
        if not self._open:
            return
        item, text = self._items[-1], "".join(self._texts)
        kind = item["type"]
        self._open = False
        if kind == "function_call":
            yield self._item_event(
                "response.function_call_arguments.done", arguments=text, name=item["name"]
            )
            item["arguments"] = text
        else:
            where: dict[str, Any] = {"content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._item_event(f"response.{_DELTAS[kind]}.done", text=text, **where, **more)
            part = _content(kind, text)
            yield self._item_event("response.content_part.done", part=part, **where)
            item["content"] = [part]
        item["status"] = status
        number = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=number, item=item)

    def progress(self, report: dict[str, Any]) -> bytes:
        """Encode an event that only says how far the prompt is."""
        response = self._response("in_progress", None)
        return self._event("response.in_progress", response=response, prompt_progress=report)

    def keep_alive(self) -> bytes:
        """Encode an event that keeps a silent stream alive."""
        return self._event("response.in_progress", response=self._response("in_progress", None))

    def end(self, completion_tokens: int) -> bytes:
        """Encode the last events."""
        status: Status = "incomplete" if self._cut else "completed"
        events = b"".join(self._end_item(status))
        response = self._response(status, completion_tokens)
        return events + self._event(f"response.{status}", response=response)

    def whole(self, completion_tokens: int, csps: dict[str, Any] | None) -> bytes:
        """Encode the body of an answer that is not streamed."""
        status: Status = "incomplete" if self._cut else "completed"
        for _ in self._end_item(status):
            pass
        report = {} if csps is None else {"csps": csps}
        return json.dumps({**self._response(status, completion_tokens), **report}).encode()

    def _response(self, status: Status, completion_tokens: int | None) -> dict[str, Any]:
        usage = None
        if completion_tokens is not None:
            usage = {
                "input_tokens": self._prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": self._cached_tokens(),
                    "cache_write_tokens": 0,
                },
                "output_tokens": completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
                "total_tokens": self._prompt_tokens + completion_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": None,
            "metadata": {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        number = len(self._items) - 1
        item = {"item_id": self._items[-1]["id"], "output_index": number}
        return self._event(kind, **item, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        data = json.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        return f"event: {kind}\ndata: {data}\n\n".encode()


_ITEM_OF = {
    "content": "message",
    "reasoning": "reasoning",
    "call": "function_call",
    "arguments": "function_call",
}
_DELTAS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def responses_error_event(exc: BaseException) -> bytes:
    """Return the event that ends a stream whose request failed after its first event."""
    _, body, _ = error_body(exc)
    told = {name: body["error"][name] for name in ("code", "message", "param")}
    data = json.dumps({"type": "error", "sequence_number": 0, **told})
    return f"event: error\ndata: {data}\n\n".encode()

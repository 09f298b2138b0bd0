"""Anthropic's Messages API: its requests, as those of a chat, its answers, events and errors.

A request becomes a `ChatCompletionRequest`, the one model of a conversation. Fields that would
change the answer and are not supported are refused by name; `cache_control` and the like are
ignored wherever they stand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator

from csps.protocols.openai.csps_options import (
    CspsRequestOptions,
    JsonModel,
    above,
    between,
    fail,
    shown,
)
from csps.protocols.openai.requests import MAX_COUNT, Ignored, Refused, few_messages, joined_texts
from csps.protocols.openai.responses import AnswerDelta, Part, error_body

# --- requests -------------------------------------------------------------------------------


def _texts(content: Any, field: str | None = None) -> str:
    """Return the text of a string, or of blocks of text."""
    return joined_texts(content, lambda block: _text(block, field), "blocks", field)


def _text(block: Any, field: str | None) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        fail(f"only blocks of type 'text' are supported here, got {shown(kind or block)}", field)
    if not isinstance(text := block.get("text"), str):
        fail(f"'text' of a block must be a string, got {shown(text)}", field)
    return text


def _thinking(value: Any) -> bool | None:
    match value:
        case {"type": "enabled" | "adaptive" | "between_tools"}:
            return True
        case {"type": "disabled"}:
            return False
    return fail(f"must be an object with a type, got {shown(value)}")


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return tools as those of a chat."""
    if not isinstance(value, list):
        fail(f"must be an array, got {shown(value)}")
    return [_tool(tool) for tool in value]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        fail(f"a tool must be an object, got {shown(tool)}")
    if (kind := tool.get("type") or "custom") != "custom":
        fail(f"only tools of the client's own are supported, got {shown(kind)}")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function = {name: value for name, value in function.items() if value is not None}
    return {
        "type": "function",
        "function": {**function, "parameters": tool.get("input_schema") or {"type": "object"}},
    }


def _tool_choice(value: Any) -> dict[str, Any]:
    """Return the fields of a chat that say which tools are called."""
    if not isinstance(value, dict):
        fail(f"must be an object, got {shown(value)}")
    parallel = {} if not value.get("disable_parallel_tool_use") else {"parallel_tool_calls": False}
    match value:
        case {"type": "auto" | "none" as mode}:
            return {"tool_choice": mode, **parallel}
        case {"type": "any"}:
            return {"tool_choice": "required", **parallel}
        case {"type": "tool", "name": name}:
            named = {"type": "function", "function": {"name": name}}
            return {"tool_choice": named, **parallel}
    return fail("must have the type 'auto', 'any', 'tool' with a name, or 'none'")


def _output_config(value: Any) -> dict[str, Any]:
    """Return the fields of a chat that say what the answer is like."""
    if not isinstance(value, dict):
        fail(f"must be an object, got {shown(value)}")
    fields = {"effort": "reasoning_effort", "format": "response_format"}
    for name in value:
        if name not in fields:
            fail("unknown field", name)
    return {fields[name]: item for name, item in value.items() if item is not None}


class MessagesRequest(JsonModel):
    """Body of `POST /v1/messages`."""

    model: str
    messages: Annotated[list[dict[str, Any]], BeforeValidator(few_messages)]
    max_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    """Limit of the answer, which only counting tokens does without."""
    system: Annotated[
        str, PlainValidator(_texts, json_schema_input_type=str | list[dict[str, Any]])
    ] = ""
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Annotated[float, between(0, 2)] | None = None
    top_k: Annotated[int, between(-1, MAX_COUNT)] | None = None
    top_p: Annotated[float, above(0, 1)] | None = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        PlainValidator(_tools, json_schema_input_type=list[dict[str, Any]]),
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None, PlainValidator(_tool_choice, json_schema_input_type=dict[str, Any])
    ] = None
    thinking: Annotated[
        bool | None, PlainValidator(_thinking, json_schema_input_type=dict[str, Any])
    ] = None
    """Whether the template lets the model reason; None: as it does by itself."""
    output_config: Annotated[
        dict[str, Any] | None, PlainValidator(_output_config, json_schema_input_type=dict[str, Any])
    ] = None

    # Refused unless empty
    container: Refused = None
    mcp_servers: Refused = None

    # Ignored
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    prefill: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    return_progress: bool = False
    csps: CspsRequestOptions = CspsRequestOptions()

    def chat(self) -> dict[str, Any]:
        """Return the fields of the same request as a chat."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{number}]")
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "tools": self.tools,
            "return_progress": self.return_progress,
            **(self.tool_choice or {}),
            **(self.output_config or {}),
        }
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return {name: value for name, value in fields.items() if value is not None}


def _chat_messages(message: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """Yield a message as those of a chat, where results of tools have messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        fail(f"must be 'user' or 'assistant', got {shown(role)}", f"{at}.role")
    if not isinstance(content, list):
        yield {"role": role, "content": _texts(content, f"{at}.content")}
        return
    if role == "assistant":
        yield _assistant(content, at)
        return
    texts: list[str] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            result = block.get("content")
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": "" if result is None else _texts(result, f"{at}.content"),
            }
        else:
            texts.append(_text(block, f"{at}.content"))
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(content: list[Any], at: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        match block:
            case {"type": "tool_use", "id": called, "name": name, "input": dict(given)}:
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": called, "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                texts.append(_text(block, f"{at}.content"))
    said: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    return {**said, "tool_calls": calls} if calls else said


# --- answers --------------------------------------------------------------------------------

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Event that keeps a silent stream alive."""


class MessagesAnswer:
    """One answer, whole or as events."""

    def __init__(
        self, *, request_id: str, model: str, prompt_tokens: int, cached_tokens: Callable[[], int]
    ) -> None:
        self._message = {
            "id": request_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        """Text of each block: reasoning, text, or JSON of a call's input."""
        self._kind = ""
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self.bytes = 0
        """Bytes so far, about."""

    def start(self, index: int) -> bytes:
        """Encode the first event."""
        message = {**self._message, "content": [], **self._stop, "usage": self._usage(0)}
        return _event("message_start", message=message)

    def delta(self, delta: AnswerDelta, csps: dict[str, Any] | None = None) -> bytes:
        """Encode what some tokens add."""
        shown_parts = [part for part in delta.parts if part.text or part.kind == "call"]
        events = b"".join(map(self._part, shown_parts))
        if delta.finish_reason is not None:
            reason = "stop_sequence" if delta.stop_string else _STOP_REASONS[delta.finish_reason]
            self._stop = {"stop_reason": reason, "stop_sequence": delta.stop_string}
        return events

    def _part(self, part: Part) -> bytes:
        events = b""
        if part.kind == "call" or (part.kind != self._kind and part.kind != "arguments"):
            events = self._end_block() + self._begin_block(part)
        if part.kind == "call":
            return events
        self._texts[-1].append(part.text)
        self.bytes += len(part.text)
        match part.kind:
            case "content":
                delta = {"type": "text_delta", "text": part.text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": part.text}
            case _:
                delta = {"type": "input_json_delta", "partial_json": part.text}
        index = len(self._blocks) - 1
        return events + _event("content_block_delta", index=index, delta=delta)

    def _begin_block(self, part: Part) -> bytes:
        self._kind = part.kind
        match part.kind:
            case "content":
                block: dict[str, Any] = {"type": "text", "text": ""}
            case "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "tool_use", "id": part.call_id, "name": part.text, "input": {}}
        self._blocks.append(block)
        self._texts.append([])
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _end_block(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def progress(self, report: dict[str, Any]) -> bytes:
        """Encode an event that only says how far the prompt is."""
        return _event("ping", prompt_progress=report)

    def end(self, completion_tokens: int) -> bytes:
        """Encode the last events."""
        usage = self._usage(completion_tokens)
        last = _event("message_delta", delta=self._stop, usage=usage)
        return self._end_block() + last + _event("message_stop")

    def whole(self, completion_tokens: int, csps: dict[str, Any] | None) -> bytes:
        """Encode the body of an answer that is not streamed."""
        content = [self._whole_block(*each) for each in zip(self._blocks, self._texts, strict=True)]
        report = {} if csps is None else {"csps": csps}
        body = {**self._message, "content": content, **self._stop}
        return json.dumps({**body, "usage": self._usage(completion_tokens), **report}).encode()

    def _whole_block(self, block: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        text = "".join(texts)
        if block["type"] != "tool_use":
            return {**block, "text" if block["type"] == "text" else "thinking": text}
        try:
            given = json.loads(text or "{}")
        except (ValueError, RecursionError):  # cut by the answer's limit
            given = None
        return {**block, "input": given if isinstance(given, dict) else {}}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        cached = self._cached_tokens()
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": completion_tokens,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


# --- errors ---------------------------------------------------------------------------------

_ERROR_TYPES: dict[int, Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
]] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def messages_error_body(exc: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return HTTP status, body and headers for a request that failed with `exc`."""
    status, body, headers = error_body(exc)
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    message = body["error"]["message"]
    return status, {"type": "error", "error": {"type": kind, "message": message}}, headers


def messages_error_event(exc: BaseException) -> bytes:
    """Return the event that ends a stream whose request failed after its first event."""
    _, body, _ = messages_error_body(exc)
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()

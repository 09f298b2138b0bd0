"""OpenAI's response bodies, error bodies and server-sent events.

All of a streamed chunk but the text is the same from token to token. It is encoded once per stream,
so a token costs one JSON string, a few microseconds; a pydantic model per chunk costs ten times
that.

An answer that is not streamed is encoded token by token as well (`WholeChat`, `WholeCompletion`).
At the end it would hold up the event loop: a second and a half for 4,096 tokens with alternatives.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _json_string
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel

from csps.protocols.core.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    GangLost,
    RanksHeld,
    RequestError,
    Superseded,
    TransferError,
)
from csps.protocols.openai.requests import StreamOptions

FinishReason = Literal["stop", "length", "tool_calls"]

_LEAST_LOGPROB = -9999.0
"""Value in place of minus infinity, which JSON lacks; vLLM's."""


@dataclass(frozen=True, kw_only=True)
class TextLogprob:
    """A token as text, with its log-probability and those of the likeliest alternatives."""

    token: str
    token_bytes: bytes
    """Bytes of the token alone; `token` may hold escaped bytes where the token splits a
    character."""
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[TextLogprob, ...] = ()
    offset: int = 0
    """Characters of the answer before the token. A token that continues a character has the
    offset of that character."""

    @property
    def finite(self) -> float:
        """`logprob` as JSON can express it."""
        assert self.logprob is not None, "the first token of a prompt has none"
        return finite(self.logprob)


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can express it."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


class Part(NamedTuple):
    """What some text adds to an answer. A tuple, because every token makes one."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    """The function's name where a call begins."""
    call: int = -1
    """Number of the call, from 0."""
    call_id: str = ""
    """Id of the call, where it begins."""


class AnswerDelta(NamedTuple):
    """One token's contribution to an answer. A tuple, because every token makes one."""

    parts: Sequence[Part]
    """Text to show; empty within a character, or while it may become a stop string."""
    tokens: int
    """Tokens of the answer up to this one, including a final end-of-sequence token."""
    finish_reason: FinishReason | None = None
    logprob: TextLogprob | None = None
    choice: int = 0
    """Index of the choice."""
    stop_string: str | None = None
    """Stop string that ended the answer."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    """Prompt tokens whose KV was reused."""


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int
    """Tokens of the answer that are reasoning, its marks included."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Left out of an answer without reasoning."""

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        reasoning_tokens: int = 0,
    ) -> Self:
        details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=details if reasoning_tokens else None,
        )


# --- /v1/completions ------------------------------------------------------------------------


class CompletionLogprobs(BaseModel):
    """Four parallel lists, one element per token."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    """The first token of an echoed prompt has none."""
    top_logprobs: list[dict[str, float] | None]

    @classmethod
    def of(cls, entries: Sequence[TextLogprob]) -> Self:
        return cls(
            text_offset=[entry.offset for entry in entries],
            tokens=[entry.token for entry in entries],
            token_logprobs=[None if e.logprob is None else e.finite for e in entries],
            # As in OpenAI's API, the sampled token is always among them.
            top_logprobs=[
                None if e.logprob is None else {top.token: top.finite for top in (*e.top, e)}
                for e in entries
            ],
        )


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    """Number of tokens that are at least as likely."""
    decoded_token: str


PromptLogprobsByToken = list[dict[int, PromptLogprob] | None]
"""Likeliest tokens at each token of a prompt, and the token itself; none for the first one."""


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobsByToken | None = None
    """Left out unless the request asked for them."""
    finish_reason: FinishReason


class CompletionResponse(BaseModel):
    """Body of the answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    csps: dict[str, Any] | None = None
    """Plan and timings, where the request asked for them; otherwise left out."""


# --- /v1/chat/completions -------------------------------------------------------------------


class ChatTopLogprob(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]

    @classmethod
    def of(cls, entry: TextLogprob) -> Self:
        return cls(
            token=entry.token,
            bytes=list(entry.token_bytes),
            logprob=entry.finite,
            top_logprobs=[
                ChatTopLogprob(token=t.token, bytes=list(t.token_bytes), logprob=t.finite)
                for t in entry.top
            ],
        )


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, entries: Sequence[TextLogprob]) -> Self:
        return cls(content=[ChatTokenLogprob.of(entry) for entry in entries])


class FunctionCall(BaseModel):
    name: str
    arguments: str


class CallOfTool(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Text; None if there are calls only."""
    refusal: None = None
    reasoning_content: str | None = None
    """Reasoning apart from the text; left out if there is none."""
    tool_calls: list[CallOfTool] | None = None
    """Calls; left out if there are none."""


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletionResponse(BaseModel):
    """Body of the answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobsByToken | None = None
    """Left out unless the request asked for them."""
    usage: Usage
    csps: dict[str, Any] | None = None
    """Plan and timings, where the request asked for them; otherwise left out."""


# --- answers that are not streamed ----------------------------------------------------------


class _Joined:
    """Text that is appended to in small parts, kept as bytes in large ones."""

    PIECE_CHARACTERS = 64 * 1024

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._recent: list[str] = []
        self._recent_characters = 0

    def append(self, part: str) -> None:
        self._recent.append(part)
        self._recent_characters += len(part)
        if self._recent_characters > self.PIECE_CHARACTERS:
            self._join()

    def pieces(self) -> list[bytes]:
        self._join()
        return self._pieces

    def _join(self) -> None:
        self._pieces.append("".join(self._recent).encode())
        self._recent, self._recent_characters = [], 0


class _JoinedList(_Joined):
    """A JSON array."""

    def append(self, part: str) -> None:
        super().append(f",{part}" if self._pieces or self._recent else part)

    def items(self) -> list[bytes]:
        return super().pieces()

    def pieces(self) -> list[bytes]:
        return [b"[", *self.items(), b"]"]


class _WholeChoice(ABC):
    """Encodes one choice of a body, as its tokens come."""

    def __init__(self) -> None:
        self._has_logprobs = False
        self.bytes = 0
        """Bytes so far, about."""

    def push(self, parts: Sequence[Part], logprob: TextLogprob | None) -> None:
        """Append what a token adds, and its log-probability."""
        for part in parts:
            shown = _json_string(part.text)[1:-1]
            self._push_part(part, shown)
            self.bytes += len(shown)
        if logprob is not None:
            self._has_logprobs = True
            self.bytes += self._push_logprob(logprob)

    def pieces(
        self, index: int, finish_reason: FinishReason, prompt_logprobs: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the choice as JSON, in pieces of limited length.

        Args:
            prompt_logprobs: value of the field with this name; empty leaves it out.
        """
        return [
            f'{{"index":{index},'.encode(),
            *self._answer(),
            b',"logprobs":',
            *(self._logprobs() if self._has_logprobs else [b"null"]),
            *([b',"prompt_logprobs":', *prompt_logprobs] if prompt_logprobs else ()),
            f',"finish_reason":"{finish_reason}"}}'.encode(),
        ]

    @abstractmethod
    def _push_part(self, part: Part, shown: str) -> None:
        """Append a part, whose text in JSON is `shown`."""

    @abstractmethod
    def _answer(self) -> list[bytes]:
        """Return the field with the answer."""

    @abstractmethod
    def _push_logprob(self, entry: TextLogprob) -> int:
        """Append a log-probability; return its bytes."""

    @abstractmethod
    def _logprobs(self) -> list[bytes]:
        """Return the object of all log-probabilities."""


class PromptLogprobsList:
    """vLLM's field `prompt_logprobs`: for each token of a prompt, the likeliest ones and itself, by
    token id."""

    def __init__(self) -> None:
        self._entries = _JoinedList()
        self.bytes = 0
        """Bytes so far, about."""

    def push(self, alternatives: Sequence[tuple[int, int, TextLogprob]]) -> None:
        """Append a token: its alternatives with their ids and ranks, none for the first token."""
        shown = {
            token: {"logprob": entry.finite, "rank": rank, "decoded_token": entry.token}
            for token, rank, entry in alternatives
        }
        self._entries.append(encoded := json.dumps(shown or None))
        self.bytes += len(encoded)

    def pieces(self) -> list[bytes]:
        """Return the value of the field as JSON, in pieces of limited length."""
        return self._entries.pieces()


class WholeCompletion(_WholeChoice):
    """A choice in the body of the answer of `POST /v1/completions`.

    Args:
        echoed: choice with nothing but the log-probabilities of the prompt's tokens, which precede
            those of the answer; None for none.
    """

    def __init__(self, echoed: WholeCompletion | None = None) -> None:
        super().__init__()
        self._echoed = echoed
        self._text = _Joined()
        self._lists = {name: _JoinedList() for name in CompletionLogprobs.model_fields}

    def _push_part(self, part: Part, shown: str) -> None:
        self._text.append(shown)

    def _answer(self) -> list[bytes]:
        return [b'"text":"', *self._text.pieces(), b'"']

    def _push_logprob(self, entry: TextLogprob) -> int:
        one = CompletionLogprobs.of([entry]).model_dump()
        encoded = {name: json.dumps(values[0]) for name, values in one.items()}
        for name, value in encoded.items():
            self._lists[name].append(value)
        return sum(map(len, encoded.values()))

    def _logprobs(self) -> list[bytes]:
        pieces: list[bytes] = []
        for name, values in self._lists.items():
            pieces.append(f'{"," if pieces else "{"}"{name}":['.encode())
            if self._echoed is not None:
                pieces += [*self._echoed._lists[name].items(), b","]
            pieces += [*values.items(), b"]"]
        return [*pieces, b"}"]


class WholeChat(_WholeChoice):
    """A choice in the body of the answer of `POST /v1/chat/completions`."""

    def __init__(self) -> None:
        super().__init__()
        self._content, self._reasoning = _Joined(), _Joined()
        self._calls: list[tuple[Part, _Joined]] = []
        self._entries = _JoinedList()

    def _push_part(self, part: Part, shown: str) -> None:
        match part.kind:
            case "content":
                self._content.append(shown)
            case "reasoning":
                self._reasoning.append(shown)
            case "call":
                self._calls.append((part, _Joined()))
            case "arguments":
                self._calls[part.call][1].append(shown)

    def _answer(self) -> list[bytes]:
        content = self._content.pieces()
        pieces = [b'"message":{"role":"assistant","content":']
        # As OpenAI has it, a message of calls alone has no text.
        pieces += [b'"', *content, b'"'] if any(content) or not self._calls else [b"null"]
        pieces.append(b',"refusal":null')
        if any(reasoning := self._reasoning.pieces()):
            pieces += [b',"reasoning_content":"', *reasoning, b'"']
        for number, (call, arguments) in enumerate(self._calls):
            name = _json_string(call.text)
            head = f'{{"id":"{call.call_id}","type":"function","function":{{"name":{name},'
            pieces.append((b"," if number else b',"tool_calls":[') + head.encode())
            pieces += [b'"arguments":"', *arguments.pieces(), b'"}}']
        return [*pieces, b"]}" if self._calls else b"}"]

    def _push_logprob(self, entry: TextLogprob) -> int:
        encoded = ChatTokenLogprob.of(entry).model_dump_json()
        self._entries.append(encoded)
        return len(encoded)

    def _logprobs(self) -> list[bytes]:
        return [b'{"content":', *self._entries.pieces(), b',"refusal":null}']


def whole_body(
    response: CompletionResponse | ChatCompletionResponse,
    choices: Sequence[list[bytes]],
    prompt_logprobs: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the body of an answer in pieces of limited length.

    Args:
        response: all of the body but its choices.
        choices: what `pieces` returned for each.
        prompt_logprobs: value of the field with this name; empty leaves it out.
    """
    left_out: dict[str, Any] = {"prompt_logprobs": True}
    if response.csps is None:
        left_out["csps"] = True
    if response.usage.completion_tokens_details is None:
        left_out["usage"] = {"completion_tokens_details"}
    outside = response.model_dump_json(exclude=left_out)
    before, empty, after = outside.partition('"choices":[]')
    assert empty, "the choices are encoded elsewhere"
    inner = [piece for choice in choices for piece in (b",", *choice)][1:]
    body = [f'{before}"choices":['.encode(), *inner, f"]{after}".encode()]
    if prompt_logprobs:
        body[-1] = body[-1][:-1]
        body += [b',"prompt_logprobs":', *prompt_logprobs, b"}"]
    return body


# --- /v1/models -----------------------------------------------------------------------------


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "csps"
    max_model_len: int
    """Largest number of tokens of prompt and answer together; vLLM's name."""
    default_max_tokens: int
    """Limit of the answer to a chat that sets none."""


class ModelList(BaseModel):
    """Body of the answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


# --- errors ---------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """Field at fault."""
    code: str | None


class ErrorBody(BaseModel):
    """Body of an error; those of `/v1/messages` have Anthropic's shape."""

    error: ErrorDetail


def error_body(exc: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return HTTP status, body and headers for a request that failed with `exc`.

    The message of a `RequestError` is sent to the client. For other errors the client only learns
    whether to try again.
    """
    if isinstance(exc, RequestError):
        return exc.status, _error(str(exc), exc.type, exc.param, exc.code), _headers(exc)
    status, message, code = _public_description(exc)
    retry = {"Retry-After": "5"} if status == 503 else {}
    return status, _error(message, "server_error", None, code), retry


def _headers(exc: RequestError) -> dict[str, str]:
    retry_after_s: float | None = getattr(exc, "retry_after_s", None)
    if retry_after_s is not None:
        return {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return {"WWW-Authenticate": "Bearer"} if exc.status == 401 else {}


def _public_description(exc: BaseException) -> tuple[int, str, str]:
    match exc:
        case DeadlineExceeded():
            return 504, "The request took longer than the server allows.", "timeout"
        # Temporary failures only: a bug in a rank arrives as a `FaultError` as well. `Cancelled`
        # is a request that was still running when the server shut down.
        case (
            GangLost()
            | RanksHeld()
            | Superseded()
            | ConnectionLost()
            | TransferError()
            | Cancelled()
        ):
            return 503, "A part of the server is being restarted. Try again.", "unavailable"
        case _:
            return 500, "The server failed to process the request.", "internal_error"


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


DONE = b"data: [DONE]\n\n"
"""Event that ends every stream."""


def error_event(exc: BaseException) -> bytes:
    """Return the event that ends a stream whose request failed after its first chunk."""
    _, body, _ = error_body(exc)
    return f"data: {json.dumps(body)}\n\n".encode()


class _Stream(ABC):
    """Encodes the chunks of one answer, in order."""

    _object: str

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt_tokens: int,
        cached_tokens: Callable[[], int],
        reasoning_tokens: Callable[[], int] = lambda: 0,
        options: StreamOptions,
    ) -> None:
        envelope = {"id": request_id, "object": self._object, "created": created, "model": model}
        self._head = f'data: {json.dumps(envelope)[:-1]}, "choices": ['
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._reasoning_tokens = reasoning_tokens
        self._include_usage = options.include_usage
        self._continuous_usage = options.include_usage and options.continuous_usage_stats

    def start(self, index: int) -> bytes:
        """Encode what comes before the first token of a choice."""
        return b""

    def delta(self, delta: AnswerDelta, csps: dict[str, Any] | None = None) -> bytes:
        """Encode one chunk.

        Args:
            delta: its `tokens` are those of all choices.
            csps: report for `explain`, which comes with the last chunk of a choice.
        """
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        if delta.finish_reason == "stop" and delta.stop_string is not None:  # vLLM's field
            reason += f', "stop_reason": {_json_string(delta.stop_string)}'
        logprobs = self._logprobs(() if delta.logprob is None else (delta.logprob,))
        report = "" if csps is None else f', "csps": {json.dumps(csps)}'
        return (
            f'{self._head}{{"index": {delta.choice}, {self._answer(delta.parts)}'
            f', "logprobs": {logprobs}, "finish_reason": {reason}}}]'
            f"{self._usage_so_far(delta.tokens)}{report}}}\n\n"
        ).encode()

    def progress(self, report: dict[str, Any]) -> bytes:
        """Encode a chunk that only says how far the prompt is."""
        return f'{self._head}], "prompt_progress": {json.dumps(report)}}}\n\n'.encode()

    def end(self, completion_tokens: int) -> bytes:
        """Encode what comes after the last token: usage, if the client asked for it, and the
        end."""
        if not self._include_usage:
            return DONE
        return f'{self._head}], "usage": {self._usage(completion_tokens)}}}\n\n'.encode() + DONE

    def _usage_so_far(self, completion_tokens: int) -> str:
        if not self._include_usage:
            return ""
        if not self._continuous_usage:
            return ', "usage": null'
        return f', "usage": {self._usage(completion_tokens)}'

    def _usage(self, completion_tokens: int) -> str:
        details = ""
        if reasoning := self._reasoning_tokens():
            details = f', "completion_tokens_details": {{"reasoning_tokens": {reasoning}}}'
        return (
            f'{{"prompt_tokens": {self._prompt_tokens}, "completion_tokens": {completion_tokens}, '
            f'"total_tokens": {self._prompt_tokens + completion_tokens}, '
            f'"prompt_tokens_details": {{"cached_tokens": {self._cached_tokens()}}}{details}}}'
        )

    @abstractmethod
    def _answer(self, parts: Sequence[Part]) -> str:
        """Encode parts as a field of a choice."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[TextLogprob]) -> str:
        """Encode `entries` as JSON."""


class CompletionStream(_Stream):
    """Chunks of `/v1/completions`."""

    _object = "text_completion"

    def _answer(self, parts: Sequence[Part]) -> str:
        return f'"text": {_json_string("".join(part.text for part in parts))}'

    def _logprobs(self, entries: Sequence[TextLogprob]) -> str:
        return CompletionLogprobs.of(entries).model_dump_json() if entries else "null"


class ChatStream(_Stream):
    """Chunks of `/v1/chat/completions`."""

    _object = "chat.completion.chunk"

    def start(self, index: int) -> bytes:
        """Encode the first chunk of a choice, which names the role."""
        return (
            f'{self._head}{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
            f'"logprobs": null, "finish_reason": null}}]{self._usage_so_far(0)}}}\n\n'
        ).encode()

    def _answer(self, parts: Sequence[Part]) -> str:
        if len(parts) == 1 and parts[0].kind == "content":  # most often, and most quickly
            return f'"delta": {{"content": {_json_string(parts[0].text)}}}'
        return f'"delta": {json.dumps(chat_delta(parts))}'

    def _logprobs(self, entries: Sequence[TextLogprob]) -> str:
        return ChatLogprobs.of(entries).model_dump_json() if entries else "null"


def chat_delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the object `delta` of a chunk."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part.kind:
            case "content":
                delta["content"] = delta.get("content", "") + part.text
            case "reasoning":
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
            case "call":
                function = {"name": part.text, "arguments": ""}
                calls[part.call] = {
                    "index": part.call,
                    "id": part.call_id,
                    "type": "function",
                    "function": function,
                }
            case "arguments":
                new = {"index": part.call, "function": {"arguments": ""}}
                calls.setdefault(part.call, new)["function"]["arguments"] += part.text
    return {**delta, "tool_calls": list(calls.values())} if calls else delta

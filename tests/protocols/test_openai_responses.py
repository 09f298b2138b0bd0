"""Answers and streams, read by the official client's own types."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from csps.protocols.core.errors import (
    Cancelled,
    ConfigError,
    ConnectionLost,
    ContextLengthExceeded,
    DeadlineExceeded,
    GangLost,
    InvalidRequest,
    ModelNotFound,
    ProtocolError,
    QueueFull,
    RanksHeld,
    RemoteError,
    Superseded,
    TransferError,
    Unauthorized,
)
from csps.protocols.openai import responses
from csps.protocols.openai.requests import StreamOptions
from csps.protocols.openai.responses import (
    DONE,
    AnswerDelta,
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatStream,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    CompletionStream,
    ModelCard,
    ModelList,
    Part,
    TextLogprob,
    Usage,
    WholeChat,
    WholeCompletion,
    error_body,
    error_event,
    whole_body,
)

ENTRIES = (
    TextLogprob(
        token="He",
        token_bytes=b"He",
        logprob=-0.5,
        top=(
            TextLogprob(token="He", token_bytes=b"He", logprob=-0.5),
            TextLogprob(token=r"\xe2\x82", token_bytes=b"\xe2\x82", logprob=-math.inf),
        ),
    ),
    TextLogprob(token="llo", token_bytes=b"llo", logprob=-0.25, offset=2),
)
USAGE = Usage.of(3, 2, 1)
PLAIN = StreamOptions()
WITH_USAGE = StreamOptions(include_usage=True)
CONTINUOUS = StreamOptions(include_usage=True, continuous_usage_stats=True)


def said(text: str) -> list[Part]:
    return [Part("content", text)]


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert b"\n" not in data[:-2]
    return json.loads(data[6:])


def chat_stream(options: StreamOptions = PLAIN) -> ChatStream:
    return ChatStream(
        request_id="c1",
        model="m",
        created=9,
        prompt_tokens=3,
        cached_tokens=lambda: 1,
        options=options,
    )


def completion_stream(options: StreamOptions = PLAIN) -> CompletionStream:
    return CompletionStream(
        request_id="c1",
        model="m",
        created=9,
        prompt_tokens=3,
        cached_tokens=lambda: 1,
        options=options,
    )


def chat_chunk(data: bytes) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate(event(data), strict=True)


def completion_chunk(data: bytes) -> dict[str, Any]:
    """A chunk, checked by the client's type for a whole answer where it can be.

    The client reads chunks of completions with the same type without validating, since OpenAI
    itself sends a null finish_reason, which that type excludes.
    """
    chunk: dict[str, Any] = event(data)
    complete = json.loads(json.dumps(chunk))
    for choice in complete["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    Completion.model_validate(complete, strict=True)
    return chunk


# --- whole answers --------------------------------------------------------------------------


def test_chat_answer() -> None:
    choice = ChatChoice(
        index=0,
        message=AssistantMessage(content="Hello"),
        logprobs=ChatLogprobs.of(ENTRIES),
        finish_reason="stop",
    )
    body = ChatCompletionResponse(id="c1", created=9, model="m", choices=[choice], usage=USAGE)
    read = ChatCompletion.model_validate(json.loads(body.model_dump_json()), strict=True)
    assert read.choices[0].message.content == "Hello"
    assert read.usage is not None
    assert read.usage.total_tokens == 5
    assert read.usage.prompt_tokens_details is not None
    assert read.usage.prompt_tokens_details.cached_tokens == 1
    logprobs = read.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -0.25]
    assert logprobs.content[0].top_logprobs[1].bytes == [0xE2, 0x82]
    assert logprobs.content[0].top_logprobs[1].logprob == -9999.0


logprobs_of_tokens = st.builds(
    TextLogprob,
    token=st.text(max_size=4),
    token_bytes=st.binary(max_size=4),
    logprob=st.floats(max_value=0, allow_nan=False),
    offset=st.integers(0, 99),
    top=st.lists(
        st.builds(
            TextLogprob,
            token=st.text(max_size=2),
            token_bytes=st.binary(max_size=4),
            logprob=st.floats(max_value=0, allow_nan=False),
        ),
        max_size=3,
    ).map(tuple),
)


@given(
    tokens=st.lists(st.tuples(st.text(max_size=5), logprobs_of_tokens), max_size=9),
    has_logprobs=st.booleans(),
    csps=st.none() | st.just({"plan": None, 'text":""': '"content":"","logprobs":null'}),
    piece_characters=st.integers(1, 50),
)
def test_an_answer_encoded_by_token_is_the_whole(
    tokens: list[tuple[str, TextLogprob]],
    has_logprobs: bool,
    csps: dict[str, Any] | None,
    piece_characters: int,
) -> None:
    """The models at once are the oracle."""
    shared: dict[str, Any] = {"id": '"text":""', "created": 9, "usage": USAGE, "csps": csps}
    shared["model"] = '"content":"","logprobs":null'
    text = "".join(text for text, _ in tokens)
    entries = [entry for _, entry in tokens] if has_logprobs else []

    def completion(text: str, logprobs: CompletionLogprobs | None) -> CompletionResponse:
        choice = CompletionChoice(index=1, text=text, logprobs=logprobs, finish_reason="stop")
        return CompletionResponse(choices=[choice], **shared)

    def chat(text: str, logprobs: ChatLogprobs | None) -> ChatCompletionResponse:
        message = AssistantMessage(content=text)
        choice = ChatChoice(index=1, message=message, logprobs=logprobs, finish_reason="stop")
        return ChatCompletionResponse(choices=[choice], **shared)

    with mock.patch.object(responses._Joined, "PIECE_CHARACTERS", piece_characters):
        for whole, at_once in (
            (
                WholeCompletion(),
                completion(text, CompletionLogprobs.of(entries) if entries else None),
            ),
            (
                WholeChat(),
                chat(text, ChatLogprobs.of(entries) if entries else None),
            ),
        ):
            for shown, entry in tokens:
                whole.push((Part("content", shown),), entry if has_logprobs else None)
            empty = at_once.model_copy(update={"choices": []})
            body = json.loads(b"".join(whole_body(empty, [whole.pieces(1, "stop")])))
            expected = at_once.model_dump(mode="json", exclude={"csps"} if csps is None else None)
            expected["usage"].pop("completion_tokens_details")
            expected.pop("prompt_logprobs", None)
            for choice in expected["choices"]:
                choice.pop("prompt_logprobs", None)
                for name in ("reasoning_content", "tool_calls"):
                    choice.get("message", {}).pop(name, None)
            assert body == expected


def test_completion_answer() -> None:
    choice = CompletionChoice(
        index=0, text="Hello", logprobs=CompletionLogprobs.of(ENTRIES), finish_reason="length"
    )
    body = CompletionResponse(id="c1", created=9, model="m", choices=[choice], usage=USAGE)
    read = Completion.model_validate(json.loads(body.model_dump_json()), strict=True)
    logprobs = read.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["He", "llo"]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs == [{"He": -0.5, r"\xe2\x82": -9999.0}, {"llo": -0.25}]


def test_models() -> None:
    card = ModelCard(id="m", created=9, max_model_len=65_536, default_max_tokens=4096)
    data = json.loads(ModelList(data=[card]).model_dump_json())
    assert data["object"] == "list"
    Model.model_validate(data["data"][0], strict=True)


# --- streams --------------------------------------------------------------------------------


@given(st.text())
def test_chat_text_survives(text: str) -> None:
    chunk = chat_chunk(chat_stream().delta(AnswerDelta(said(text), 1)))
    assert chunk.choices[0].delta.content == text
    assert (chunk.id, chunk.model, chunk.created) == ("c1", "m", 9)


@given(st.text())
def test_completion_text_survives(text: str) -> None:
    chunk = completion_chunk(completion_stream().delta(AnswerDelta(said(text), 1)))
    assert chunk["choices"][0]["text"] == text


def test_chat_stream() -> None:
    stream = chat_stream(WITH_USAGE)
    first = chat_chunk(stream.start(0))
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    middle = chat_chunk(stream.delta(AnswerDelta(said("He"), 1, logprob=ENTRIES[0])))
    assert middle.choices[0].finish_reason is None
    assert middle.usage is None
    assert middle.choices[0].logprobs is not None
    last = chat_chunk(stream.delta(AnswerDelta(said("llo"), 2, finish_reason="stop")))
    assert last.choices[0].finish_reason == "stop"
    total = chat_chunk(stream.end(2).removesuffix(DONE))
    assert total.choices == []
    assert total.usage is not None
    assert total.usage.model_dump(exclude_none=True) == USAGE.model_dump(exclude_none=True)
    assert DONE == b"data: [DONE]\n\n"


def test_completion_stream_has_text_offsets() -> None:
    stream = completion_stream()
    for entry, offset in zip(ENTRIES, (0, 2), strict=True):
        chunk = completion_chunk(stream.delta(AnswerDelta(said(entry.token), 1, logprob=entry)))
        assert chunk["choices"][0]["logprobs"]["text_offset"] == [offset]
        assert chunk["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("make", [chat_stream, completion_stream])
def test_usage_as_asked_for(make: Any) -> None:
    assert "usage" not in event(make().delta(AnswerDelta(said("x"), 1)))
    assert make().end(1) == DONE
    assert event(make(WITH_USAGE).delta(AnswerDelta(said("x"), 1)))["usage"] is None
    total = event(make(CONTINUOUS).delta(AnswerDelta(said("x"), 2)))["usage"]
    assert total == USAGE.model_dump(exclude_none=True)
    only_continuous = make(StreamOptions(continuous_usage_stats=True))
    assert "usage" not in event(only_continuous.delta(AnswerDelta(said("x"), 1)))


def test_explanation_goes_with_the_last_chunk() -> None:
    report = {"plan": {"strategy": "ulysses"}, "timings": {"queue_s": 0.1}}
    last = chat_stream().delta(AnswerDelta((), 1, finish_reason="stop"), report)
    assert event(last)["csps"] == report
    chat_chunk(last)


def test_odd_names_do_not_break_the_envelope() -> None:
    name = 'a"b\\c\n\u2028{}'
    stream = ChatStream(
        request_id=name,
        model=name,
        created=9,
        prompt_tokens=3,
        cached_tokens=lambda: 0,
        options=StreamOptions(),
    )
    assert chat_chunk(stream.delta(AnswerDelta(said("x"), 1))).model == name


def test_error_event_has_the_clients_format() -> None:
    assert event(error_event(GangLost("rank 2")))["error"]["code"] == "unavailable"


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exc", "status", "code"),
    [
        (InvalidRequest("n: only 1", param="n"), 400, None),
        (
            ContextLengthExceeded(prompt_tokens=9, output_tokens=1, limit=8),
            400,
            "context_length_exceeded",
        ),
        (Unauthorized(), 401, "invalid_api_key"),
        (ModelNotFound(model="gpt", served="needle"), 404, "model_not_found"),
        (QueueFull("full", retry_after_s=1.2), 429, "queue_full"),
        (GangLost("rank 10.0.0.3"), 503, "unavailable"),
        (Superseded("generation 2 has attached"), 503, "unavailable"),
        (RanksHeld("generation 1 holds this rank"), 503, "unavailable"),
        (ConnectionLost("10.0.0.3 reset"), 503, "unavailable"),
        (DeadlineExceeded("kv landing", 3), 504, "timeout"),
        (Cancelled("the server is shutting down"), 503, "unavailable"),
        (TransferError("KV of secret"), 503, "unavailable"),
        (ProtocolError("secret"), 500, "internal_error"),
        (RemoteError("KeyError", "secret"), 500, "internal_error"),
        (ConfigError("/etc/secret"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_have_openais_shape(exc: Exception, status: int, code: str | None) -> None:
    got_status, body, headers = error_body(exc)
    error = body["error"]
    assert (got_status, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    json.dumps(body).encode()
    assert ("Retry-After" in headers) == (status in (429, 503))
    if status >= 500:
        for internal in ("secret", "10.0.0.3", "kv landing"):
            assert internal not in json.dumps(body)


def test_retry_after_is_whole_seconds_and_positive() -> None:
    assert error_body(QueueFull("full", retry_after_s=1.2))[2] == {"Retry-After": "2"}
    assert error_body(QueueFull("full", retry_after_s=0))[2] == {"Retry-After": "1"}

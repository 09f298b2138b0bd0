"""HTTP requests that no client should send: bodies, headers, methods and paths changed at random.

Most are wrong. Those that happen to be right ask for few tokens, so that a live server answers them
soon.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ANSWER_S = 120.0
"""Time for an answer. A server that is late by more hangs."""
LONGEST_ANSWER = 1 << 16
"""Bytes of an answer that are read before the client leaves."""
SHOWN = 20
"""Failures that a report shows."""


@dataclass(frozen=True)
class HttpRequest:
    """A request as it is sent."""

    method: str
    path: str
    headers: tuple[tuple[str, bytes], ...]
    body: bytes
    whole: bool = True
    """False if nobody can tell where it ends: then its connection is closed behind it."""

    @property
    def wire(self) -> bytes:
        """Return the bytes of the request, which ends its connection."""
        head = f"{self.method} {self.path} HTTP/1.1\r\nhost: fuzz\r\nconnection: close\r\n".encode()
        for name, value in self.headers:
            head += name.encode() + b": " + value + b"\r\n"
        return head + b"\r\n" + self.body


# --- values ------------------------------------------------------------------------------------

INTEGERS = [0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1]
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "-1e-999", "-0", "01", "1.", "9" * 5000, "tru",
       '"\\ud800"', '"\\u0000"', '"\\udfff\\ud800"', "'x'", "undefined", "", "/*x*/1", "\x00",
       "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300, "[" * 100_000]  # fmt: skip
"""JSON that is none, or hardly one."""
texts = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\x00", "needle", "\u202e", "\ufeff", "🙂" * 50, "a" * 3000, "{{ 7 }}", "%s", "../.."]
)
scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from(INTEGERS)
    | st.integers(-300, 300)
    | st.floats()
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@dataclass(frozen=True)
class Raw:
    """Text that stands in a body as it is."""

    text: str


anything = values | st.sampled_from(RAW).map(Raw)

BOTH: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "max_completion_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "seed": 7,
    "stop": ["x", "yz"],
    "logit_bias": {"5": 1.5, "6": -100},
    "n": 1,
    "user": "me",
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [3, 4],
    "skip_special_tokens": False,
    "cache_salt": "s",
    "csps": {
        "objective": "ttft",
        "max_accuracy_loss": 0.1,
        "max_ttft_ms": 50.0,
        "attention": "csa",
        "unmet": "refuse",
        "explain": True,
        "levels": 2,
        "drop_ratio": [0.1, [0.2, 0.3]],
        "micro_partitions": [4, 2],
        "strategy": "ntp",
        "nested": False,
        "drop_queries": True,
        "importance_window": 16,
        "importance_layer": "same",
        "sinks": 4,
        "tail": 16,
        "pipelined": True,
        "decode_kept_only": False,
    },
}
COMPLETION: dict[str, Any] = {
    "prompt": "The quick brown fox",
    "logprobs": 2,
    "best_of": 1,
    "echo": False,
    "suffix": "",
} | BOTH
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "me"},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "Again"},
    ],
    "logprobs": True,
    "top_logprobs": 3,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "metadata": {"a": "b"},
    "add_generation_prompt": True,
} | BOTH
MORE: dict[str, Any] = {
    "bad_words": ["no"],
    "allowed_token_ids": [5, 6],
    "structured_outputs": {"regex": "[a-c]{2}"},
    "truncate_prompt_tokens": 9,
    "include_stop_str_in_output": True,
    "return_progress": True,
}
COMPLETION |= MORE | {"prompt_logprobs": 1}
CHAT |= MORE | {
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "documents": [{}],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "parallel_tool_calls": False,
    "include_reasoning": False,
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
WITH_SCHEMA: dict[str, Any] = {
    name: CHAT[name] for name in ("messages", "stream", "max_completion_tokens", "stop")
} | {
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "n",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {
                    "a": {"type": "string", "maxLength": 3, "pattern": "^[a-c]*$"},
                    "b": {"anyOf": [{"$ref": "#/$defs/c"}, {"enum": [1, None, "x"]}]},
                },
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"c": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
            },
        },
    },
}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "so",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            },
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "stream": True,
    "seed": 7,
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 2,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": ""},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
    ],
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}},
    "stream": True,
    "return_progress": True,
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "max_output_tokens": 2,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
    "reasoning": {"effort": "low"},
    "truncation": "disabled",
    "stream": True,
    "return_progress": True,
}
ENDPOINTS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (COMPLETION,),
    "/v1/chat/completions": (CHAT, WITH_SCHEMA, WITH_TOOLS),
    "/v1/messages": (MESSAGES,),
    "/v1/messages/count_tokens": (MESSAGES,),
    "/v1/responses": (RESPONSES,),
    "/tokenize": (
        {"prompt": "Hello", "return_token_strs": True, "add_special_tokens": False},
        WITH_TOOLS,
    ),
    "/detokenize": ({"tokens": [1, 2, 3], "unknown": None},),
}
"""What the bodies of each endpoint are made of."""
LIMITS = {"max_tokens", "max_output_tokens"}
NEEDED = {"model", "prompt", "messages", "input", "tokens", *LIMITS}


@st.composite
def fields(draw: st.DrawFn, model: str, all_fields: dict[str, Any]) -> dict[str, Any]:
    """Draw a valid body or nearly one, with some of the fields."""
    optional = sorted(all_fields.keys() - NEEDED)
    kept = draw(st.sets(st.sampled_from(optional), max_size=4)) | (all_fields.keys() & NEEDED)
    limit = {} if {*LIMITS, "tokens"} & all_fields.keys() else {"max_tokens": 2}
    body = (
        {"model": model} | limit | {name: all_fields[name] for name in all_fields if name in kept}
    )
    copied: dict[str, Any] = json.loads(json.dumps(body))
    return copied


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return container and key of every value within a value."""
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = list(value)
    elif isinstance(value, list):
        inside = list(range(len(value)))
    return [place for key in inside for place in [(value, key), *_places(value[key])]]


@st.composite
def spoiled(draw: st.DrawFn, model: str, all_fields: dict[str, Any]) -> str:
    """Draw the text of a body in which values were replaced, removed, added or doubled."""
    body = draw(fields(model, all_fields))
    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(_places(body)))
        match draw(st.sampled_from(["replace", "replace", "wrap", "add", "remove", "many"])):
            case "replace":
                container[key] = draw(anything)
            case "wrap":
                container[key] = [container[key]]
            case "add" if isinstance(container, dict):
                container[draw(texts)] = draw(anything)
            case "remove" if key not in LIMITS and isinstance(container, dict):
                del container[key]
            case "many":
                container[key] = [container[key]] * draw(st.sampled_from([0, 2, 17, 1025]))
    text = _rendered(body)
    if draw(st.booleans()) and len(body) > 1:  # a field given twice
        name = draw(st.sampled_from(sorted(body.keys() - LIMITS)))
        text = text[:-1] + f", {json.dumps(name)}: {_rendered(draw(anything))}" + "}"
    return text


def _rendered(value: Any) -> str:
    match value:
        case Raw():
            return value.text
        case dict():
            return "{%s}" % ", ".join(  # noqa: UP031 (braces)
                f"{json.dumps(key)}: {_rendered(inner)}" for key, inner in value.items()
            )
        case list():
            return f"[{', '.join(map(_rendered, value))}]"
        case _:
            return json.dumps(value)


@st.composite
def mangled(draw: st.DrawFn, text: st.SearchStrategy[str]) -> bytes:
    """Draw a body whose bytes were changed: cut, overwritten, repeated, or in another encoding."""
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32", "utf-7"]))
    body = bytearray(draw(text), encoding, "surrogatepass")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["cut", "insert", "flip", "repeat"])):
            case "cut":
                del body[at : at + draw(st.integers(0, 40))]
            case "insert":
                body[at:at] = draw(st.binary(max_size=8))
            case "flip" if at < len(body):
                body[at] ^= 1 << draw(st.integers(0, 7))
            case "repeat":
                body += body[at : at + 64] * draw(st.integers(1, 3))
    return bytes(body)


def bodies(model: str, all_fields: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return bodies of one endpoint: wrong values, wrong bytes, or no body of it at all."""
    text = spoiled(model, all_fields)
    as_sent = text.map(lambda body: body.encode("utf-8", "surrogatepass"))
    return (
        as_sent
        | as_sent
        | mangled(text)
        | anything.map(lambda value: _rendered(value).encode("utf-8", "surrogatepass"))
        | st.binary(max_size=64)
    )


# --- heads -------------------------------------------------------------------------------------

header_values = st.binary(max_size=30).map(
    lambda value: bytes(byte for byte in value if byte not in b"\r\n\x00")
)
HEADERS: dict[str, list[bytes]] = {
    "x-request-id": [b"ok-1", b"\xff\xfe", b"a" * 4000, b"\xe2\x80\xae", b"../../x", b"%0d%0a"],
    "authorization": [b"Bearer", b"Bearer \xff", b"Basic eDp5", b"bearer " + b"k" * 4000, b"\x7f"],
    "traceparent": [b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"00-zz-zz-zz", b"ff-1-1-1",
                    b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
    "tracestate": [b"csps=timeline", b"=" * 600, b"a=1," * 40],
    "baggage": [b"a=b", b";" * 300],
    "x-slo-ttft-ms": [b"50", b"0", b"-1", b"nan", b"inf", b"1e400", b"\xd9\xa3", b"1_0"],
    "x-slo-tpot-ms": [b"50", b"x", b"1e-400", b"0x10"],
    "content-type": [b"application/json", b"text/plain", b"multipart/form-data; boundary=x",
                     b"application/json; charset=utf-16", b"\xff"],
    "content-encoding": [b"gzip", b"identity"],
    "accept": [b"*/*", b"text/event-stream", b"\xff"],
    "expect": [b"100-continue"],
    "cookie": [b"a=b; " * 100],
}  # fmt: skip
PATHS = [
    "/v1/models",
    "/v1/models/needle",
    "/v1/models/%ff%fe",
    "/v1/models/" + "a" * 3000,
    "/v1/models/..%2f..%2fetc",
    "/v1/completions/",
    "/v1//completions",
    "/v1/embeddings",
    "/v1/messages/",
    "/v1/responses/resp_1",
    "/v1/csps/state",
    "/version",
    "/docs?x=%",
    "/openapi.json",
    "/ui",
    "/health",
    "/health?x=%",
    "/metrics",
    "/metrics?name[]=%00",
    "/%00",
    "/" + "%F0%9F%99%82" * 20,
    "//",
    "/?" + "a=b&" * 200,
]
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PROPFIND"]


@st.composite
def heads(draw: st.DrawFn) -> tuple[tuple[str, bytes], ...]:
    """Draw headers of which any may be nonsense."""
    names = draw(st.sets(st.sampled_from(sorted(HEADERS)), max_size=3))
    return tuple(
        (name, draw(st.sampled_from(HEADERS[name]) | header_values)) for name in sorted(names)
    )


@st.composite
def requests(draw: st.DrawFn, model: str) -> HttpRequest:
    """Draw a request to any endpoint, most of them to those with bodies."""
    path = draw(st.sampled_from([*ENDPOINTS, "another"]))
    if path == "another":
        method, path = draw(st.sampled_from(METHODS)), draw(st.sampled_from(PATHS))
        body = draw(st.binary(max_size=30))
    else:
        method = draw(st.sampled_from(["POST"] * 12 + METHODS))
        body = draw(bodies(model, draw(st.sampled_from(ENDPOINTS[path]))))
    length = str(len(body)).encode()
    return HttpRequest(method, path, (*draw(heads()), ("content-length", length)), body)


@st.composite
def streams_of_bytes(draw: st.DrawFn, model: str) -> HttpRequest:
    """Draw what is no HTTP request: lengths that lie, headers without end, chunks that are none."""
    body = draw(bodies(model, COMPLETION))
    framing = draw(
        st.sampled_from(
            [
                ("content-length", b"-1"),
                ("content-length", b"9" * 5000),
                ("content-length", b"1 2"),
                ("content-length", b"\xd9\xa3"),
                ("transfer-encoding", b"gzip"),
                ("transfer-encoding", b"chunked"),
                ("transfer-encoding", b"chunked, chunked"),
                ("x" * 9000, b"y" * 9000),
                (" x", b"y"),
                ("", b""),
                ("x\x00", b"y\x00"),
            ]
        )
    )
    method = draw(st.sampled_from(["POST", "G\x00T", "", "POST POST", "A" * 9000]))
    path = draw(st.sampled_from(["/v1/completions", "", "*", "http://[::", "/\xff", "/" * 70_000]))
    return HttpRequest(method, path, (*draw(heads()), framing), body, whole=False)


# --- sending -----------------------------------------------------------------------------------


def status_of(url: str, request: HttpRequest) -> int | None:
    """Return the status of the answer to a request; None if the connection ends without one.

    Raises:
        TimeoutError: neither comes in time.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((host, port or 80), ANSWER_S) as connection:
        try:
            connection.sendall(request.wire)
            if not request.whole:
                connection.shutdown(socket.SHUT_WR)
        except OSError as error:  # refused before all of it was read, and the connection is gone
            if isinstance(error, TimeoutError):
                raise
        answer = b""
        with suppress(ConnectionError):
            while len(answer) < LONGEST_ANSWER and (more := connection.recv(1 << 16)):
                answer += more
    while answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    line = answer.split(b"\r\n", 1)[0].split()
    return int(line[1]) if len(line) > 1 and line[1].isdigit() else None


@dataclass
class Tally:
    """Answers to requests that were sent."""

    by_class: Counter[str] = field(default_factory=Counter)
    """Answers by the hundreds of their status."""
    refused_by_path: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Requests that were answered by 5xx, or not at all, and how."""

    def note(self, request: HttpRequest, status: int | None) -> None:
        """Count an answer."""
        self.by_class["none" if status is None else f"{status // 100}xx"] += 1
        if status is not None and 400 <= status < 500:
            self.refused_by_path[request.path] += 1
        if status is not None and status >= 500:
            self.fails(request, str(status))

    def fails(self, request: HttpRequest, how: str) -> None:
        """Count a request that was not answered as it should be."""
        if len(self.failures) < SHOWN:
            self.failures.append(f"{how}: {request!r:.2000}")
        self.by_class["failed"] += 1

    @property
    def refused(self) -> int:
        """Return the requests that were refused as the client's mistake."""
        return self.by_class["4xx"]


def send_malformed(
    url: str,
    model: str,
    *,
    refused: int,
    number: int = 0,
    going_on: Callable[[], bool] = lambda: True,
) -> Tally:
    """Send malformed requests until so many were refused.

    Args:
        number: chooses the requests.
        going_on: returns False to end early.
    """
    tally, batch = Tally(), 0
    while tally.refused < refused and going_on():
        _send_batch(url, model, tally, number + batch, min(refused, 1000))
        batch += 1
        if tally.by_class["failed"] > refused // 10 + SHOWN:
            break
    return tally


def _send_batch(url: str, model: str, tally: Tally, number: int, count: int) -> None:
    every = requests(model) | requests(model) | requests(model) | streams_of_bytes(model)

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(every)
    def send(request: HttpRequest) -> None:
        try:
            tally.note(request, status_of(url, request))
        except TimeoutError:
            tally.fails(request, "no answer in time")
        except OSError as error:
            tally.fails(request, repr(error))

    send()

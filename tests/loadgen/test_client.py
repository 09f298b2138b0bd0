"""The streaming client against servers that answer well, badly, or not at all."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_server import (
    END,
    STREAM,
    RawServer,
    Reply,
    answer_ok,
    chunked,
    event,
    raw_server,
    text_events,
    whole,
)

from csps.loadgen.bench.serve import LoadDriver
from csps.loadgen.client.client import LoadClient, RequestFormat, TimedAnswer, Transcript
from csps.loadgen.client.connection import Server
from csps.loadgen.results.record import RequestRecord
from csps.loadgen.workloads.request import RequestObjective, WorkloadRequest
from csps.protocols.core.errors import ConfigError

PATIENCE_S = 60.0


def request(**fields: Any) -> WorkloadRequest:
    values = {"arrival_ns": 0, "input_length": 5, "output_length": 3, "prompt": "x y z"}
    return WorkloadRequest(**(values | fields))


@asynccontextmanager
async def asking(reply: Reply, **options: Any) -> AsyncIterator[tuple[RawServer, LoadClient]]:
    """Run a server and a client of it."""
    api = RequestFormat(model="raw", **options.pop("api", {}))
    async with raw_server(reply) as server:
        client = Server(server.url)
        try:
            yield server, LoadClient(client, api, **options)
        finally:
            client.close()


async def ask_once(reply: Reply, **options: Any) -> RequestRecord:
    async with asking(reply, **options) as (_, load_client):
        await LoadDriver(load_client, [request()]).run()
        (record,) = load_client.records
        return record


@given(cuts=st.lists(st.integers(0, 10_000), max_size=30), newline=st.sampled_from(["\n", "\r\n"]))
def test_pieces_may_end_anywhere(cuts: list[int], newline: str) -> None:
    body = b"".join([b": still working\n\n", *text_events(" é", "", " b", "\n")])
    body = body.replace(b"\n", newline.encode())
    answer = TimedAnswer()
    edges = sorted({0, len(body), *(cut % len(body) for cut in cuts)})
    for number, (start, stop) in enumerate(pairwise(edges)):
        answer.feed(body[start:stop], number)
    answer.finish(200, len(edges))
    assert (answer.text, answer.error) == (" é b\n", "")
    assert len(answer.chunk_ns) == 3  # the empty one is no token that anybody sees
    assert answer.chunk_ns == sorted(answer.chunk_ns)
    assert answer.usage["completion_tokens"] == 4


def test_an_answer_ends_with_its_last_token_even_if_that_has_no_text() -> None:
    answer = TimedAnswer()
    for stamp, chunk in ((3, text_events(" a", "")[0]), (9, text_events(" a", "")[1])):
        answer.feed(chunk, stamp)
    answer.feed(event("[DONE]"), 20)
    answer.finish(200, 21)
    assert (answer.chunk_ns, answer.end_ns) == ([3], 9)


async def test_a_good_answer() -> None:
    record = await ask_once(answer_ok)
    assert record.completed
    assert record.text == " a b c"
    assert (record.input_tokens, record.output_tokens, len(record.chunk_ns)) == (7, 3, 3)


async def test_an_answer_that_is_only_an_end_counts_from_its_end() -> None:
    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunked(*text_events("")) + END)

    record = await ask_once(reply)
    assert record.completed
    assert len(record.chunk_ns) == 1


async def test_a_whole_answer_that_ends_with_the_connection() -> None:
    """Servers without streaming, or of HTTP/1.0, answer like this."""

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        choice = {"message": {"content": "done"}, "finish_reason": "stop"}
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps({"choices": [choice]}).encode())
        writer.close()

    record = await ask_once(reply)
    assert (record.status, record.text, record.error) == ("completed", "done", "")


def _writes(data: bytes, *, close: bool = False) -> Reply:
    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return reply


_REFUSED = whole({"error": {"message": "too many", "code": "queue_full"}}, "429 Too Many Requests")
_BROKEN = event({"choices": [{"text": " a"}]}), event({"error": {"message": "gang lost"}})


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (_writes(_REFUSED), "HTTP 429: too many"),
        (_writes(b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\nnope"), "HTTP 502: nope"),
        (_writes(STREAM + chunked(*_BROKEN) + END), "error event: gang lost"),
        (_writes(STREAM + chunked(event({"choices": [{"text": "a"}]})) + END), "ended early"),
        (_writes(STREAM + chunked(event({"choices": []}), event("[DONE]")) + END), "ended early"),
        (_writes(STREAM + chunked(event("[1]")) + END), "not a completion"),
        (_writes(STREAM + chunked(event("{")) + END), "not a completion"),
        (_writes(STREAM + chunked(b"data: {"), close=True), "the server closed the connection"),
        (_writes(b"", close=True), "the server closed the connection"),
        (_writes(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak HTTP"),
    ],
)
async def test_a_bad_answer_is_a_failure_with_a_reason(reply: Reply, error: str) -> None:
    record = await ask_once(reply)
    assert record.status == "failed"
    assert error in record.error


async def test_no_server_is_a_failure() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        load_client = LoadClient(
            Server(f"127.0.0.1:{probe.getsockname()[1]}"), RequestFormat(model="x")
        )
        await LoadDriver(load_client, [request()]).run()
    assert "no connection" in load_client.records[0].error


async def test_a_slow_answer_is_a_failure_and_is_hung_up_on() -> None:
    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)

    async with asking(reply, request_timeout_s=0.05) as (server, load_client):
        await LoadDriver(load_client, [request()]).run()
        assert load_client.records[0].error == "no answer within 0.05 s"
        async with asyncio.timeout(PATIENCE_S):
            await server.hung_up.wait()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "//"])
def test_an_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="is no http or https address"):
        Server(url)


async def test_connections_are_used_again() -> None:
    async with asking(answer_ok) as (server, load_client):
        await LoadDriver(load_client, [request()] * 20, users=2).run()
        assert load_client.counts.completed == 20
        assert load_client._server.connections <= 2
        assert len(server.bodies) == 20


async def test_a_closed_loop_keeps_its_users_busy() -> None:
    running: list[int] = []

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        running.append(load_client.counts.running)
        await answer_ok(body, writer)

    async with asking(reply) as (_, load_client):
        await LoadDriver(load_client, [request()] * 30, users=3).run()
    assert load_client.counts.completed == 30
    assert max(running) == 3


async def test_requests_wait_for_a_place_and_their_latency_counts_it() -> None:
    """No coordinated omission: all are due at once, one at a time is served."""
    served: list[asyncio.StreamWriter] = []

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        assert load_client.counts.running == 1
        served.append(writer)
        await answer_ok(body, writer)

    async with asking(reply, max_concurrency=1) as (_, load_client):
        await LoadDriver(load_client, [request()] * 10).run()
    records = sorted(load_client.records, key=lambda record: record.sent_ns)
    assert len(served) == 10
    for before, after in pairwise(records):
        assert after.sent_ns >= before.chunk_ns[-1]
        # From its schedule, which is the same for all, not from when it was sent.
        assert after.scheduled_ns == before.scheduled_ns == 0
        assert round(after.ttft_s * 1e9) == after.chunk_ns[0]
        assert after.ttft_s > before.e2el_s


async def test_open_loop_requests_leave_at_their_times() -> None:
    due = [request(arrival_ns=n * 20_000_000) for n in range(10)]
    async with asking(answer_ok) as (_, load_client):
        await LoadDriver(load_client, due).run()
    for record, planned in zip(
        sorted(load_client.records, key=lambda r: r.sent_ns), due, strict=True
    ):
        assert record.sent_ns >= planned.arrival_ns - 500_000
        assert record.scheduled_ns == min(planned.arrival_ns, record.sent_ns)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_turn_follows_the_answer_to_the_one_before(chat: bool) -> None:
    endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    turns = [request(conversation="c", prompt=f"p{n}", delay_ns=n * 1_000_000) for n in range(3)]
    async with asking(answer_ok, api={"endpoint": endpoint}) as (server, load_client):
        await LoadDriver(load_client, turns).run()
    assert all(endpoint in head for head in server.heads)
    if chat:
        assert [body["content"] for body in server.bodies[2]["messages"]] == [
            "p0", " a b c", "p1", " a b c", "p2",
        ]  # fmt: skip
    else:
        assert server.bodies[2]["prompt"] == "p0 a b c\np1 a b c\np2"
    for before, after in pairwise(load_client.records):
        assert after.sent_ns >= before.chunk_ns[-1] + 500_000


async def test_a_conversation_ends_with_a_failed_turn() -> None:
    turns = [request(conversation="c")] * 3
    async with asking(_writes(_REFUSED)) as (server, load_client):
        await LoadDriver(load_client, turns).run()
    assert len(server.bodies) == 1
    assert [record.status for record in load_client.records] == ["failed", "cancelled", "cancelled"]
    assert load_client.records[1].error == "the previous turn failed"


async def test_stopping_withdraws_what_runs_and_sends_no_more() -> None:
    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunked(event({"choices": [{"text": " a"}]})))
        if len(server.bodies) == 2:
            load.stop()

    async with asking(reply) as (server, load_client):
        load = LoadDriver(load_client, [request(), request(), request(arrival_ns=10**12)])
        await load.run()
        async with asyncio.timeout(PATIENCE_S):
            await server.hung_up.wait()
    assert [record.status for record in load_client.records] == ["cancelled", "cancelled"]
    assert load_client.counts.cancelled == 2
    assert load_client.counts.running == 0


async def test_request_bodies_follow_the_options() -> None:
    api = {"ignore_eos": True, "temperature": None, "extra_body": {"top_k": 5}}
    objective = RequestObjective(objective="ttft", max_accuracy_loss=0.01)
    async with asking(answer_ok, api=api) as (server, load_client):
        await LoadDriver(load_client, [request(objective=objective)]).run()
    assert server.bodies[0] == {
        "model": "raw",
        "prompt": "x y z",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "csps": {"objective": "ttft", "max_accuracy_loss": 0.01},
        "top_k": 5,
    }
    assert "x-request-id: bench-0\r\n" in server.heads[0]


@pytest.mark.parametrize(
    ("answer", "ignore_eos", "right"),
    [("a b c", False, True), ("a b", False, False), ("a b", True, True), ("b", True, False)],
)
async def test_answers_are_checked(answer: str, ignore_eos: bool, right: bool) -> None:
    async with asking(answer_ok, api={"ignore_eos": ignore_eos}) as (_, load_client):
        await LoadDriver(load_client, [request(answer=answer), request()]).run()
    assert [record.correct for record in load_client.records] == [right, None]


def test_an_empty_transcript_adds_nothing() -> None:
    assert Transcript().text == ""
    assert Transcript().messages("hello") == [{"role": "user", "content": "hello"}]

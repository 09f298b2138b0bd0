"""A server with planted delays and stamped writes, to check load generators.

Run ``python benchmarks/planted_server.py``: it prints its port. It streams OpenAI-shaped answers
with delays from its own random numbers, writes each chunk at its time, and records the time of
writing. ``GET /stamps`` lists every request since the last such call: `received` and `written` in
nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share. ``GET /cpu`` returns its
processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any, cast

import httptools
import uvloop

MODEL = "planted"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class Delays:
    """Delays of the server in seconds."""

    def __init__(self, ttft_ms: float, itl_ms: float, spread: float, seed: int) -> None:
        self._ttft_s, self._itl_s, self._spread = ttft_ms / 1000, itl_ms / 1000, spread
        self._random = random.Random(seed)

    def of(self, tokens: int) -> list[float]:
        """Return the delays from the request to each token."""
        means = [self._ttft_s, *[self._itl_s] * (tokens - 1)]
        total, times = 0.0, []
        for mean in means:
            total += mean * (1 + self._spread * (2 * self._random.random() - 1))
            times.append(total)
        return times


class Session(asyncio.Protocol):
    """One connection with successive requests."""

    def __init__(self, delays: Delays, stamps: list[dict[str, Any]]) -> None:
        self._delays, self._stamps = delays, stamps
        self._parser = httptools.HttpRequestParser(self)
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        self._received_ns = time.perf_counter_ns()
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._body, self._id = b"", bytearray(), ""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._path.decode()
        if path == "/v1/models":
            self._answer_json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path == "/stamps":
            self._answer_json(list(self._stamps))
            self._stamps.clear()
        elif path == "/cpu":
            self._answer_json(time.process_time())
        elif path.endswith("/completions"):
            body = json.loads(self._body)
            self._answering = asyncio.ensure_future(self._stream(body, "chat" in path))
        else:
            self._answer_json({"status": "ok"})

    def _answer_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
        self._transport.write(f"{head}{len(body)}\r\n\r\n".encode() + body)

    async def _stream(self, body: dict[str, Any], chat: bool) -> None:
        received_ns, id_ = self._received_ns, self._id
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        written: list[int] = []
        self._stamps.append({"id": id_, "received": received_ns, "written": written})
        self._transport.write(_HEAD)
        for number, delay_s in enumerate(self._delays.of(asked)):
            left_s = delay_s - (time.perf_counter_ns() - received_ns) / 1e9
            await asyncio.sleep(max(0.0, left_s))
            reason = "length" if number == asked - 1 else None
            # The stamp is taken before writing, so that no client can have read it earlier.
            written.append(time.perf_counter_ns())
            self._event({"choices": [_choice(f" t{number}", chat, reason)]}, chat)
        prompt = body.get("prompt") or "".join(
            str(message.get("content")) for message in body["messages"]
        )
        usage = {"prompt_tokens": len(str(prompt).split()), "completion_tokens": asked}
        usage["total_tokens"] = sum(usage.values())
        self._event({"choices": [], "usage": usage}, chat)
        done = b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))

    def _event(self, fields: dict[str, Any], chat: bool) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": "planted", "object": kind, "created": 1, "model": MODEL}
        event = f"data: {json.dumps(head | fields)}\n\n".encode()
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))


def _choice(text: str, chat: bool, finish_reason: str | None) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    )
    return {"index": 0, "logprobs": None, "finish_reason": finish_reason, **said}


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    delays = Delays(arguments.ttft_ms, arguments.itl_ms, arguments.spread, arguments.seed)
    stamps: list[dict[str, Any]] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: Session(delays, stamps), "127.0.0.1", arguments.port, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="A server with planted delays.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=80.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=0.5, help="share by which each wait varies")
    parser.add_argument("--seed", type=int, default=0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

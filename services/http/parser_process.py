"""A process that parses large bodies for the router, one after another.

One call of a C library over 32 MiB holds the interpreter for up to two seconds, on whichever thread
it runs, and nothing can stop it. In a process of its own it delays no token, and ends when the
process is killed. `services.http.parser_pool` starts it by `python -m`.

Both sides send frames over a socket, which is the process's standard input: two lengths, a message
and, to the process, a body. Nothing is unpickled.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

import msgpack  # type: ignore[import-untyped]

from csps.models.network.checkpoint_json import InvalidTextError
from csps.protocols.core.errors import InvalidRequest, RequestError, to_wire
from csps.protocols.rpc.schema import pack, unpack
from csps.services.http.body_parser import BodyParser, Endpoint, Question, ServedModel

LENGTHS = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class ParseCall:
    """Request to parse the body that follows in the same frame."""

    endpoint: Endpoint | None = None
    owner: bytes = b""
    question: Question | None = None
    """What the tokenizer is asked, instead of what the model is."""


def frame(message: dict[str, Any], body_bytes: int = 0) -> bytes:
    """Return the beginning of a frame, up to the body."""
    packed: bytes = msgpack.packb(message)
    return LENGTHS.pack(len(packed), body_bytes) + packed


def message_of(packed: bytes) -> dict[str, Any]:
    """Return the message of a frame."""
    message: dict[str, Any] = msgpack.unpackb(packed, strict_map_key=False)
    return message


def main() -> None:
    """Answer calls until the router closes the socket."""
    with socket.socket(fileno=sys.stdin.fileno()) as router, router.makefile("rwb") as stream:
        _be_the_first_to_go()
        message, _ = _read(stream)
        parser = BodyParser(unpack(ServedModel, message), alone=True)
        _ = parser.tokenizer.long_texts  # read ahead of the first long text
        _write(stream, {})  # ready
        while True:
            message, body = _read(stream)
            _write(stream, _answer(parser, unpack(ParseCall, message), body))


def _answer(parser: BodyParser, call: ParseCall, body: bytes) -> dict[str, Any]:
    try:
        if call.question is not None:
            return {"answer": parser.answer(call.question, body)}
        assert call.endpoint is not None, "a call is for one of both"
        return {"parsed": pack(parser.parse(call.endpoint, body, call.owner))}
    except InvalidTextError as error:
        return {"error": to_wire(InvalidRequest(str(error)))}
    except RequestError as error:
        return {"error": to_wire(error)}


def _be_the_first_to_go() -> None:
    """Have the kernel end this process before the router if memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _read(stream: BufferedRWPair) -> tuple[dict[str, Any], bytes]:
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        sys.exit(0)  # the router has closed the socket
    message_bytes, body_bytes = LENGTHS.unpack(lengths)
    return message_of(stream.read(message_bytes)), stream.read(body_bytes)


def _write(stream: BufferedRWPair, message: dict[str, Any]) -> None:
    stream.write(frame(message))
    stream.flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, ConnectionError):  # the router is gone, or goes
        main()

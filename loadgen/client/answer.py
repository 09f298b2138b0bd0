"""An answer as it streams in: its text, and when each piece came."""

from __future__ import annotations

import json
from typing import Any

_DATA = b"data:"
_DONE = b"[DONE]"
MAX_ERROR = 300
"""Characters of an error body that are kept."""


class Answer:
    """Takes in the body of a chat or text completion, streamed or whole."""

    def __init__(self) -> None:
        self.chunk_ns: list[int] = []
        """Of each piece that carries text; of the last piece where none does."""
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}
        self.error = ""
        self.ended = False
        """The server said that this was all."""
        self._ended_ns = 0
        self._rest = b""
        self._whole = bytearray()
        """A body that is one JSON object."""

    def feed(self, body: bytes, read_ns: int) -> None:
        """A piece of the body; pieces end anywhere."""
        if self._whole or (not self._rest and body.startswith(b"{")):
            self._whole += body
            return
        if self._rest:
            body = self._rest + body
        # Lines, not events: what follows `data:` is one JSON object on one line.
        *lines, self._rest = body.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._take(line[len(_DATA) :].strip(), read_ns)

    def finish(self, status: int, read_ns: int) -> None:
        """The body has ended."""
        whole = bytes(self._whole) or self._rest
        if status != 200:
            message = _message(whole)
            self.error = f"HTTP {status}" + (f": {message}" if message else "")
        elif self._whole:
            self._take(whole, read_ns)
            self.ended = True
        if not self.chunk_ns and self._ended_ns:
            self.chunk_ns.append(self._ended_ns)
        if not self.error and not (self.ended and self.chunk_ns):
            self.error = "the stream ended early"

    @property
    def end_ns(self) -> int:
        """When its last token came, which may have no text: the end of the sequence."""
        return max(self._ended_ns, self.chunk_ns[-1])

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def _take(self, data: bytes, read_ns: int) -> None:
        if data == _DONE:
            self.ended = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.error = f"error event: {_error_message(chunk['error'])}"
                return
            for choice in chunk.get("choices") or ():
                self._take_choice(choice, read_ns)
            if usage := chunk.get("usage"):
                self.usage = usage
        except (ValueError, TypeError, AttributeError):
            self.error = f"not a completion: {data[:MAX_ERROR]!r}"

    def _take_choice(self, choice: dict[str, Any], read_ns: int) -> None:
        delta = choice.get("delta") or choice.get("message") or choice
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("text")
        if text:
            self.chunk_ns.append(read_ns)
            self.texts.append(text)
        if choice.get("finish_reason"):
            self._ended_ns = read_ns


def _message(body: bytes) -> str:
    """Of an error's body."""
    try:
        return _error_message(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return body[:MAX_ERROR].decode(errors="replace")


def _error_message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR]

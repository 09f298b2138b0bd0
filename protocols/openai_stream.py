"""Server-sent events of a streamed answer, at a few microseconds a token.

All of a chunk but the text is the same from token to token. It is encoded once per stream; a token
then costs one JSON string. A pydantic model per chunk would cost ten times that.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as _json_string
from typing import Any

from csps.protocols.openai import StreamOptions
from csps.protocols.openai_responses import (
    ChatLogprobs,
    CompletionLogprobs,
    FinishReason,
    TextLogprob,
    error_body,
)

DONE = b"data: [DONE]\n\n"
"""Ends every stream."""


def error_event(exc: BaseException) -> bytes:
    """The event that ends a stream whose request failed after its first chunk."""
    _, body, _ = error_body(exc)
    return f"data: {json.dumps(body)}\n\n".encode()


class _Stream(ABC):
    """Encodes the chunks of one answer, in order."""

    _object: str
    _before_text: str
    _after_text: str

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt_tokens: int,
        cached_tokens: Callable[[], int],
        options: StreamOptions,
    ) -> None:
        envelope = {"id": request_id, "object": self._object, "created": created, "model": model}
        self._head = f'data: {json.dumps(envelope)[:-1]}, "choices": ['
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._include_usage = options.include_usage
        self._continuous_usage = options.include_usage and options.continuous_usage_stats

    def delta(
        self,
        text: str,
        *,
        completion_tokens: int,
        logprobs: Sequence[TextLogprob] = (),
        finish_reason: FinishReason | None = None,
        csps: dict[str, Any] | None = None,
    ) -> bytes:
        """One chunk: `text` is new, `completion_tokens` have been generated so far.

        `finish_reason` marks the last chunk with text; `csps` is the report that `explain` asks
        for and goes with it.
        """
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        report = "" if csps is None else f', "csps": {json.dumps(csps)}'
        return (
            f'{self._head}{{"index": 0, {self._before_text}{_json_string(text)}{self._after_text}'
            f', "logprobs": {self._logprobs(logprobs)}, "finish_reason": {reason}}}]'
            f"{self._usage_so_far(completion_tokens)}{report}}}\n\n"
        ).encode()

    def usage(self, completion_tokens: int) -> bytes:
        """The chunk after the last one, with the usage; empty unless the client asked for it."""
        if not self._include_usage:
            return b""
        return f'{self._head}], "usage": {self._usage(completion_tokens)}}}\n\n'.encode()

    def _usage_so_far(self, completion_tokens: int) -> str:
        if not self._include_usage:
            return ""
        if not self._continuous_usage:
            return ', "usage": null'
        return f', "usage": {self._usage(completion_tokens)}'

    def _usage(self, completion_tokens: int) -> str:
        return (
            f'{{"prompt_tokens": {self._prompt_tokens}, "completion_tokens": {completion_tokens}, '
            f'"total_tokens": {self._prompt_tokens + completion_tokens}, '
            f'"prompt_tokens_details": {{"cached_tokens": {self._cached_tokens()}}}}}'
        )

    @abstractmethod
    def _logprobs(self, entries: Sequence[TextLogprob]) -> str:
        """JSON of `entries`."""


class CompletionStream(_Stream):
    """Chunks of `/v1/completions`."""

    _object = "text_completion"
    _before_text, _after_text = '"text": ', ""

    def _logprobs(self, entries: Sequence[TextLogprob]) -> str:
        return CompletionLogprobs.of(entries).model_dump_json() if entries else "null"


class ChatStream(_Stream):
    """Chunks of `/v1/chat/completions`."""

    _object = "chat.completion.chunk"
    _before_text, _after_text = '"delta": {"content": ', "}"

    def start(self) -> bytes:
        """The first chunk, which says who speaks."""
        return (
            f'{self._head}{{"index": 0, "delta": {{"role": "assistant", "content": ""}}, '
            f'"logprobs": null, "finish_reason": null}}]{self._usage_so_far(0)}}}\n\n'
        ).encode()

    def _logprobs(self, entries: Sequence[TextLogprob]) -> str:
        return ChatLogprobs.of(entries).model_dump_json() if entries else "null"

"""One request between the dispatcher and the client: tokens in, pieces of an OpenAI answer out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from csps.models.tokenizer import Tokenizer
from csps.protocols.errors import Cancelled
from csps.protocols.openai import CompletionRequest
from csps.protocols.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    FinishReason,
    TextLogprob,
    Usage,
)
from csps.protocols.openai_stream import DONE, ChatStream, CompletionStream
from csps.services.http.answer import Answer, Piece
from csps.services.http.errors import last_event
from csps.services.http.request_parser import Accepted
from csps.services.router.running import Running
from csps.services.telemetry.request_trace import RequestTrace


class GeneratedResponse:
    """Owns a running request from its submission to its end."""

    def __init__(
        self, accepted: Accepted, running: Running, *, tokenizer: Tokenizer, trace: RequestTrace
    ) -> None:
        self._request = accepted.request
        self._generation = accepted.generation
        self._running = running
        self._trace = trace
        self._created = int(time.time())
        self._answer = Answer(
            tokenizer,
            stop=accepted.request.stop,
            min_tokens=accepted.request.min_tokens,
            skip_special=accepted.request.skip_special_tokens,
        )

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """The answer: each time what has come since. Closing this gives everything back and ends
        the trace.

        Raises:
            CspsError: what the request failed with.
        """
        reason: FinishReason | None = None
        try:
            async with self._running:
                while reason is None and (tokens := await self._running.pending()):
                    pieces = self._answer.push_all(tokens)
                    reason = pieces[-1].finish_reason if pieces else None
                    if self._answer.stopped:
                        self._running.cancel("stop")
                    if pieces:
                        yield pieces
                    if self._answer.cancelled:
                        raise Cancelled("the request was cancelled by the server")
            if reason is None:
                raise Cancelled("the request ended without an answer")
        except Exception as error:
            self._trace.failed(error)
            raise
        finally:
            self._trace.answered(
                self._running, model=self._request.model, response_id=self._id, reason=reason
            )
            self._trace.end()

    # --- in one piece ---

    async def whole(self) -> dict[str, Any]:
        """Body of the answer of a request that does not stream."""
        pieces = [piece async for some in self.pieces() for piece in some]
        text = "".join(piece.text for piece in pieces)
        logprobs = [piece.logprob for piece in pieces if piece.logprob is not None]
        reason = pieces[-1].finish_reason
        assert reason is not None
        body = (
            self._completion(text, logprobs, reason)
            if isinstance(self._request, CompletionRequest)
            else self._chat(text, logprobs, reason)
        )
        return body.model_dump(exclude={"csps"} if body.csps is None else None)

    def _completion(
        self, text: str, logprobs: list[TextLogprob], reason: FinishReason
    ) -> CompletionResponse:
        choice = CompletionChoice(
            text=text,
            logprobs=CompletionLogprobs.of(logprobs) if logprobs else None,
            finish_reason=reason,
        )
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[choice],
            usage=self._usage(),
            csps=self._report(),
        )

    def _chat(
        self, text: str, logprobs: list[TextLogprob], reason: FinishReason
    ) -> ChatCompletionResponse:
        choice = ChatChoice(
            message=AssistantMessage(content=text),
            logprobs=ChatLogprobs.of(logprobs) if logprobs else None,
            finish_reason=reason,
        )
        return ChatCompletionResponse(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[choice],
            usage=self._usage(),
            csps=self._report(),
        )

    # --- piece by piece ---

    async def events(
        self, first: asyncio.Future[list[Piece]], rest: AsyncIterator[list[Piece]]
    ) -> AsyncGenerator[bytes]:
        """Server-sent events: the pieces, usage, the end. What is there at once comes in one.

        A failure becomes an event too.
        """
        stream = self._stream()
        try:
            head = stream.start() if isinstance(stream, ChatStream) else b""
            if not first.done() and head:
                yield head
                head = b""
            yield head + self._events(stream, await first)
            async for pieces in rest:
                yield self._events(stream, pieces)
        except Exception as error:
            yield last_event(error) + DONE

    def _stream(self) -> CompletionStream | ChatStream:
        is_completion = isinstance(self._request, CompletionRequest)
        make = CompletionStream if is_completion else ChatStream
        return make(
            request_id=self._id,
            model=self._request.model,
            created=self._created,
            prompt_tokens=int(self._generation.prompt.size),
            cached_tokens=lambda: self._running.cached_tokens,
            options=self._request.stream_options,
        )

    def _events(self, stream: CompletionStream | ChatStream, pieces: Sequence[Piece]) -> bytes:
        """Of tokens that have come together, one after another; with the last the stream ends."""
        last = pieces[-1].finish_reason is not None
        events = [self._event(stream, piece) for piece in pieces]
        if last:
            events.append(stream.usage(pieces[-1].tokens) + DONE)
        return b"".join(events)

    def _event(self, stream: CompletionStream | ChatStream, piece: Piece) -> bytes:
        return stream.delta(
            piece.text,
            completion_tokens=piece.tokens,
            logprobs=() if piece.logprob is None else (piece.logprob,),
            finish_reason=piece.finish_reason,
            csps=None if piece.finish_reason is None else self._report(),
        )

    # --- both ---

    @property
    def _id(self) -> str:
        prefix = "cmpl" if isinstance(self._request, CompletionRequest) else "chatcmpl"
        return f"{prefix}-{self._generation.request_id}"

    def _usage(self) -> Usage:
        prompt_tokens = int(self._generation.prompt.size)
        return Usage.of(prompt_tokens, self._answer.tokens, self._running.cached_tokens)

    def _report(self) -> dict[str, Any] | None:
        return self._running.explain() if self._request.csps.explain else None

"""The OpenAI answer made of sampled tokens: text, log-probabilities, stop strings, events.

`GeneratedResponse` reads tokens from a request's handle. `AnswerText` turns them into deltas, and
`StopStrings` withholds text that may be part of a stop string.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from csps.models.tokenizers.tokenizer import Detokenizer, Tokenizer
from csps.protocols.core.errors import Cancelled
from csps.protocols.gang.messages import SampledToken
from csps.protocols.openai.requests import StreamOptions
from csps.protocols.openai.responses import (
    DONE,
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    ChatStream,
    CompletionChoice,
    CompletionResponse,
    CompletionStream,
    FinishReason,
    TextLogprob,
    Usage,
    WholeChat,
    WholeCompletion,
)
from csps.services.http.errors import last_event
from csps.services.http.request_parser import ParsedRequest
from csps.services.requests.request_handle import RequestHandle
from csps.services.telemetry.request_trace import RequestTrace


class GeneratedResponse:
    """One request's answer, from submission to the end."""

    def __init__(
        self,
        parsed: ParsedRequest,
        handle: RequestHandle,
        *,
        model: str,
        tokenizer: Tokenizer,
        trace: RequestTrace,
    ) -> None:
        self._options = parsed.answer
        self._spec = parsed.spec
        self._model = model
        self._handle = handle
        self._trace = trace
        self._created = int(time.time())
        self._answer = AnswerText(
            tokenizer,
            stop=parsed.answer.stop,
            min_tokens=parsed.spec.sampling.min_tokens,
            skip_special=parsed.answer.skip_special_tokens,
        )

    async def deltas(self) -> AsyncGenerator[list[AnswerDelta]]:
        """Yield the answer, each time all deltas since the last one. Closing it ends the request.

        Raises:
            CspsError: the error with which the request failed.
        """
        reason: FinishReason | None = None
        try:
            async with self._handle:
                while reason is None and (tokens := await self._handle.pending()):
                    deltas = self._answer.push_all(tokens)
                    reason = deltas[-1].finish_reason if deltas else None
                    if self._answer.stopped:
                        self._handle.cancel("stop")
                    if deltas:
                        yield deltas
                    if self._answer.cancelled:
                        raise Cancelled("the request was cancelled by the server")
            if reason is None:
                raise Cancelled("the request ended without an answer")
        except Exception as error:
            self._trace.failed(error)
            raise
        finally:
            self._trace.answered(
                self._handle, model=self._model, response_id=self._id, reason=reason
            )
            self._trace.end()

    # --- without streaming ---

    async def whole(self, grown: Callable[[int], None]) -> list[bytes]:
        """Return the body of an answer that is not streamed, in pieces.

        Args:
            grown: called with the body's length again and again; an exception from it ends the
                request.
        """
        body = WholeChat() if self._options.chat else WholeCompletion()
        reason: FinishReason | None = None
        async with aclosing(self.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    body.push(delta.text, delta.logprob)
                grown(body.bytes)
                reason = deltas[-1].finish_reason
        assert reason is not None, "deltas() ended without a finish reason"
        return body.pieces(self._chat(reason) if self._options.chat else self._completion(reason))

    def _completion(self, reason: FinishReason) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[CompletionChoice(text="", finish_reason=reason)],
            usage=self._usage(),
            csps=self._report(),
        )

    def _chat(self, reason: FinishReason) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[ChatChoice(message=AssistantMessage(content=""), finish_reason=reason)],
            usage=self._usage(),
            csps=self._report(),
        )

    # --- streaming ---

    async def events(
        self, first: asyncio.Future[list[AnswerDelta]], rest: AsyncIterator[list[AnswerDelta]]
    ) -> AsyncGenerator[bytes]:
        """Yield server-sent events: the deltas, usage, the end. A failure is an event as well.

        Deltas that are ready together leave in one write.

        Args:
            first: the first item of `deltas`.
            rest: the other items of `deltas`.
        """
        stream = self._stream()
        try:
            head = stream.start() if isinstance(stream, ChatStream) else b""
            if not first.done() and head:
                yield head
                head = b""
            yield head + self._events(stream, await first)
            async for deltas in rest:
                yield self._events(stream, deltas)
        except Exception as error:
            yield last_event(error) + DONE

    def _stream(self) -> CompletionStream | ChatStream:
        make = ChatStream if self._options.chat else CompletionStream
        return make(
            request_id=self._id,
            model=self._model,
            created=self._created,
            prompt_tokens=int(self._spec.prompt.size),
            cached_tokens=lambda: self._handle.cached_tokens,
            options=StreamOptions(
                include_usage=self._options.include_usage,
                continuous_usage_stats=self._options.continuous_usage,
            ),
        )

    def _events(
        self, stream: CompletionStream | ChatStream, deltas: Sequence[AnswerDelta]
    ) -> bytes:
        """Return the events of deltas that came together; the last delta ends the stream."""
        last = deltas[-1].finish_reason is not None
        events = [self._event(stream, delta) for delta in deltas]
        if last:
            events.append(stream.usage(deltas[-1].tokens) + DONE)
        return b"".join(events)

    def _event(self, stream: CompletionStream | ChatStream, delta: AnswerDelta) -> bytes:
        return stream.delta(
            delta.text,
            completion_tokens=delta.tokens,
            logprobs=() if delta.logprob is None else (delta.logprob,),
            finish_reason=delta.finish_reason,
            csps=None if delta.finish_reason is None else self._report(),
        )

    # --- both ---

    @property
    def _id(self) -> str:
        prefix = "chatcmpl" if self._options.chat else "cmpl"
        return f"{prefix}-{self._spec.client_request_id}"

    def _usage(self) -> Usage:
        prompt_tokens = int(self._spec.prompt.size)
        return Usage.of(prompt_tokens, self._answer.tokens, self._handle.cached_tokens)

    def _report(self) -> dict[str, Any] | None:
        return self._handle.explain() if self._options.explain else None


class AnswerDelta(NamedTuple):
    """One token's contribution to an answer. A tuple, because every token makes one."""

    text: str
    """Text to show; empty within a character, or while it may become a stop string."""
    tokens: int
    """Tokens of the answer up to this one, including a final end-of-sequence token."""
    finish_reason: FinishReason | None = None
    logprob: TextLogprob | None = None


class AnswerText:
    """Assembles one answer; push tokens until a delta has a finish reason, or `cancelled`."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str], min_tokens: int, skip_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special)
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._characters = 0
        """Characters of the answer so far, including withheld ones."""
        self.tokens = 0
        """Tokens sampled so far, including a final end-of-sequence token."""
        self.cancelled = False
        """The server cancelled the request."""

    def push_all(self, tokens: Sequence[SampledToken]) -> list[AnswerDelta]:
        """Take tokens that came together; drop those behind the answer's end."""
        deltas: list[AnswerDelta] = []
        for token in tokens:
            if token.finish_reason == "cancelled":
                self.cancelled = True
                break
            deltas.append(delta := self.push(token))
            if delta.finish_reason is not None:
                break
        return deltas

    def push(self, token: SampledToken) -> AnswerDelta:
        """Take the next token."""
        self.tokens += 1
        offset = self._characters
        text, reason = self._shown(token)
        logprob = None if token.logprob is None else self._logprob(token, token.logprob, offset)
        return AnswerDelta(text, self.tokens, reason, logprob)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string ended the answer, while the ranks still sample tokens."""
        return self._stop.found

    def _shown(self, token: SampledToken) -> tuple[str, FinishReason | None]:
        # A token that ends the answer is a signal, not text.
        text = "" if token.finish_reason == "stop" else self._detokenizer.push(token.token)
        if token.finish_reason is not None:
            text += self._detokenizer.flush()
        self._characters += len(text)
        # The client asked to ignore stop strings up to `min_tokens`.
        if self.tokens > self._min_tokens:
            text = self._stop.push(text)
        if self._stop.found:
            return text, "stop"
        if token.finish_reason is not None:
            text += self._stop.flush()
        return text, token.finish_reason  # type: ignore[return-value]  # "cancelled" cannot be here

    def _logprob(self, token: SampledToken, logprob: float, offset: int) -> TextLogprob:
        top = (self._text_logprob(entry.token, entry.logprob) for entry in token.top_logprobs)
        sampled = self._text_logprob(token.token, logprob)
        return replace(sampled, offset=offset, top=tuple(top))

    def _text_logprob(self, token: int, logprob: float) -> TextLogprob:
        token_bytes = self._tokenizer.token_bytes(token)
        # As OpenAI has it, a token that is no text reads `\xf0\x9f`. U+FFFD would make all such
        # tokens the same, and of alternatives with the same text a completion shows only one.
        text = token_bytes.decode(errors="backslashreplace")
        return TextLogprob(token=text, token_bytes=token_bytes, logprob=logprob)


class StopStrings:
    """Finds stop strings in the text of one answer, across token boundaries.

    Text that may be the beginning of a stop string is withheld until more text decides. An answer
    ends at the first character that completes a stop string, however its text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._withheld = ""
        self.found = False
        """A stop string was found; nothing more is returned."""

    def push(self, text: str) -> str:
        """Return the text that can be shown after `text`."""
        if self.found or not self._stops:
            return "" if self.found else text
        ends = [(end, stop) for stop in self._stops if (end := stop.push(text)) is not None]
        text, before = self._withheld + text, len(self._withheld)
        if ends:
            first = min(end for end, _ in ends)
            longest = max(stop.length for end, stop in ends if end == first)
            self.found, self._withheld = True, ""
            return text[: before + first - longest]
        certain = len(text) - max(stop.matched for stop in self._stops)
        self._withheld = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the withheld text, at the end of an answer without a stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld


class _StopString:
    """Knuth, Morris and Pratt's search for one string in text that comes in pieces.

    Comparing the ends of the text with the string's beginnings instead takes time quadratic in the
    text that is withheld, on the event loop.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shorter = _shorter_matches(stop)
        self.length = len(stop)
        self.matched = 0
        """Characters at the end of the text that are the string's first ones: the most that are."""

    def push(self, text: str) -> int | None:
        """Return where in `text` the string ends first, or None if it does not."""
        stop, matched, at = self._stop, self.matched, 0
        while at < len(text):
            if matched == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            while matched >= 0 and text[at] != stop[matched]:
                matched = self._shorter[matched]
            matched, at = matched + 1, at + 1
            if matched == len(stop):
                return at
        self.matched = matched
        return None


def _shorter_matches(stop: str) -> list[int]:
    """Return, for each number of matched characters, the next smaller number to try where the next
    character is another one; -1 for none.

    Numbers after which the same character would follow are left out. A character therefore costs at
    most a few steps, and not as many as are matched.
    """
    shorter, border = [-1], 0
    for matched in range(1, len(stop)):
        same = stop[matched] == stop[border]
        shorter.append(shorter[border] if same else border)
        while border >= 0 and stop[matched] != stop[border]:
            border = shorter[border]
        border += 1
    return shorter

"""The answer made of sampled tokens: text, log-probabilities, stop strings, events.

`GeneratedResponse` reads tokens from a request's handle. `AnswerText` turns them into deltas, and
`StopStrings` withholds text that may be part of a stop string.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from csps.models.tokenizers.tokenizer import Detokenizer, Tokenizer
from csps.protocols.anthropic.messages import PING, MessagesAnswer
from csps.protocols.core.errors import Cancelled
from csps.protocols.gang.messages import SampledToken
from csps.protocols.openai.requests import StreamOptions
from csps.protocols.openai.responses import (
    AnswerDelta,
    ChatCompletionResponse,
    ChatStream,
    CompletionResponse,
    CompletionStream,
    FinishReason,
    Part,
    PromptLogprobsList,
    TextLogprob,
    Usage,
    WholeChat,
    WholeCompletion,
    whole_body,
)
from csps.protocols.openai.responses_api import ResponsesAnswer
from csps.services.http.answer_parts import AnswerParts
from csps.services.http.body import end_tasks
from csps.services.http.body_parser import AnswerOptions, Endpoint
from csps.services.http.errors import last_event
from csps.services.http.harmony_parts import HarmonyParts, Splitter
from csps.services.http.request_parser import ParsedRequest
from csps.services.requests.prompt_logprobs import KnownPromptLogprobs
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.requests.story import story
from csps.services.telemetry.request_trace import RequestTrace

Encoder = CompletionStream | ChatStream | MessagesAnswer | ResponsesAnswer
_ID_PREFIX: dict[Endpoint, str] = {
    "completion": "cmpl-",
    "chat": "chatcmpl-",
    "messages": "msg_",
    "responses": "resp_",
}
HEARTBEAT = b": still working\n\n"
"""Comment line on a silent stream."""
PROMPT_BLOCK = 256
"""Tokens of a prompt that are encoded at once, in some milliseconds."""
PROGRESS_PERIOD_S = 0.5
"""Time between two reports of how far a prompt is."""
Submit = Callable[[RequestSpec], RequestHandle]


class GeneratedResponse:
    """The answer to one HTTP request, from submission to the end: one choice or several."""

    def __init__(
        self,
        parsed: ParsedRequest,
        submit: Submit,
        *,
        model: str,
        tokenizer: Tokenizer,
        trace: RequestTrace,
    ) -> None:
        """Submit the request; answers to the same prompt may follow later.

        Raises:
            RequestError: it was not admitted.
        """
        self._options = parsed.answer
        self._spec = parsed.specs[0]
        self._prompt_tokens = 0
        self._model, self._trace, self._submit = model, trace, submit
        self._created = int(time.time())
        self._choices: list[_Choice] = []
        self._stream: Encoder | None = None
        """Encoder of a stream that has begun."""
        samples = parsed.samples
        for index, (spec, echo) in enumerate(zip(parsed.specs, parsed.echoes, strict=True)):
            begins_with = echo or parsed.answer.begins_with
            choice = _Choice(index, spec, parsed.answer, begins_with, tokenizer)
            if index % samples == 0:
                self._prompt_tokens += int(spec.prompt.size)
            elif spec.hashes:
                choice.after = self._choices[index - index % samples]
            self._choices.append(choice)
        self._samples = samples
        self._ended = 0
        """Choices whose last event was sent."""
        try:
            for choice in self._choices:
                if choice.after is None:
                    choice.handle = submit(choice.spec)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Cancel what was submitted and has not ended."""
        for choice in self._choices:
            if choice.handle is not None:
                choice.handle.cancel()
                choice.handle.drop_unread()

    @property
    def handle(self) -> RequestHandle:
        """Return the handle of the first choice."""
        handle = self._choices[0].handle
        assert handle is not None, "the first choice is submitted at once"
        return handle

    async def deltas(self) -> AsyncGenerator[list[AnswerDelta]]:
        """Yield the answer, each time all deltas since the last one. Closing it ends the request.

        Raises:
            CspsError: the error with which the request failed.
        """
        try:
            batches = (
                self._choices[0].deltas(self._submit) if len(self._choices) == 1 else self._merged()
            )
            async with aclosing(batches):
                async for deltas in batches:
                    yield deltas
        except Exception as error:
            self._trace.failed(error)
            raise
        finally:
            self._leave()
            self._trace.answered(
                self.handle,
                model=self._model,
                response_id=self._id,
                reason=self._choices[0].reason,
            )
            self._trace.end()

    async def _merged(self) -> AsyncGenerator[list[AnswerDelta]]:
        """Yield the deltas of all choices as they come."""
        streams = [choice.deltas(self._submit) for choice in self._choices]
        waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stream = waiting.pop(task)
                    try:
                        deltas = task.result()
                    except StopAsyncIteration:
                        continue
                    yield deltas
                    waiting[asyncio.ensure_future(anext(stream))] = stream
        finally:
            await end_tasks(*waiting)
            for stream in streams:
                await stream.aclose()

    # --- without streaming ---

    async def whole(self, grown: Callable[[int], None]) -> list[bytes]:
        """Return the body of an answer that is not streamed, in pieces.

        Args:
            grown: called with the body's length again and again; an exception from it ends the
                request.
        """
        if self._options.endpoint in ("messages", "responses"):
            return await self._whole_alone(grown)
        prompts = self._prompts()
        bodies: list[WholeCompletion | WholeChat] = [
            WholeCompletion(prompt.echoed)
            if self._options.endpoint == "completion"
            else WholeChat()
            for prompt in prompts
            for _ in range(self._samples)
        ]
        async with aclosing(self.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    shown = delta.logprob if self._options.logprobs else None
                    bodies[delta.choice].push(delta.parts, shown)
                grown(sum(body.bytes for body in bodies))
        for prompt in prompts:
            async for _ in prompt.encode():
                held = sum(body.bytes for body in bodies) + sum(each.held_bytes for each in prompts)
                grown(held)
        chat = self._options.endpoint == "chat"
        choices = [
            bodies[choice.index].pieces(
                index,
                choice.finished,
                () if chat else prompts[choice.index // self._samples].pieces(),
            )
            for index, choice in enumerate(self._returned())
        ]
        return whole_body(self._body(), choices, prompts[0].pieces() if chat else ())

    def _prompts(self) -> list[_PromptAnswer]:
        return [_PromptAnswer(choice, self._options) for choice in self._choices[:: self._samples]]

    async def _whole_alone(self, grown: Callable[[int], None]) -> list[bytes]:
        """Return the body of an answer of an API that has one choice."""
        answer = self._encoder()
        assert isinstance(answer, MessagesAnswer | ResponsesAnswer), "the others have choices"
        async with aclosing(self.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    self._event(answer, delta)
                grown(answer.bytes)
        return [answer.whole(self._tokens, self._report())]

    def _returned(self) -> list[_Choice]:
        """Return the choices to show: the likeliest of each prompt, as many as were asked for."""
        samples, shown = self._samples, self._options.answers
        if samples == shown:
            return self._choices
        return [
            choice
            for first in range(0, len(self._choices), samples)
            for choice in heapq.nlargest(
                shown, self._choices[first : first + samples], key=lambda each: each.likelihood
            )
        ]

    def _body(self) -> CompletionResponse | ChatCompletionResponse:
        made = CompletionResponse if self._options.endpoint == "completion" else None
        fields: dict[str, Any] = {
            "id": self._id,
            "created": self._created,
            "model": self._model,
            "choices": [],
            "usage": self._usage(),
            "csps": self._report(),
        }
        return made(**fields) if made else ChatCompletionResponse(**fields)

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
        stream = self._stream = self._encoder()
        try:
            head = b"".join(stream.start(choice.index) for choice in self._choices)
            if not first.done() and head:
                yield head
                head = b""
            if self._options.progress:
                while not first.done():
                    head += stream.progress(self.handle.progress())
                    yield head
                    head = b""
                    await asyncio.wait({first}, timeout=PROGRESS_PERIOD_S)
                if first.exception() is None:
                    head += stream.progress(self.handle.progress())
            yield head + self._events(stream, await first)
            async for deltas in rest:
                yield self._events(stream, deltas)
        except Exception as error:
            yield last_event(error, self._options.endpoint)

    @property
    def progress(self) -> bool:
        """Return whether the client wants to know how far its prompt is."""
        return self._options.progress

    def keep_alive(self) -> bytes:
        """Return what is sent on a silent stream: an event where clients count events."""
        match self._options.endpoint:
            case "messages":
                return PING
            case "responses" if isinstance(self._stream, ResponsesAnswer):
                return self._stream.keep_alive()
            case _:
                return HEARTBEAT

    def _encoder(self) -> Encoder:
        shared: dict[str, Any] = {
            "request_id": self._id,
            "model": self._model,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": lambda: self._cached_tokens,
        }
        if self._options.endpoint == "messages":  # which counts no reasoning apart
            return MessagesAnswer(**shared)
        shared["reasoning_tokens"] = lambda: self._reasoning_tokens
        if self._options.endpoint == "responses":
            return ResponsesAnswer(
                created=self._created, namespaces=self._options.namespaces, **shared
            )
        options = StreamOptions(
            include_usage=self._options.include_usage,
            continuous_usage_stats=self._options.continuous_usage,
        )
        make = CompletionStream if self._options.endpoint == "completion" else ChatStream
        return make(created=self._created, options=options, **shared)

    def _events(self, stream: Encoder, deltas: Sequence[AnswerDelta]) -> bytes:
        """Return the events of deltas that came together, and the end after the last of all."""
        events = [self._event(stream, delta) for delta in deltas]
        # By what is sent: a choice may have its last tokens before the others' are sent.
        self._ended += sum(delta.finish_reason is not None for delta in deltas)
        if self._ended == len(self._choices):
            events.append(stream.end(self._tokens))
        return b"".join(events)

    def _event(self, stream: Encoder, delta: AnswerDelta) -> bytes:
        tokens = delta.tokens if len(self._choices) == 1 else self._tokens
        report = None if delta.finish_reason is None else self._report()
        return stream.delta(delta._replace(tokens=tokens), report)

    # --- both ---

    @property
    def _id(self) -> str:
        return f"{_ID_PREFIX[self._options.endpoint]}{self._spec.client_request_id}"

    @property
    def _tokens(self) -> int:
        """Return the tokens of all choices."""
        return sum(choice.tokens for choice in self._choices)

    @property
    def _cached_tokens(self) -> int:
        """Return the cached tokens of all prompts, each counted once."""
        firsts = (choice.handle for choice in self._choices[:: self._samples])
        return sum(handle.cached_tokens for handle in firsts if handle is not None)

    @property
    def _reasoning_tokens(self) -> int:
        """Return the reasoning tokens of all choices."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def _usage(self) -> Usage:
        return Usage.of(
            self._prompt_tokens, self._tokens, self._cached_tokens, self._reasoning_tokens
        )

    def _report(self) -> dict[str, Any] | None:
        if not self._options.explain:
            return None
        return {**self.handle.explain(), "story": story(self.handle)}


class _PromptAnswer:
    """What an answer says of the tokens of one prompt, if the client wants to know.

    Args:
        first: first choice of the prompt.
    """

    def __init__(self, first: _Choice, options: AnswerOptions) -> None:
        self._first, self._options = first, options
        self.echoed: WholeCompletion | None = None
        """Log-probabilities that precede those of an answer; None for none."""
        if options.echo_logprobs is not None:
            self.echoed = WholeCompletion()
        self._listed = None if options.prompt_logprobs is None else PromptLogprobsList()

    @property
    def held_bytes(self) -> int:
        """Bytes so far, about."""
        return sum(part.bytes for part in (self.echoed, self._listed) if part is not None)

    def pieces(self) -> list[bytes]:
        """Return the value of the field `prompt_logprobs`; empty if it is not wanted."""
        return [] if self._listed is None else self._listed.pieces()

    async def encode(self) -> AsyncGenerator[None]:
        """Encode all tokens; yield now and then, for others' turn."""
        if self.echoed is None and self._listed is None:
            return
        handle = self._first.handle
        assert handle is not None, "the answer has ended"
        assert handle.prompt_logprobs is not None, "they were asked for"
        known, text = handle.prompt_logprobs, self._first.prompt_text()
        for start in range(-1, known.known, PROMPT_BLOCK):
            rows = range(start, min(start + PROMPT_BLOCK, known.known))
            for row in rows:
                self._push(known, row, text)
            yield
            await asyncio.sleep(0)

    def _push(self, known: KnownPromptLogprobs, row: int, text: PromptText) -> None:
        """Encode the token behind a position; -1 is before the first token."""
        token = int(known.prompt[row + 1])
        if row < 0:
            first = text.entry(token, None)
            if self.echoed is not None:
                self.echoed.push((), first)
            if self._listed is not None:
                self._listed.push(())
            return
        own = text.entry(token, float(known.logprobs[row]))
        top = [
            (int(other), text.alternative(int(other), float(logprob)))
            for other, logprob in zip(known.top_tokens[row], known.top_logprobs[row], strict=True)
        ]
        if self.echoed is not None:
            shown = tuple(entry for _, entry in top[: self._options.echo_logprobs])
            self.echoed.push((), replace(own, top=shown))
        if self._listed is not None:
            ranked = [(other, rank, entry) for rank, (other, entry) in enumerate(top, start=1)]
            listed = ranked[: self._options.prompt_logprobs]
            if all(other != token for other, _, _ in listed):
                listed.append((token, int(known.ranks[row]), own))
            self._listed.push(listed)


class PromptText:
    """Spells a prompt's tokens, in their order."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special)
        self._characters = 0

    def entry(self, token: int, logprob: float | None) -> TextLogprob:
        """Return the prompt's next token."""
        offset = self._characters
        self._characters += len(self._detokenizer.push(token))
        return replace(self.alternative(token, logprob), offset=offset)

    def alternative(self, token: int, logprob: float | None) -> TextLogprob:
        """Return a token that may stand in place of the next one."""
        return text_logprob(self._tokenizer, token, logprob)


def text_logprob(tokenizer: Tokenizer, token: int, logprob: float | None) -> TextLogprob:
    """Return a token as text, with its log-probability."""
    token_bytes = tokenizer.token_bytes(token)
    # As OpenAI has it, a token that is no text reads `\xf0\x9f`. U+FFFD would make all such
    # tokens the same, and of alternatives with the same text a completion shows only one.
    text = token_bytes.decode(errors="backslashreplace")
    return TextLogprob(token=text, token_bytes=token_bytes, logprob=logprob)


class _Choice:
    """One of the answers to a request."""

    def __init__(
        self,
        index: int,
        spec: RequestSpec,
        options: AnswerOptions,
        begins_with: str,
        tokenizer: Tokenizer,
    ) -> None:
        self.index, self.spec = index, spec
        self._tokenizer, self._skip_special = tokenizer, options.skip_special_tokens
        self._explains = options.explain
        self.handle: RequestHandle | None = None
        """Handle, once it is submitted."""
        self.after: _Choice | None = None
        """Choice with the same prompt, whose KV it uses."""
        self.reason: FinishReason | None = None
        self._answer = AnswerText(
            tokenizer,
            index=index,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=spec.sampling.min_tokens,
            skip_special=options.skip_special_tokens,
            begins_with=begins_with,
            parts=_splitter(options),
            include_reasoning=options.include_reasoning,
        )

    @property
    def tokens(self) -> int:
        """Return the tokens so far."""
        return self._answer.tokens

    @property
    def reasoning_tokens(self) -> int:
        """Return the tokens so far that are reasoning."""
        return self._answer.reasoning_tokens

    def prompt_text(self) -> PromptText:
        """Return a speller of the prompt's tokens."""
        return PromptText(self._tokenizer, skip_special=self._skip_special)

    @property
    def likelihood(self) -> float:
        """Return the mean log-probability of the tokens."""
        return self._answer.logprob / max(1, self._answer.tokens)

    @property
    def finished(self) -> FinishReason:
        """Return why a whole answer has ended."""
        assert self.reason is not None, "the answer ended without a finish reason"
        return self.reason

    async def deltas(self, submit: Submit) -> AsyncGenerator[list[AnswerDelta]]:
        """Yield the answer, each time all deltas since the last one.

        A choice that shares its prompt is submitted when the prompt's KV can be reused.
        """
        if self.handle is None:
            assert self.after is not None, "a choice of its own is submitted at once"
            assert self.after.handle is not None, "choices come in order"
            await self.after.handle.prefill_over.wait()
            self.handle = submit(self.spec)
        async with self.handle:
            while self.reason is None and (tokens := await self.handle.pending()):
                deltas = self._answer.push_all(tokens)
                self.reason = deltas[-1].finish_reason if deltas else None
                if self._answer.stopped:
                    self.handle.cancel("stop")
                if self.reason is not None and self._explains:
                    await self.handle.wait_for_dropped_mass()
                if deltas:
                    yield deltas
                if self._answer.cancelled:
                    raise Cancelled("the request was cancelled by the server")
        if self.reason is None:
            raise Cancelled("the request ended without an answer")


def _splitter(options: AnswerOptions) -> Splitter | None:
    """Return what finds reasoning and calls in an answer; None if it may have neither."""
    if options.reasoning == "harmony":
        calls = options.tool_format == "harmony"
        return HarmonyParts(calls=calls, parallel=options.parallel_calls)
    if options.tool_format is None and options.reasoning == "none":
        return None
    return AnswerParts(
        tool_format=options.tool_format,
        reasoning=options.reasoning,
        parallel=options.parallel_calls,
    )


class AnswerText:
    """Assembles one answer; push tokens until a delta has a finish reason, or `cancelled`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        min_tokens: int,
        skip_special: bool,
        index: int = 0,
        include_stop: bool = False,
        begins_with: str = "",
        parts: Splitter | None = None,
        include_reasoning: bool = True,
    ) -> None:
        """Args:
        index: of the choice.
        include_stop: the text ends with the stop string that ended it.
        begins_with: text before that of the first token.
        parts: finds reasoning and calls; None for an answer that is text.
        include_reasoning: False leaves the reasoning out.
        """
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special)
        self._stop = StopStrings(stop, include=include_stop)
        self._min_tokens = min_tokens
        self._index, self._begins_with = index, begins_with
        self._parts, self._include_reasoning = parts, include_reasoning
        self.logprob = 0.0
        """Sum of the tokens' log-probabilities, where they are known."""
        self._characters = len(begins_with)
        """Characters of the answer so far, including withheld ones."""
        self.tokens = 0
        """Tokens sampled so far, including a final end-of-sequence token."""
        self.reasoning_tokens = 0
        """Those of them that are reasoning, with its marks."""
        self._ended = False
        """The call that was wanted is complete."""
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
        if self._begins_with:
            text, self._begins_with = self._begins_with + text, ""
        logprob = None
        if token.logprob is not None:
            self.logprob += token.logprob
            logprob = self._logprob(token, token.logprob, offset)
        if self._parts is None:
            parts: Sequence[Part] = (Part("content", text),)
        else:
            parts, reason = self._split(self._parts, text, reason)
        return AnswerDelta(
            parts, self.tokens, reason, logprob, self._index, self._stop.string or None
        )

    def _split(
        self, splitter: Splitter, text: str, reason: FinishReason | None
    ) -> tuple[Sequence[Part], FinishReason | None]:
        """Return the parts of some text, and why the answer ends with it."""
        before = splitter.in_reasoning
        parts = splitter.push(text)
        self.reasoning_tokens += before or splitter.in_reasoning
        if splitter.ended and reason is None:
            self._ended = True
            reason = "stop"
        if reason is not None:
            parts += splitter.flush()
            if splitter.calls and reason == "stop":
                reason = "tool_calls"
        if not self._include_reasoning:
            parts = [part for part in parts if part.kind != "reasoning"]
        return parts, reason

    @property
    def stopped(self) -> bool:
        """Return whether the text has ended the answer, while the ranks still sample tokens."""
        return self._stop.found or self._ended

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
        spell = partial(text_logprob, self._tokenizer)
        top = (spell(entry.token, entry.logprob) for entry in token.top_logprobs)
        sampled = spell(token.token, logprob)
        return replace(sampled, offset=offset, top=tuple(top))


class StopStrings:
    """Finds stop strings in the text of one answer, across token boundaries.

    Text that may be the beginning of a stop string is withheld until more text decides. An answer
    ends at the first character that completes a stop string, however its text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Args:
        include: a stop string that is found is shown.
        """
        self._stops = [_StopString(stop) for stop in stops]
        self._include = include
        self._withheld = ""
        self.found = False
        """A stop string was found; nothing more is returned."""
        self.string = ""
        """Stop string that was found."""

    def push(self, text: str) -> str:
        """Return the text that can be shown after `text`."""
        if self.found or not self._stops:
            return "" if self.found else text
        ends = [(end, stop) for stop in self._stops if (end := stop.push(text)) is not None]
        text, before = self._withheld + text, len(self._withheld)
        if ends:
            first = min(end for end, _ in ends)
            longest = max(stop.length for end, stop in ends if end == first)
            self.string = text[before + first - longest : before + first]
            self.found, self._withheld = True, ""
            return text[: before + first - (0 if self._include else longest)]
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

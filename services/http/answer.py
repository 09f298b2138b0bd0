"""From drawn tokens to what a client reads: text, log-probabilities, the reason for the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from csps.models.tokenizer import Detokenizer, Tokenizer
from csps.protocols.openai_responses import FinishReason, TextLogprob
from csps.protocols.tokens import TokenDrawn
from csps.services.http.stop_strings import StopStrings


class Piece(NamedTuple):
    """What one token added to an answer. A tuple, because one is made for every token."""

    text: str
    """Empty in the middle of a character, or while it may turn out to be a stop string."""
    tokens: int
    """Of the answer with this one, a final end-of-sequence token included."""
    finish_reason: FinishReason | None = None
    logprob: TextLogprob | None = None


class Answer:
    """Assembles one answer; push tokens until a piece has a finish reason, or `cancelled`."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str], min_tokens: int, skip_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special)
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._characters = 0
        """Of the answer so far, those that may turn out to be a stop string included."""
        self.tokens = 0
        """Tokens drawn so far, a final end-of-sequence token included."""
        self.cancelled = False
        """The server gave the request up."""

    def push_all(self, tokens: Sequence[TokenDrawn]) -> list[Piece]:
        """Take tokens in that have come together; what is behind the answer's end is dropped."""
        pieces: list[Piece] = []
        for token in tokens:
            if token.finish_reason == "cancelled":
                self.cancelled = True
                break
            pieces.append(piece := self.push(token))
            if piece.finish_reason is not None:
                break
        return pieces

    def push(self, token: TokenDrawn) -> Piece:
        """Take the next token in."""
        self.tokens += 1
        offset = self._characters
        text, reason = self._shown(token)
        logprob = None if token.logprob is None else self._logprob(token, token.logprob, offset)
        return Piece(text, self.tokens, reason, logprob)

    @property
    def stopped(self) -> bool:
        """A stop string ended the answer, while the engine still draws tokens."""
        return self._stop.found

    def _shown(self, token: TokenDrawn) -> tuple[str, FinishReason | None]:
        # A token that ends the answer is a signal and not a part of it.
        text = "" if token.finish_reason == "stop" else self._detokenizer.push(token.token)
        if token.finish_reason is not None:
            text += self._detokenizer.flush()
        self._characters += len(text)
        # Before `min_tokens` no stop string counts, as the client asked.
        if self.tokens > self._min_tokens:
            text = self._stop.push(text)
        if self._stop.found:
            return text, "stop"
        if token.finish_reason is not None:
            text += self._stop.flush()
        return text, token.finish_reason  # type: ignore[return-value]  # "cancelled" cannot be here

    def _logprob(self, token: TokenDrawn, logprob: float, offset: int) -> TextLogprob:
        top = (self._text_logprob(entry.token, entry.logprob) for entry in token.top_logprobs)
        drawn = self._text_logprob(token.token, logprob)
        return replace(drawn, offset=offset, top=tuple(top))

    def _text_logprob(self, token: int, logprob: float) -> TextLogprob:
        token_bytes = self._tokenizer.token_bytes(token)
        # As OpenAI has it, a token that is no text reads `\xf0\x9f`. U+FFFD would make all such
        # tokens the same, and of alternatives with the same text a completion shows only one.
        text = token_bytes.decode(errors="backslashreplace")
        return TextLogprob(token=text, token_bytes=token_bytes, logprob=logprob)

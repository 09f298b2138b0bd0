"""The parts of an answer in OpenAI's harmony format, which gpt-oss writes.

An answer is a row of messages, each with a header. `<|channel|>analysis<|message|>` begins
reasoning, `<|channel|>final<|message|>` the text, and a message of the channel `commentary` with
the recipient `functions.NAME` is a call. One without a recipient is said to the user, too.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from csps.models.tokenizers.grammar import json_rule, lark_grammar, literal
from csps.protocols.openai.responses import Part

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
"""Marks behind a message. A model that forgets one begins the next message."""
_LONGEST_HEADER = 512
"""Characters after which the header of a message is just text."""
_ROLE = "assistant"
_HEADER_WORDS = (CHANNEL, _ROLE, "to=", MESSAGE)
"""Words with which headers begin."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_Kind = Literal["content", "reasoning", "arguments"]


def writes_harmony(template: str) -> bool:
    """Return whether a chat template writes the format."""
    return CHANNEL in template and MESSAGE in template


def harmony_calls_grammar(functions: Sequence[dict[str, Any]]) -> str:
    """Return the grammar of an answer that calls one of these functions, perhaps after reasoning.

    Args:
        functions: each with `name` and, as a JSON schema, `parameters`.
    """
    names = [f"f{number}" for number in range(len(functions))]
    rules = [
        f"{name}: <|channel|> {literal(_header_of(function['name']))} "
        f'<|constrain|> "json" <|message|> '
        f"{json_rule(function.get('parameters') or {'type': 'object'}, as_dumped=True)}"
        for name, function in zip(names, functions, strict=True)
    ]
    return lark_grammar("\n".join([f"start: analysis? ({' | '.join(names)})", ANALYSIS, *rules]))


def _header_of(function: str) -> str:
    return f"commentary to={_FUNCTIONS}{function} "


ANALYSIS = """\
analysis: <|channel|> "analysis" <|message|> THOUGHT <|end|> <|start|> "assistant"
THOUGHT: /(?s:.*)/"""
"""Rules of reasoning before the rest of an answer, whose grammar begins with `analysis?`."""


def in_final_channel(grammar: str) -> str:
    """Return a grammar that has reasoning, and then what `grammar` allows as text."""
    first, *others = json.loads(grammar)["grammars"]
    text = f'start: analysis? <|channel|> "final" <|message|> @answer\n{ANALYSIS}'
    return json.dumps({"grammars": [{"lark_grammar": text}, {**first, "name": "answer"}, *others]})


def with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning where gpt-oss's template reads it."""
    thought = message.get("reasoning_content")
    # The template refuses both beside calls, and shows reasoning before the last text only.
    if thought is None or (message.get("tool_calls") and message["content"]):
        return message
    return {**message, "thinking": thought}


class Splitter(ABC):
    """Splits one answer's text, which comes in pieces, into its parts.

    Text is withheld while it may become something else.
    """

    def __init__(self) -> None:
        self._withheld = ""
        self.calls = 0
        """Calls so far."""
        self.ended = False
        """No more is wanted of the answer."""

    @property
    @abstractmethod
    def in_reasoning(self) -> bool:
        """Return whether the text so far ends within the reasoning."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after some more text."""
        self._withheld += text
        return list(self._parts(last=False))

    def flush(self) -> list[Part]:
        """Return the rest, at the end of the answer."""
        return list(self._parts(last=True))

    @abstractmethod
    def _parts(self, *, last: bool) -> Iterator[Part]:
        """Take what is certain of the withheld text; at the end of the answer, all of it."""


class HarmonyParts(Splitter):
    """Splits text with special tokens. What has no header is text.

    Args:
        calls: the request allows calls; otherwise they are text.
        parallel: False ends the answer after its first call.
    """

    def __init__(self, *, calls: bool, parallel: bool = True) -> None:
        super().__init__()
        self._allowed, self._parallel = calls, parallel
        self._in_header = True
        self._kind: _Kind = "content"
        self._shown: dict[_Kind, int] = {"content": 0, "reasoning": 0, "arguments": 0}
        """Characters of each kind, those of arguments in the call in progress."""
        self._separate = False
        """The message in progress follows another one of its kind."""

    @property
    def in_reasoning(self) -> bool:
        """Return whether the text so far ends within the reasoning."""
        return self._kind == "reasoning" and not self._in_header

    def _parts(self, *, last: bool) -> Iterator[Part]:
        while not self.ended:
            before = self._withheld, self._in_header
            yield from self._header(last) if self._in_header else self._body(last)
            if (self._withheld, self._in_header) == before:
                break
        if self.ended:
            self._withheld = ""
        elif last and not self._in_header:
            yield from self._message_ended()

    def _header(self, last: bool) -> Iterator[Part]:
        """Take the header of a message."""
        text = self._withheld
        if (bare := text.lstrip()).startswith(START):
            self._withheld = text = bare[len(START) :]
        head, mark, body = text.partition(MESSAGE)
        if mark and len(head) <= _LONGEST_HEADER and _begins_header(text):
            self._withheld = body
            yield from self._message_begins(head)
        elif mark or (text and not _may_be_header(text)) or (last and "<|" not in text):
            # The prompt may have had the header.
            self._begin("content")
        elif last:  # the answer was cut within it
            self._withheld = ""

    def _message_begins(self, head: str) -> Iterator[Part]:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        named = recipient[1] if recipient else ""
        if named.startswith(_FUNCTIONS) and self._allowed:
            self._begin("arguments")
            self._shown["arguments"] = 0
            name = named.removeprefix(_FUNCTIONS)
            yield Part("call", name, self.calls, f"call_{secrets.token_hex(12)}")
            return
        # What is meant for tools that the client has not offered is none of its text.
        inner = recipient or (channel and channel[1] == "analysis")
        self._begin("reasoning" if inner else "content")

    def _begin(self, kind: _Kind) -> None:
        self._kind, self._in_header = kind, False
        self._separate = bool(self._shown[kind])

    def _body(self, last: bool) -> Iterator[Part]:
        """Take the text of a message."""
        text = self._withheld
        at, mark = min(
            ((found, mark) for mark in _ENDS if (found := text.find(mark)) >= 0),
            default=(-1, ""),
        )
        if mark:
            yield from self._show(text[:at])
            self._withheld = text[at + (0 if mark == START else len(mark)) :]
            yield from self._message_ended()
            return
        certain = text if last else _certain(text)
        yield from self._show(certain)
        self._withheld = text[len(certain) :]

    def _show(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._separate and self._kind != "arguments":
            text, self._separate = f"\n{text}", False
        self._shown[self._kind] += len(text)
        call = self.calls if self._kind == "arguments" else -1
        yield Part(self._kind, text, call)

    def _message_ended(self) -> Iterator[Part]:
        if self._kind == "arguments":
            if not self._shown["arguments"]:
                yield Part("arguments", "{}", self.calls)
            self.calls += 1
            self.ended = not self._parallel
        self._kind, self._in_header = "content", True


def _begins_header(text: str) -> bool:
    return text.lstrip().startswith(_HEADER_WORDS)


def _may_be_header(text: str) -> bool:
    """Return whether a text without the end of a header may go on to be one."""
    bare = text.lstrip()
    begins = _begins_header(text) or any(word.startswith(bare) for word in (*_HEADER_WORDS, START))
    return begins and len(text) <= _LONGEST_HEADER + len(MESSAGE)


def _certain(text: str) -> str:
    """Return the beginning of a text into which no mark can reach."""
    at = text.rfind("<")
    unsure = at >= 0 and any(mark.startswith(text[at:]) for mark in _ENDS)
    return text[:at] if unsure else text

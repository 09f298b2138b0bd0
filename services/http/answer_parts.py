"""The parts of an answer: reasoning, text, and calls of tools, in the formats that models write.

A chat template shows its model's format, so `tool_format_of` and `reasons` read it there.
`AnswerParts` finds the parts in text that comes token by token, and `calls_grammar` is what an
answer follows that has to call a tool.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from csps.models.tokenizers.grammar import json_rule, lark_grammar, literal
from csps.protocols.openai.responses import Part
from csps.services.http.harmony_parts import Splitter, harmony_calls_grammar, writes_harmony

ToolFormat = Literal["hermes", "llama3", "harmony"]
"""How a model writes calls. "hermes", also Qwen's: `<tool_call>` around JSON with name and
arguments, any number of times. "llama3": the answer is JSON with name and parameters. "harmony":
messages of their own (`harmony_parts`)."""
Reasoning = Literal["none", "maybe", "open", "harmony"]
"""Whether an answer reasons: it may begin with `<think>`, or the prompt ended with that, or it is
in messages of several channels (`harmony_parts`)."""

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MOST_WITHHELD = 64 * 1024
"""Characters after which text that may become a call is just text."""
_LONGEST_HEADER = 512
"""Characters after which an answer that is JSON is no call in Llama's format."""
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_AFTER_ARGUMENTS = re.compile(r"\s*\}?\s*")


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format of calls that a chat template writes; None if it is none of these."""
    if writes_harmony(template):
        return "harmony"
    if CALL in template and '"name"' in template.replace("\\", ""):
        return "hermes"
    if '"parameters"' in template.replace("\\", "") and "ipython" in template:
        return "llama3"
    return None


def reasons(template: str) -> bool:
    """Return whether a chat template knows of reasoning."""
    return END_THINK in template


def reasoning_after(prompt: str) -> Reasoning:
    """Return how the answer to a rendered prompt begins, for a model that reasons."""
    end = prompt.rstrip()
    if end.endswith(END_THINK):  # the template has switched it off
        return "none"
    return "open" if end.endswith(THINK) else "maybe"


def calls_grammar(
    tool_format: ToolFormat, functions: Sequence[dict[str, Any]], *, parallel: bool
) -> str:
    """Return the grammar of an answer that calls some of these functions.

    The calls are written as chat templates write them, so that they stay the same in the history,
    also where a client sends their arguments back as an object.

    Args:
        functions: each with `name` and, as a JSON schema, `parameters`.
        parallel: allow several calls.
    """
    if tool_format == "harmony":
        return harmony_calls_grammar(functions)
    field = "arguments" if tool_format == "hermes" else "parameters"
    names = [f"f{number}" for number in range(len(functions))]
    rules = [
        f"{name}: {literal(_head(function['name'], field))} "
        f"{json_rule(function.get('parameters') or {'type': 'object'}, as_dumped=True)} "
        f"{literal('}')}"
        for name, function in zip(names, functions, strict=True)
    ]
    call = f"({' | '.join(names)})"
    if tool_format == "hermes":
        call = f"{literal(CALL + chr(10))} {call} {literal(chr(10) + END_CALL)}"
    more = f" ({literal(chr(10))} call)*" if parallel and tool_format == "hermes" else ""
    return lark_grammar("\n".join([f"start: call{more}", f"call: {call}", *rules]))


def _head(name: str, field: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{field}": '


class AnswerParts(Splitter):
    """Splits text in the formats of Hermes and Llama 3. What a model began and did not end, or
    wrote wrongly, stays text.

    Args:
        tool_format: None finds no calls.
        parallel: False ends the answer after its first call.
    """

    def __init__(
        self, *, tool_format: ToolFormat | None, reasoning: Reasoning, parallel: bool = True
    ) -> None:
        super().__init__()
        self._format, self._parallel = tool_format, parallel
        self._state = {"none": self._text, "maybe": self._start, "open": self._reasoning}[reasoning]
        self._began = False
        """The part in progress has text."""
        self._scan = _ObjectEnd()

    @property
    def in_reasoning(self) -> bool:
        """Return whether the text so far ends within the reasoning."""
        return self._state == self._reasoning

    def _parts(self, *, last: bool) -> Iterator[Part]:
        """Run the states, each of which takes text until it needs more or another follows."""
        while not self.ended:
            state, before = self._state, len(self._withheld)
            yield from state(last)
            if self._state == state and (not self._withheld or len(self._withheld) == before):
                return
        self._withheld = ""

    # --- the states ---

    def _start(self, last: bool) -> Iterator[Part]:
        """Take the beginning of an answer, which may be `<think>`."""
        text = self._withheld.lstrip()
        if text.startswith(THINK):
            self._withheld = text[len(THINK) :]
            self._state = self._reasoning
        elif last or not THINK.startswith(text):
            self._state = self._text
        yield from ()

    def _reasoning(self, last: bool) -> Iterator[Part]:
        inside, end, behind = self._withheld.partition(END_THINK)
        if not self._began:
            inside = inside.lstrip("\n")
        certain = inside.rstrip("\n") if end or last else _certain(inside, END_THINK)
        if certain:
            self._began = True
            yield Part("reasoning", certain)
        self._withheld = behind if end else inside[len(certain) :] if not last else ""
        if end:
            self._began, self._state = False, self._gap

    def _gap(self, last: bool) -> Iterator[Part]:
        """Drop the empty lines between reasoning and answer."""
        self._withheld = self._withheld.lstrip("\n")
        if self._withheld or last:
            self._state = self._text
        yield from ()

    def _text(self, last: bool) -> Iterator[Part]:
        if self._format == "llama3" and not self._began:
            yield from self._llama3(last)
            return
        if self._format != "hermes":
            yield from self._content(self._withheld)
            self._withheld = ""
            return
        before, call, behind = self._withheld.partition(CALL)
        if self.calls and not self._began:
            before = before.lstrip()
        # The line's end before a call belongs to the call: templates write it there.
        certain = before.rstrip("\n") if call else before if last else _certain(before, CALL)
        if last and self.calls:
            certain = certain.rstrip()
        yield from self._content(certain)
        self._withheld = behind if call else "" if last else before[len(certain) :]
        if call:
            self._state = self._header

    def _content(self, text: str) -> Iterator[Part]:
        if text:
            self._began = True
            yield Part("content", text)

    def _llama3(self, last: bool) -> Iterator[Part]:
        """Take the beginning of an answer that is a call, or is not."""
        text = self._withheld.lstrip()
        if text.startswith(_PYTHON_TAG):
            text = text[len(_PYTHON_TAG) :].lstrip()
        elif not last and _PYTHON_TAG.startswith(text):
            return
        if text.startswith("{"):
            self._withheld, self._state = text, self._header
        elif text or last:
            self._began = bool(text)
            yield from self._content(self._withheld if not self.calls else text)
            self._withheld = ""

    def _header(self, last: bool) -> Iterator[Part]:
        """Take the beginning of a call, up to its arguments."""
        if found := _HEADER.match(self._withheld):
            yield self._call(json.loads(f'"{found[1]}"', strict=False))
            self._withheld = self._withheld[found.end() :]
            self._scan, self._state = _ObjectEnd(), self._arguments
            return
        ended, most = False, _LONGEST_HEADER
        if self._format == "hermes":
            ended, most = END_CALL in self._withheld, _MOST_WITHHELD
        if ended or last or len(self._withheld) > most:
            yield from self._whole_call()

    def _call(self, name: str) -> Part:
        return Part("call", name, self.calls, f"call_{secrets.token_hex(12)}")

    def _whole_call(self) -> Iterator[Part]:
        """Take a call that names its function after its arguments, or is none."""
        inside, _, behind = self._withheld.partition(END_CALL)
        match _object(inside):
            case {"name": str(name), "arguments": dict(arguments)} | {
                "name": str(name),
                "parameters": dict(arguments),
            } if name:
                yield self._call(name)
                yield Part("arguments", json.dumps(arguments, ensure_ascii=False), self.calls)
                self._withheld = behind
                self._call_ended()
            case _:
                yield from self._content(CALL * (self._format == "hermes") + self._withheld)
                self._withheld, self._state = "", self._text

    def _arguments(self, last: bool) -> Iterator[Part]:
        end = self._scan.push(self._withheld)
        taken = len(self._withheld) if end is None else end
        if taken:
            yield Part("arguments", self._withheld[:taken], self.calls)
        self._withheld = self._withheld[taken:]
        if end is not None or last:
            self._state = self._closing

    def _closing(self, last: bool) -> Iterator[Part]:
        """Take what stands behind a call's arguments."""
        text = self._withheld[_AFTER_ARGUMENTS.match(self._withheld).end() :]  # type: ignore[union-attr]
        if self._format == "llama3":
            if text or last:
                self._withheld = text.removeprefix(";")
                self._call_ended()
        elif text.startswith(END_CALL):
            self._withheld = text[len(END_CALL) :]
            self._call_ended()
        elif last or not END_CALL.startswith(text):
            self._withheld = text
            self._call_ended()
        yield from ()

    def _call_ended(self) -> None:
        self.calls += 1
        self.ended = not self._parallel
        self._began, self._state = False, self._text


def _certain(text: str, mark: str) -> str:
    """Return the beginning of a text that a mark, with line ends before it, cannot follow into."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            text = text[:-length]
            break
    return text.rstrip("\n")


def _object(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


class _ObjectEnd:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> int | None:
        """Return where in `text` the object ends, or None if it does not."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None

"""Reasoning and calls of tools in an answer, however its text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from answer_pieces import found_in
from hypothesis import given
from hypothesis import strategies as st

from csps.services.http.answer_parts import AnswerParts, reasoning_after

CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "São \\"x\\" }<"}}\n</tool_call>'
GET = ("get", '{"city": "São \\"x\\" }<"}')


def split(pieces: Sequence[str], **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls."""
    parts = AnswerParts(**{"tool_format": "hermes", "reasoning": "none", **options})
    return found_in(parts, pieces)


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


CASES: list[tuple[str, dict[str, Any], tuple[str, str, list[tuple[str, str]]]]] = [
    ("plain\n\ntext \n", {}, ("", "plain\n\ntext \n", [])),
    (CALL, {}, ("", "", [GET])),
    (f"Let me see.\n{CALL}", {}, ("", "Let me see.", [GET])),
    (f"{CALL}\n{CALL}", {}, ("", "", [GET, GET])),
    (f"{CALL}\n{CALL}", {"parallel": False}, ("", "", [GET])),
    (f"{CALL}\nDone.", {}, ("", "Done.", [GET])),
    ("a <tool_cal b", {}, ("", "a <tool_cal b", [])),
    ("a <tool_call>b</tool_call> c", {}, ("", "a <tool_call>b</tool_call> c", [])),
    (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        {},
        ("", "", [("f", '{"a": 1}')]),
    ),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "cut', {}, ("", "", [("f", '{"a": "cut')])),
    ("<tool_call>\nnothing", {}, ("", "<tool_call>\nnothing", [])),
    (CALL, {"tool_format": None}, ("", CALL, [])),
    ("<think>\nhm\n\n</think>\n\nYes", {"reasoning": "maybe"}, ("hm", "Yes", [])),
    ("\nhm </thin> so\n</think>\n\nYes", {"reasoning": "open"}, ("hm </thin> so", "Yes", [])),
    ("no <think> here", {"reasoning": "maybe"}, ("", "no <think> here", [])),
    ("never ends\n", {"reasoning": "open"}, ("never ends", "", [])),
    (f"<think>\nhm\n</think>\n\n{CALL}", {"reasoning": "maybe"}, ("hm", "", [GET])),
    ("<think>a</think>b", {}, ("", "<think>a</think>b", [])),
    ("", {"reasoning": "maybe"}, ("", "", [])),
    (
        llama("f", '{"a": {"b": 1}}'),
        {"tool_format": "llama3"},
        ("", "", [("f", '{"a": {"b": 1}}')]),
    ),
    (
        f"<|python_tag|>{llama('f', '{}')}; {llama('g', '{}')}",
        {"tool_format": "llama3"},
        ("", "", [("f", "{}"), ("g", "{}")]),
    ),
    ('{"answer": 1}', {"tool_format": "llama3"}, ("", '{"answer": 1}', [])),
    ("{no", {"tool_format": "llama3"}, ("", "{no", [])),
    ("text {", {"tool_format": "llama3"}, ("", "text {", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_parts_do_not_depend_on_the_pieces(
    text: str, options: dict[str, Any], expected: Any
) -> None:
    for pieces in ([text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
        assert split(pieces, **options) == expected


@given(data=st.data())
def test_parts_do_not_depend_on_random_pieces(data: st.DataObject) -> None:
    text, options, expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    assert split(pieces, **options) == expected


fragments = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "{", '"name"', "a ", "}"]
)


@given(
    text=st.lists(fragments, max_size=8).map("".join),
    size=st.integers(1, 5),
    reasoning=st.sampled_from(["none", "maybe", "open"]),
    tool_format=st.sampled_from([None, "hermes", "llama3"]),
)
def test_any_text_gives_the_same_parts_piece_by_piece(
    text: str, size: int, reasoning: Any, tool_format: Any
) -> None:
    options = {"reasoning": reasoning, "tool_format": tool_format}
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert split(pieces, **options) == split([text], **options)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parts = AnswerParts(tool_format="hermes", reasoning="none")
    assert [part.text for part in parts.push("abc <too")] == ["abc "]
    assert [part.text for part in parts.push("th")] == ["<tooth"]
    (call, begun) = parts.push('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert (call.kind, begun.text) == ("call", '{"a": "lo')
    assert [part.text for part in parts.push("ng")] == ["ng"]


def test_a_long_answer_takes_linear_time() -> None:
    """A call of a megabyte, token by token, is not copied again and again."""
    parts = AnswerParts(tool_format="hermes", reasoning="none")
    head = '<tool_call>\n{"name": "write", "arguments": {"text": "'
    pieces = [head, *["abcd" for _ in range(250_000)], '"}}\n</tool_call>']
    total = sum(len(part.text) for piece in pieces for part in parts.push(piece))
    assert total > 1_000_000
    assert parts.calls == 1


def test_how_an_answer_begins_shows_at_the_end_of_the_prompt() -> None:
    assert reasoning_after("<assistant>\n<think>\n") == "open"
    assert reasoning_after("<assistant>\n<think>\n\n</think>\n\n") == "none"
    assert reasoning_after("<assistant>\n") == "maybe"


def test_arguments_are_json_as_the_model_wrote_it() -> None:
    _, _, ((_, arguments),) = split([CALL])
    assert json.loads(arguments) == {"city": 'São "x" }<'}

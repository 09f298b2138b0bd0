"""The channels of harmony in an answer, however its text is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from agent_checkpoints import CLOCK, WEATHER
from answer_pieces import Found, found_in
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import make_tokenizer

from csps.models.tokenizers.grammar import Grammars, json_grammar
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.http.answer_parts import calls_grammar, tool_format_of
from csps.services.http.harmony_parts import HarmonyParts, in_final_channel

ANALYSIS = "<|channel|>analysis<|message|>We need <b> 1 < 2.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes: a <| b."
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
    '{"city": "<Oslo>"}<|call|>'
)
GET = ("get", '{"city": "<Oslo>"}')
CASES: list[tuple[str, dict[str, Any], Found]] = [
    (ANALYSIS + FINAL, {}, ("We need <b> 1 < 2.", "Yes: a <| b.", [])),
    (ANALYSIS + CALL.removesuffix("<|call|>"), {}, ("We need <b> 1 < 2.", "", [GET])),
    (f"{CALL}{CALL}", {}, ("", "", [GET, GET])),
    (f"{CALL}{CALL}", {"parallel": False}, ("", "", [GET])),
    (
        "<|channel|>commentary<|message|>I look.<|end|>" + CALL,
        {},
        ("", "I look.", [GET]),
    ),
    # the recipient in the role's place, as templates write it
    (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        {},
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        f"{ANALYSIS}<|start|>assistant{ANALYSIS}",
        {},
        ("We need <b> 1 < 2.\nWe need <b> 1 < 2.", "", []),
    ),
    (CALL, {"calls": False}, ('{"city": "<Oslo>"}', "", [])),
    ("plain <text>", {}, ("", "plain <text>", [])),
    ("<|channel|>final<|message|>a<|return|>", {}, ("", "a", [])),
    ("<|channel|>final<|message|>a <|e", {}, ("", "a <|e", [])),
    # cut within a header
    (f"{ANALYSIS}<|start|>assistant<|chan", {}, ("We need <b> 1 < 2.", "", [])),
    ("<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", {},
     ("", "a\nb", [])),
    ("<|channel|>commentary to=functions.f<|message|>", {}, ("", "", [("f", "{}")])),
    ("<|start|><|start|>x<|message|>b<|start|>", {}, ("", "x<|message|>b", [])),
    ("", {}, ("", "", [])),
]  # fmt: skip


def split(pieces: list[str], **options: Any) -> Found:
    """Return reasoning, content and calls."""
    parts = HarmonyParts(**{"calls": True, **options})
    return found_in(parts, pieces)


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_parts_do_not_depend_on_the_pieces(
    text: str, options: dict[str, Any], expected: Found
) -> None:
    for size in (len(text) or 1, 1, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert split(pieces, **options) == expected


RECORDED = json.loads(Path(__file__).with_name("harmony_messages.json").read_text("utf-8"))
"""What `parse_messages_from_completion_tokens` of openai-harmony 0.0.8 found in answers."""


@pytest.mark.parametrize("answer", RECORDED)
def test_parts_are_those_of_openai_harmony(answer: dict[str, Any]) -> None:
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, str]] = []
    for message in answer["messages"]:
        recipient = message["recipient"] or ""
        if recipient.startswith("functions."):
            calls.append((recipient.removeprefix("functions."), message["text"]))
        elif recipient or message["channel"] == "analysis":
            reasoning.append(message["text"])
        else:
            content.append(message["text"])
    assert split([answer["text"]]) == ("\n".join(reasoning), "\n".join(content), calls)


FRAGMENTS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "assistant", " to="]


@given(data=st.data())
def test_any_text_gives_the_same_parts_piece_by_piece(data: st.DataObject) -> None:
    """And ends: no text makes the states run in a circle."""
    words = [*FRAGMENTS, "functions.f", "analysis", "final", "commentary", "<|", "a ", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    assert split(pieces) == split([text])


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parts = HarmonyParts(calls=True)
    assert not parts.push("<|channel|>final<|mess")
    assert [part.text for part in parts.push("age|>abc <|en")] == ["abc "]
    assert [part.text for part in parts.push("tity")] == ["<|entity"]
    call, begun = parts.push("<|end|>" + CALL.partition("<Oslo")[0])
    assert (call.kind, begun.text) == ("call", '{"city": "')


MARKS = [f"<|{word}|>" for word in ("channel", "message", "start", "end", "call", "constrain")]


def random_answer(folder: Path, grammar: str, seed: int) -> str:
    """Return an answer of tokens that the grammar allows; it ends as soon as it may."""
    tokenizer, random = Tokenizer(folder), np.random.default_rng(seed)
    state = Grammars(folder, tokenizer.highest_id + 1).state(grammar)
    tokens: list[int] = []
    while not state.complete:
        allowed = np.flatnonzero(np.unpackbits(state.allowed(()), bitorder="little"))
        marks = allowed[allowed >= tokenizer.highest_id + 1 - len(MARKS)]
        # Marks are few among the tokens, and without them reasoning would go on and on.
        if len(marks) and random.random() < 0.3:
            allowed = marks
        tokens.append(int(random.choice(allowed)))
        state.advance(tokens[-1])
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer that has the format's special tokens."""
    path = tmp_path_factory.mktemp("harmony")
    tokenizer: Any = make_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_follow_the_schemas_of_their_functions(folder: Path, seed: int) -> None:
    functions = [tool["function"] for tool in (WEATHER, CLOCK)]
    answer = random_answer(folder, calls_grammar("harmony", functions, parallel=True), seed)
    _, content, ((name, arguments),) = split([answer])
    assert not content
    (schema,) = [each["parameters"] for each in functions if each["name"] == name]
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_bounds_the_final_channel_alone(folder: Path, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    answer = random_answer(folder, in_final_channel(json_grammar(schema)), seed)
    _, content, calls = split([answer])
    assert not calls
    jsonschema.validate(json.loads(content), schema)


def test_a_template_shows_the_format() -> None:
    assert tool_format_of("<|start|>assistant<|channel|>final<|message|>") == "harmony"

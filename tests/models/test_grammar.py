"""Grammars: every random answer that follows one is as its schema, expression or list says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from tiny_checkpoints import EOS, make_tokenizer

from csps.models.network.checkpoint_json import InvalidTextError
from csps.models.tokenizers.grammar import (
    Grammars,
    GrammarState,
    after_reasoning,
    any_grammar,
    choice_grammar,
    json_grammar,
    json_rule,
    lark_grammar,
    regex_grammar,
)
from csps.models.tokenizers.tokenizer import Tokenizer

VOCAB = 272
LONGEST = 2000
WORD = {"enum": ["Ann", "Zoë"]}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {
                "type": "array",
                "items": {"enum": ["a", "né", 'q"']},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {
        "anyOf": [
            {"type": "null"},
            {"type": "boolean"},
            {"const": {"x": [1, 2]}},
            {"type": "string", "pattern": "^[a-f]{2,5}$"},
        ]
    },
    {
        "$defs": {"leaf": {"type": "integer", "minimum": -9, "maximum": 9}},
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"$ref": "#/$defs/leaf"}},
        "required": ["l"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def allowed_tokens(state: GrammarState, ends: Sequence[int]) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(state.allowed(ends), bitorder="little"))


def answer(grammars: Grammars, tokenizer: Tokenizer, grammar: str, seed: int) -> str:
    """Return a random answer, each of whose tokens is one that the grammar allows."""
    (end,) = tokenizer.eos_token_ids
    generator = np.random.default_rng(seed)
    state, tokens = grammars.state(grammar), list[int]()
    while len(tokens) < LONGEST:
        token = int(generator.choice(allowed_tokens(state, [end])))
        if token == end:
            return tokenizer.decode(tokens)
        tokens.append(token)
        state.advance(token)
    raise AssertionError("the answer does not end")


@pytest.mark.parametrize("schema", SCHEMAS)
def test_random_answers_validate(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    for seed in range(20):
        shown = answer(grammars, tokenizer, json_grammar(schema), seed)
        jsonschema.validate(json.loads(shown), schema)


def test_random_answers_are_as_python_writes_them(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rule = json_rule(
        {**SCHEMAS[0], "properties": {**SCHEMAS[0]["properties"], "name": WORD}}, as_dumped=True
    )
    for seed in range(10):
        shown = answer(grammars, tokenizer, lark_grammar(f"start: {rule}"), seed)
        assert shown == json.dumps(json.loads(shown), ensure_ascii=False)


def test_random_answers_match_an_expression_or_are_a_choice(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    words = ["yes", "no", 'né "q"\n🙂']
    for seed in range(20):
        assert re.fullmatch(
            "[a-c]{2,4}(x|y)", answer(grammars, tokenizer, regex_grammar("[a-c]{2,4}(x|y)"), seed)
        )
        assert answer(grammars, tokenizer, choice_grammar(words), seed) in words


@pytest.mark.parametrize("text", ['start: "x" /[0-9]{1,3}/', 'root ::= "x" [0-9] [0-9]?'])
def test_grammars_of_both_syntaxes(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    for seed in range(5):
        assert re.fullmatch("x[0-9]+", answer(grammars, tokenizer, any_grammar(text), seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_state_is_a_function_of_the_tokens(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    """What a retry or another rank rebuilds allows the same, wherever the answer was cut."""
    grammar = json_grammar(SCHEMAS[0])
    tokens = tokenizer.encode(answer(grammars, tokenizer, grammar, seed), add_special_tokens=False)
    ends = tokenizer.eos_token_ids
    one_by_one = grammars.state(grammar)
    for at, token in enumerate([*tokens, None]):
        expected = grammars.state(grammar, tokens[:at]).allowed(ends)
        assert (one_by_one.allowed(ends) == expected).all()
        if token is not None:
            one_by_one.advance(token)
    assert one_by_one.complete


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_comes_before_what_a_grammar_allows(
    grammars: Grammars, tokenizer: Tokenizer, begun: bool
) -> None:
    grammar = after_reasoning(json_grammar({"type": "integer"}), begun=begun)
    text = "so { x </b>\n</think>\n\n12"
    allowed = text if begun else f"<think>{text}"
    state = grammars.state(grammar, tokenizer.encode(allowed, add_special_tokens=False))
    assert state.complete
    if not begun:
        assert grammars.state(grammar, tokenizer.encode("7", add_special_tokens=False)).complete
    with pytest.raises(InvalidTextError):
        grammars.state(grammar, tokenizer.encode(f"{allowed}x", add_special_tokens=False))


def test_an_end_is_allowed_only_where_the_grammar_may_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = regex_grammar("ab?")
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.token_bytes(end).decode() == EOS
    allowed = [
        set(allowed_tokens(grammars.state(grammar, tokens), [end])) for tokens in ([], [a], [a, b])
    ]
    assert allowed == [{a}, {b, end}, {end}]
    assert set(allowed_tokens(grammars.state(grammar, [a]), [])) == {b}
    # A stop token that is text is allowed as the grammar has it, too.
    assert set(allowed_tokens(grammars.state(grammar), [a, end])) == {a}


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "strange"}),
        json_grammar({"$ref": "#/nowhere"}),
        regex_grammar("(a"),
        lark_grammar("start: other"),
        "no grammar",
    ],
)
def test_what_cannot_be_followed_is_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidTextError):
        grammars.check(grammar)

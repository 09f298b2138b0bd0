"""Needle prompts: reproducible, of exact length, with every fact where it is said to be."""

import json
import random
import re
from dataclasses import replace
from itertools import islice

import pytest

from csps.models.needle_prompts.__main__ import main
from csps.models.needle_prompts.filler import (
    CYRILLIC,
    FILLER_KINDS,
    Filler,
    FillerKind,
    filler_of,
    filler_sentences,
    real_text,
)
from csps.models.needle_prompts.haystack import KINDS, ORDERS, Kind, Order, is_correct
from csps.models.needle_prompts.prompt import NeedleConfig, NeedlePrompt, generate
from csps.models.needle_prompts.words import KEYS, VALUES, count_words, split_words, vocabulary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [128, 129, 511, 4096])
def test_length_is_exact_in_words(kind: Kind, length: int) -> None:
    prompt = generate(NeedleConfig(length=length, kind=kind, seed=length))
    assert prompt.tokens == length
    assert count_words(prompt.text) == length


@pytest.mark.parametrize("kind", KINDS)
def test_spans_hold_the_needles(kind: Kind) -> None:
    prompt = generate(NeedleConfig(length=600, kind=kind, needles=6, seed=3))
    words = split_words(prompt.text)
    for needle in prompt.haystack.needles:
        sentence = f"The password of {needle.key} is {needle.value}."
        assert prompt.text[slice(*needle.chars)].strip() == sentence
        assert "".join(words[slice(*needle.words)]).strip() == sentence


def test_same_config_same_prompt_and_other_seed_other_prompt() -> None:
    config = NeedleConfig(length=300, seed=7)
    assert generate(config) == generate(config)
    assert generate(config).text != generate(NeedleConfig(length=300, seed=8)).text


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_needle_lies_at_its_depth(depth: float) -> None:
    prompt = generate(NeedleConfig(length=4096, depth=depth, seed=1))
    assert prompt.asked[0].depth == pytest.approx(depth, abs=0.02)


def test_depth_does_not_move_distractors_to_the_same_place() -> None:
    prompt = generate(NeedleConfig(length=4096, needles=20, depth=0.5, seed=2))
    assert len({needle.words for needle in prompt.haystack.needles}) == 20


def answer_by_reading(prompt: NeedlePrompt) -> str:
    """Return the answer as a careful reader finds it, by regular expressions alone."""
    facts = dict(re.findall(r"The password of (\w+) is (\w+)\.", prompt.text))
    question = prompt.question.text
    if hop := re.search(r"password of the password of (\w+)", question):
        key = facts[hop[1]]
        return f"{key} is {facts[key]}"
    if several := re.search(r"passwords of (.*)\?", question):
        keys = re.findall(r"[A-Z]\w+", several[1])
        return ", ".join(f"{key} is {facts[key]}" for key in keys)
    key = re.findall(r"password of (\w+)", question)[0]
    return facts[key]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filler", FILLER_KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_answer_can_be_read_from_the_text(kind: Kind, filler: FillerKind, order: Order) -> None:
    config = NeedleConfig(length=500, kind=kind, needles=5, filler=filler, order=order)
    for seed in range(3):
        prompt = generate(replace(config, seed=seed), count_words)
        assert answer_by_reading(prompt) == prompt.answer
        assert prompt.text.startswith("Question: ") == (order == "first")
        assert prompt.text.endswith("\nAnswer:")
        assert prompt.question.text.strip() in prompt.chat_text
        assert 480 <= prompt.tokens <= 500


def stream_text(filler: Filler, seed: int, sentences: int) -> str:
    found = islice(filler(random.Random(seed)), sentences)
    return "".join(word for sentence in found for word in sentence)


TALE = "One was here. Two (or three) came:\n\n  - first, then\n  - second\nNobody stayed"


@pytest.mark.parametrize("seed", range(4))
def test_real_text_goes_round_without_losing_a_character(seed: int) -> None:
    assert TALE in stream_text(real_text(TALE), seed, 20)


def test_every_piece_of_real_text_begins_with_the_space_before_it() -> None:
    """A needle between two pieces is then separated from both."""
    for sentence in islice(filler_of("english")(random.Random(0)), 2000):
        assert sentence[0][0].isspace()


def test_an_empty_text_is_no_filler() -> None:
    with pytest.raises(ValueError, match="empty"):
        real_text(" \n ")


def test_a_long_piece_is_cut_to_fit_the_length() -> None:
    (sentence,) = filler_sentences(random.Random(0), 7, count_words, real_text("a b c d " * 9))
    assert 4 <= len(sentence) <= 7


def test_names_are_sentences_about_keys_and_values() -> None:
    words = set(stream_text(filler_of("names"), 0, 8000).split())
    assert {*KEYS, *VALUES} <= {word.strip(".,") for word in words}


def test_shuffled_words_state_no_fact() -> None:
    text = stream_text(filler_of("shuffled"), 0, 5000)
    assert set(re.findall(r"\w+", text)) >= {"password", "of", "is", *KEYS, *VALUES}
    assert not re.search(r"password of \w+ is", text)


def test_bytes_are_the_english_text_in_other_letters() -> None:
    english, other = (stream_text(filler_of(kind), 3, 50) for kind in ("english", "bytes"))
    assert english.translate(CYRILLIC) == other
    assert not re.search("[A-Za-z]", other)


def test_a_single_needle_is_alone() -> None:
    prompt = generate(NeedleConfig(length=500, kind="single", needles=5))
    assert prompt.haystack.text.count("password") == 1


def test_facts_and_filler_share_no_words() -> None:
    facts = {*KEYS, *VALUES}
    assert len(facts) == len(KEYS) + len(VALUES)
    prompt = generate(NeedleConfig(length=20_000, kind="single"))
    filler = prompt.text.replace(prompt.text[slice(*prompt.asked[0].chars)], "")
    words = set(re.findall(r"\w+", filler))
    assert words & facts == {prompt.asked[0].key}  # the question names the key


def test_generated_text_uses_only_the_vocabulary() -> None:
    known = {*vocabulary(), *".,:?\n"}
    for kind in KINDS:
        text = generate(NeedleConfig(length=3000, kind=kind, seed=5)).text
        assert set(split_words(text)) <= known


def test_a_count_function_of_another_tokenizer_bounds_the_length() -> None:
    def count(text: str) -> int:
        return len(text) // 3

    prompt = generate(NeedleConfig(length=2000, seed=4), count)
    assert prompt.tokens == count(prompt.text)
    assert 1900 <= prompt.tokens <= 2000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "triple"}, "kind must be one of"),
        ({"order": "middle"}, "order must be one of"),
        ({"depth": 1.5}, "between 0 and 1"),
        ({"needles": 0}, "needles must be"),
        ({"kind": "two_hop", "needles": 1}, "at least two"),
    ],
)
def test_impossible_configs_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeedleConfig(**fields)  # type: ignore[arg-type]


def test_too_many_needles_for_the_length_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        generate(NeedleConfig(length=64, needles=20))


@pytest.mark.parametrize(
    ("reply", "correct"),
    [("falcon", True), (" falcon\n", True), ("falcon.", False), ("falconry", False), ("", False)],
)
def test_is_correct(reply: str, correct: bool) -> None:
    assert is_correct("falcon", reply) is correct


def test_command_prints_text_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--length", "200", "--kind", "two_hop", "--seed", "9", "--json"])
    printed = json.loads(capsys.readouterr().out)
    expected = generate(NeedleConfig(length=200, kind="two_hop", seed=9))
    assert (printed["prompt"], printed["answer"]) == (expected.text, expected.answer)
    assert printed["tokens"] == 200
    assert len(printed["needles"]) == 2

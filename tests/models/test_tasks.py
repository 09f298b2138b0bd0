"""Prompts of RULER's categories: reproducible, no longer than asked for, and answered by a reader
that sees their text alone."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from csps.models.needle_prompts.tasks import (
    CATEGORIES,
    EXAMPLES,
    TASK_NAMES,
    TASKS,
    TaskName,
    TaskPrompt,
    named,
    write_prompt,
)
from csps.models.needle_prompts.words import Count, count_words
from csps.services.settings.settings import shipped_models

_NEEDLE = Tokenizer.from_file(str(shipped_models() / "needle" / "tokenizer.json"))
COUNTS: dict[str, Count] = {
    "words": count_words,
    "needle": lambda text: len(_NEEDLE.encode(text, add_special_tokens=False)),
    "bytes": lambda text: len(text.encode()),
    "pieces of four": lambda text: sum(-(-len(word) // 4) for word in re.findall(r"\s?\S+", text)),
}

# --- a reader that knows the questions' words, and nothing of how the prompts are written ---------


def read_answer(prompt: str) -> list[str]:
    """Answer the last question of a prompt from its text."""
    text, question = last_exercise(prompt)
    if found := re.fullmatch(r"What are all passwords of (\w+), in the order .*", question):
        return re.findall(rf"One password of {found[1]} is (\w+)\.", text)
    if found := re.fullmatch(r"Which variables have the value (\d+), .*", question):
        return variables_with(text, found[1])
    if question.startswith("Which three words are most frequent"):
        return [word for word, _ in Counter(text.split()).most_common(3)]
    if found := re.fullmatch(r"(In which city was|In which city does|What does) (.*)\?", question):
        who = re.sub(r" (born|live|own)$", "", found[2])
        if teacher_of := re.fullmatch(r"the teacher of (.*)", who):
            who = only(rf"The teacher of {teacher_of[1]} is (\w+ \w+)\.", text)
        facts = {
            "born": rf"{who} was born in (\w+) and",
            "live": rf"{who} was born in \w+ and lives in (\w+)\.",
            "own": rf"{who} owns one (\w+)\.",
        }
        return [only(facts[found[2].split()[-1]], text)]
    raise AssertionError(f"unknown question {question!r}")


def last_exercise(prompt: str) -> tuple[str, str]:
    """Return text and question of the exercise that has no answer yet."""
    body, cue = prompt.rsplit("\nQuestion: ", 1)
    question, end = cue.split("\nAnswer:")
    assert end == ""
    return body.split("\n\n", 1)[-1], question


def variables_with(text: str, value: str) -> list[str]:
    """Run the assignments one after another."""
    memory: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        memory[name] = memory.get(source, source)
    return [name for name, held in memory.items() if held == value]


def only(pattern: str, text: str) -> str:
    """Return the group of the pattern's one match."""
    (found,) = re.findall(pattern, text)
    return str(found)


# --- properties ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    task=st.sampled_from(TASK_NAMES),
    counted_in=st.sampled_from(list(COUNTS)),
    length=st.integers(900, 5000),
    seed=st.integers(0, 10**9),
)
def test_a_reader_of_the_text_finds_the_answer(
    task: TaskName, counted_in: str, length: int, seed: int
) -> None:
    count = COUNTS[counted_in]
    # A token of a few characters holds less text.
    length *= 4 if counted_in == "bytes" else 1
    prompt = write_prompt(task, length, seed, count)
    assert read_answer(prompt.text) == list(prompt.answers)
    assert prompt.answer == ", ".join(prompt.answers)
    assert length * 0.97 - 20 <= count(prompt.text) == prompt.tokens <= length
    assert prompt == write_prompt(task, length, seed, count)
    assert prompt.text != write_prompt(task, length, seed + 1, count).text


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_long_prompt_is_answered_as_well(task: TaskName) -> None:
    prompt = write_prompt(task, 65_536, 1)
    assert read_answer(prompt.text) == list(prompt.answers)
    assert 63_000 <= prompt.tokens <= 65_536


@pytest.mark.parametrize("task", TASK_NAMES)
def test_too_short_a_prompt_is_an_error(task: TaskName) -> None:
    with pytest.raises(ValueError, match=r"fit into -?\d+ tokens"):
        write_prompt(task, 60, 0)


def test_there_is_a_task_of_each_category() -> None:
    assert {task.category for task in TASKS.values()} == set(CATEGORIES)
    assert set(TASKS) == set(TASK_NAMES)


# --- what makes the answers hard -----------------------------------------------------------------


def prompts(task: TaskName, number: int = 12) -> list[TaskPrompt]:
    return [write_prompt(task, 1500, seed) for seed in range(number)]


def test_other_keys_variables_and_people_could_be_mistaken_for_those_asked_for() -> None:
    for prompt in prompts("multi_value"):
        text, _ = last_exercise(prompt.text)
        assert len(prompt.answers) == 3
        assert len(set(re.findall(r"One password of (\w+)", text))) == 4
    for prompt in prompts("variables"):
        text, _ = last_exercise(prompt.text)
        assert len(prompt.answers) == 4
        assert len(re.findall(r"VAR \w+ =", text)) == 12
    for prompt in prompts("one_passage"):
        text, question = last_exercise(prompt.text)
        first = re.findall(r"\n?(\w+) \w+ was born", text)
        assert len(set(first)) < len(first) >= 4, "some share a name"
        assert question.count("teacher") == 0
    for prompt in prompts("two_passages"):
        _, question = last_exercise(prompt.text)
        assert question.count("teacher") == 1


def test_answers_lie_anywhere_in_the_text() -> None:
    """Not all in the last SPT, which sparse attention always sees."""

    def depth(task: TaskName, seed: int) -> float:
        prompt = write_prompt(task, 2000, seed)
        text, _ = last_exercise(prompt.text)
        return text.index(prompt.answers[0]) / len(text)

    for task in ("multi_value", "variables", "one_passage"):
        depths = [depth(task, seed) for seed in range(40)]
        assert min(depths) < 0.2
        assert max(depths) > 0.6 or task == "variables"


@pytest.mark.parametrize("task", ["common_words", "frequent_words"])
def test_the_most_frequent_words_stand_out_in_their_order(task: TaskName) -> None:
    for prompt in prompts(task):
        text, _ = last_exercise(prompt.text)
        *first, fourth = [often for _, often in Counter(text.split()).most_common(4)]
        assert sorted(set(first), reverse=True) == first
        assert first[-1] > fourth


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_worked_examples_are_right_and_give_nothing_away(task: TaskName) -> None:
    example = EXAMPLES[task].removesuffix("\n\n")
    asked, _, answer = example.rpartition("\nAnswer: ")
    assert read_answer(f"{asked}\nAnswer:") == answer.split(", ")
    for prompt in prompts(task):
        assert prompt.text.startswith(EXAMPLES[task])
        assert not set(prompt.answers) & set(re.findall(r"\w+", asked.split("\nQuestion")[0]))


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        ("falcon, agate", 1.0),
        (" They are Agate and Falcon.", 1.0),
        ("falcon", 0.5),
        ("falcons, agates", 0.0),
        ("", 0.0),
    ],
)
def test_a_reply_is_scored_by_the_answers_that_it_names(reply: str, share: float) -> None:
    assert named(reply, ("falcon", "agate")) == share

"""`csps eval`: what is asked, how it is scored, and what dropped tokens do."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch

from csps.models.needle_prompts.haystack import Haystack
from csps.models.needle_prompts.questions import KINDS, Kind, Question
from csps.services import eval_command
from csps.services.evaluation.cases import Evaluation, cases
from csps.services.evaluation.local_answerer import LocalAnswerer
from csps.services.evaluation.local_model import LocalModel
from csps.services.evaluation.scores import accuracy, evaluate, summary
from csps.services.evaluation.sensitivity import sensitivity
from csps.services.evaluation.server_answerer import ServerAnswerer


def read_answer(prompt: str) -> str:
    """The answer to a question for one needle, as a reader finds it."""
    facts = dict(re.findall(r"The password of (\w+) is (\w+)\.", prompt))
    return facts[re.findall(r"password of (\w+)\?", prompt)[-1]]


class Reader:
    """Answers right, or wrong in the second half of the text."""

    def __init__(self, *, forgetful: bool = False) -> None:
        self.forgetful = forgetful

    def answers(self, haystack: Haystack, questions: Sequence[Question]) -> list[str]:
        right = [read_answer(haystack.text + question.text) for question in questions]
        if not self.forgetful:
            return right
        depths = [haystack.needles[question.needles[0]].depth for question in questions]
        return [a if depth < 0.5 else "unknown" for a, depth in zip(right, depths, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1, 5])
def test_every_prompt_has_the_length_asked_for(kind: Kind, share: int) -> None:
    asked = list(cases(Evaluation(questions=10, share=share), kind, 512))
    assert len(asked) == 10 // share
    for case in asked:
        longest = max(len(case.haystack.text + q.completion_text) for q in case.questions)
        assert longest > 512
        assert case.haystack.tokens < 512
        assert {q.kind for q in case.questions} == {kind}


@pytest.mark.parametrize("share", [1, 4])
def test_depths_cover_the_text_evenly(share: int) -> None:
    evaluation = Evaluation(kinds=("multi_key",), lengths=(2048,), questions=20, share=share)
    results = evaluate(evaluation, Reader())
    assert accuracy(results) == 1.0
    bins = [int(one.depth * 5) for one in results]
    assert [bins.count(number) for number in range(5)] == pytest.approx([4] * 5, abs=1)


def test_summary_tells_where_a_model_fails() -> None:
    evaluation = Evaluation(kinds=("multi_key",), lengths=(1024,), questions=20)
    result = summary(evaluate(evaluation, Reader(forgetful=True)))["multi_key"]
    assert result["accuracy_by_length"]["1024"] == pytest.approx(0.5, abs=0.05)
    row = result["accuracy_by_length_and_depth"]["1024"]
    assert (row[0], row[-1]) == (1.0, 0.0)
    assert result["wrong"][0]["reply"] == "unknown"


def test_questions_must_divide_among_haystacks() -> None:
    with pytest.raises(ValueError, match="multiple of share"):
        Evaluation(questions=10, share=3)


def openai_server(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "needle"}]})
    body = json.loads(request.content)
    assert (body["model"], body["temperature"]) == ("needle", 0)
    return httpx.Response(200, json={"choices": [{"text": " " + read_answer(body["prompt"])}]})


def test_a_server_is_asked_greedily_for_its_first_model() -> None:
    client = httpx.Client(transport=httpx.MockTransport(openai_server), base_url="http://test")
    answerer = ServerAnswerer(client, concurrency=2)
    evaluation = Evaluation(kinds=("multi_key",), lengths=(256,), questions=8, share=4)
    assert accuracy(evaluate(evaluation, answerer)) == 1.0


def test_a_failing_server_is_an_error_and_no_wrong_answer() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503)

    client = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://test")
    evaluation = Evaluation(kinds=("multi_key",), lengths=(256,), questions=1)
    with pytest.raises(httpx.HTTPStatusError):
        evaluate(evaluation, ServerAnswerer(client, model="needle"))


@pytest.mark.parametrize(
    "argv",
    [
        ["--base-url", "http://test", "--sensitivity"],
        ["--base-url", "http://test", "--share", "5"],
        ["--kinds", "riddle"],
        ["--questions", "10", "--share", "3"],
    ],
)
def test_contradictory_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        eval_command.parse_arguments(argv)


def test_an_unreachable_server_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_command.main(["--base-url", "http://127.0.0.1:9", "--lengths", "256"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel.load(eval_command.DEFAULT_MODEL)


def test_a_question_behind_a_shared_context_equals_the_whole_prompt(model: LocalModel) -> None:
    (case,) = cases(Evaluation(questions=2, share=2), "multi_key", 300)
    context = model.read(case.haystack.text)
    for question in case.questions:
        ids = model.tokenizer.encode(case.haystack.text + question.completion_text).ids
        with torch.inference_mode():
            whole, _ = model._forward(ids, past=None)
            tail = model.tokenizer.encode(question.completion_text, add_special_tokens=False).ids
            shared, _ = model._forward(tail, past=context)
        torch.testing.assert_close(shared, whole, rtol=1e-3, atol=1e-3)


def test_dropped_tokens_leave_the_others_where_they_are(model: LocalModel) -> None:
    context = model.read("The old pilot returned.")
    dropped = context.without([(1, 3)])
    assert dropped.end == context.end
    assert torch.equal(dropped.keys[0], context.keys[0][[0, 3, 4, 5]])


def test_token_spans_cover_character_spans(model: LocalModel) -> None:
    (case,) = cases(Evaluation(questions=1), "multi_key", 300)
    needles = case.haystack.needles
    spans = model.tokens_of(case.haystack.text, [needle.chars for needle in needles])
    # One special token begins the text.
    assert spans == [(needle.words[0] + 1, needle.words[1] + 1) for needle in needles]


def test_answers_come_from_the_needles(model: LocalModel) -> None:
    table = sensitivity(Evaluation(lengths=(1024,), questions=20, share=10), model)
    assert table["nothing"]["1024"] >= 0.95
    assert table["needle"]["1024"] <= 0.1
    assert table["as much filler"]["1024"] >= 0.95


def test_single_hides_the_other_needles_of_a_shared_haystack(model: LocalModel) -> None:
    evaluation = Evaluation(kinds=("single",), lengths=(512,), questions=10, share=10)
    assert accuracy(evaluate(evaluation, LocalAnswerer(model))) >= 0.9


def test_the_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = ["--lengths", "256", "512", "--questions", "4", "--share", "2"]
    argv += ["--json", str(tmp_path / "eval.json"), "--plot", str(tmp_path / "eval.png")]
    assert eval_command.main(argv) == 0
    written = json.loads((tmp_path / "eval.json").read_text())
    assert set(written["results"]) == {"single", "multi_key"}
    assert written["evaluation"]["lengths"] == [256, 512]
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")

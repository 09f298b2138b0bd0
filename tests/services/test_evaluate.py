"""`csps eval`: what is asked, how it is scored, and what dropped tokens do."""

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from greedy_reference import greedy_tokens
from tiny_checkpoints import make_checkpoint

from csps.cli import main
from csps.configurator.regressors.samples import wilson
from csps.models.needle_prompts.filler import FILLER_KINDS
from csps.models.needle_prompts.haystack import KINDS, ORDERS, Kind, Order
from csps.models.needle_prompts.words import count_words
from csps.services.evaluation import command
from csps.services.evaluation.answerers import LocalAnswerer, ServerAnswerer, client_of, read
from csps.services.evaluation.cases import MAX_ANSWER_TOKENS, Case, Evaluation, cases
from csps.services.evaluation.local_model import LocalModel
from csps.services.evaluation.scores import accuracy, evaluate, sensitivity, summary


def read_answer(prompt: str) -> str:
    """Return the answer to a question for one needle, as a reader finds it."""
    facts = dict(re.findall(r"The password of (\w+) is (\w+)\.", prompt))
    return facts[re.findall(r"password of (\w+)\?", prompt)[-1]]


class Reader:
    """Answers right, or wrong in the second half of the text."""

    def __init__(self, *, forgetful: bool = False) -> None:
        self.forgetful = forgetful

    def answers(self, case: Case) -> list[str]:
        right = [read_answer(case.prompt(question)) for question in case.questions]
        if not self.forgetful:
            return right
        depths = [case.haystack.needles[question.needles[0]].depth for question in case.questions]
        return [a if depth < 0.5 else "unknown" for a, depth in zip(right, depths, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_every_prompt_has_the_length_asked_for(kind: Kind, share: int, order: Order) -> None:
    asked = list(cases(Evaluation(questions=10, share=share, order=order), kind, 512))
    assert len(asked) == 10 // share
    for case in asked:
        assert max(count_words(case.prompt(question)) for question in case.questions) == 512
        assert {q.kind for q in case.questions} == {kind}


@pytest.mark.parametrize("filler", FILLER_KINDS)
def test_real_text_is_as_long_as_a_tokenizer_counts(filler: str, model: LocalModel) -> None:
    evaluation = Evaluation(questions=4, share=2, filler=filler)
    for case in cases(evaluation, "multi_key", 1024, model.count):
        for question in case.questions:
            assert 1000 <= model.count(case.prompt(question)) <= 1024
            assert read_answer(case.prompt(question)) == question.answer


def test_any_text_file_is_a_filler(tmp_path: Path) -> None:
    path = tmp_path / "tale.txt"
    path.write_text("Once there was a quiet harbour. Nobody went there; the boats had gone.")
    evaluation = Evaluation(kinds=("multi_key",), lengths=(256,), questions=2, filler=str(path))
    for case in cases(evaluation, "multi_key", 256):
        assert case.haystack.text.count("quiet harbour") > 1
    assert accuracy(evaluate(evaluation, {"": Reader()})[""]) == 1.0


@pytest.mark.parametrize("order", ORDERS)
def test_a_question_stands_where_it_was_asked_to(order: Order) -> None:
    (case,) = cases(Evaluation(questions=1, order=order), "multi_key", 256)
    prompt = case.prompt(case.questions[0])
    asked = prompt.index("Question: What is the password of")
    assert (asked == 0) == (order == "first")
    assert prompt.endswith("\nAnswer:")
    assert read_answer(prompt) == case.questions[0].answer


@pytest.mark.parametrize("share", [1, 4])
def test_depths_cover_the_text_evenly(share: int) -> None:
    evaluation = Evaluation(kinds=("multi_key",), lengths=(2048,), questions=20, share=share)
    results = evaluate(evaluation, {"": Reader()})[""]
    assert accuracy(results) == 1.0
    bins = [int(answer.depth * 5) for answer in results]
    assert [bins.count(number) for number in range(5)] == pytest.approx([4] * 5, abs=1)


def test_summary_tells_where_a_model_fails() -> None:
    evaluation = Evaluation(kinds=("multi_key",), lengths=(1024,), questions=20)
    (answered,) = evaluate(evaluation, {"": Reader(forgetful=True)}).values()
    result = summary(answered)["multi_key"]
    assert result["accuracy_by_length"]["1024"] == pytest.approx(0.5, abs=0.05)
    low, high = result["interval_by_length"]["1024"]
    assert low < 0.5 < high
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
    assert accuracy(evaluate(evaluation, {"": answerer})[""]) == 1.0


def test_answers_asked_for_in_two_ways_stand_side_by_side() -> None:
    """Ask the same prompts: the sparse way misses what the exact one finds."""

    def sparse_or_exact(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        exact = body["csps"]["attention"] == "exact"
        text = read_answer(body["prompt"]) if exact else "unknown"
        return httpx.Response(200, json={"choices": [{"text": text}]})

    client = httpx.Client(transport=httpx.MockTransport(sparse_or_exact), base_url="http://test")
    servers = {
        name: ServerAnswerer(client, model="needle", extra_body={"csps": {"attention": name}})
        for name in ("exact", "csa")
    }
    evaluation = Evaluation(kinds=("multi_key",), lengths=(256,), questions=4)
    lines: list[str] = []
    results = evaluate(evaluation, servers, lines.append)
    assert [accuracy(answers) for answers in results.values()] == [1.0, 0.0]
    exact, csa = results["exact"], results["csa"]
    assert [answer.expected for answer in exact] == [answer.expected for answer in csa]
    assert "4 of 4 right" in lines[0]
    assert lines[0].endswith("exact")
    assert "0 of 4 right" in lines[1]


def test_the_key_goes_to_the_server_and_the_version_may_stand_in_its_address() -> None:
    client = client_of("http://127.0.0.1:9/v1/", "secret")
    assert client.headers["Authorization"] == "Bearer secret"
    assert str(client.base_url) == "http://127.0.0.1:9"
    assert "Authorization" not in client_of("http://127.0.0.1:9").headers


@pytest.mark.parametrize(("right", "questions"), [(0, 50), (50, 50), (199, 200), (3, 7)])
def test_the_interval_s_ends_are_where_the_share_would_just_be_likely(
    right: int, questions: int
) -> None:
    """Wilson's definition: the ends are 1.96 of *their own* standard deviations away."""
    share = right / questions
    for end in wilson(right, questions):
        if not math.isclose(end, share, abs_tol=1e-9):
            deviation = math.sqrt(end * (1 - end) / questions)
            assert abs(share - end) == pytest.approx(1.959964 * deviation, rel=1e-4)
    low, high = wilson(right, questions)
    assert 0.0 <= low <= share <= high <= 1.0
    assert low < high


def test_a_failing_server_is_an_error_and_no_wrong_answer() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503)

    client = httpx.Client(transport=httpx.MockTransport(refuse), base_url="http://test")
    evaluation = Evaluation(kinds=("multi_key",), lengths=(256,), questions=1)
    with pytest.raises(httpx.HTTPStatusError):
        evaluate(evaluation, {"": ServerAnswerer(client, model="needle")})


@pytest.mark.parametrize(
    "argv",
    [
        ["--base-url", "http://test", "--sensitivity"],
        ["--base-url", "http://test", "--share", "5"],
        ["--base-url", "http://test", "--weight-dtype", "fp8"],
        ["--base-url", "http://test", "--kv-dtype", "int8"],
        ["--kinds", "riddle"],
        ["--questions", "10", "--share", "3"],
        ["--extra-body", '{"csps": {}}'],
        ["--base-url", "http://test", "--extra-body", "[]"],
        ["--base-url", "http://test", "--extra-body", "{"],
        ["--sensitivity", "--question", "first"],
        ["--filler", "/no/such/file"],
    ],
)
def test_contradictory_arguments_are_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse_arguments(argv)
    assert "csps eval: " in capsys.readouterr().err


def test_an_unreachable_server_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--base-url", "http://127.0.0.1:9", "--lengths", "256"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe")
    capsys.readouterr()  # transformers shows its progress
    assert main(["eval", "--model", str(model), "--weight-dtype", "fp8"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("csps: --model: ")
    assert "models without experts only" in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel.load(command.DEFAULT_MODEL)


@pytest.mark.parametrize("order", ORDERS)
def test_a_question_to_a_shared_context_equals_the_whole_prompt(
    model: LocalModel, order: Order
) -> None:
    (case,) = cases(Evaluation(questions=2, share=2, order=order), "multi_key", 300)
    for question, context, needles, cue in read(model, case):
        ids = model.tokenizer.encode(case.prompt(question)).ids
        start, end = needles[question.needles[0]]
        assert question.answer in model.tokenizer.decode(ids[start:end])
        with torch.inference_mode():
            whole, _ = model._forward(ids, past=None)
            tail = model.tokenizer.encode(cue, add_special_tokens=False).ids
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
    table = sensitivity(Evaluation(lengths=(512,), questions=10, share=10), model)
    assert table["nothing"]["512"] >= 0.95
    assert table["needle"]["512"] <= 0.1
    assert table["as much filler"]["512"] >= 0.95


def test_single_hides_the_other_needles_of_a_shared_haystack(model: LocalModel) -> None:
    evaluation = Evaluation(kinds=("single",), lengths=(512,), questions=10, share=10)
    assert accuracy(evaluate(evaluation, {"": LocalAnswerer(model)})[""]) >= 0.9


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("filler", FILLER_KINDS)
def test_the_model_answers_in_other_fillers(model: LocalModel, filler: str, order: Order) -> None:
    evaluation = Evaluation(
        kinds=("multi_key",), lengths=(512,), questions=10, share=5, filler=filler, order=order
    )
    (answered,) = evaluate(evaluation, {"": LocalAnswerer(model)}, count=model.count).values()
    assert accuracy(answered) >= 0.9


def test_the_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = ["--lengths", "128", "256", "--questions", "2", "--share", "2"]
    argv += ["--json", str(tmp_path / "eval.json"), "--plot", str(tmp_path / "eval.png")]
    assert command.main(argv) == 0
    written = json.loads((tmp_path / "eval.json").read_text())
    assert set(written["results"]) == {"single", "multi_key"}
    assert written["evaluation"]["lengths"] == [128, 256]
    assert set(written["results"]["single"]["interval_by_length"]) == {"128", "256"}
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("family", "config"),
    [("mistral", {"sliding_window": 8}), ("gpt_oss", {}), ("gemma3_text", {})],
)
def test_models_with_windows_and_sinks_answer_as_in_transformers(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """What was read before is longer than the window, and what is asked behind it as well."""
    path = make_checkpoint(tmp_path, family, **config)
    model, before, question = LocalModel.load(path), "A text of some length. " * 2, "What is it? "
    ids = [*model.tokenizer.encode(before).ids]
    ids += model.tokenizer.encode(question, add_special_tokens=False).ids
    tokens = greedy_tokens(path, ids, MAX_ANSWER_TOKENS)
    stops = [at for at, token in enumerate(tokens) if token in model.stop_ids]
    expected = model.tokenizer.decode(tokens[: min(stops, default=None)])
    context = model.read(before)
    assert model.answer(context, question) == expected
    if family == "mistral":  # a token reaches 14 tokens before it, through both layers
        assert model.answer(context.without([(0, 25)]), question) == expected

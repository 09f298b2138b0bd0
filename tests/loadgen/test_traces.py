"""Mooncake's JSONL in and out, and text for requests that have none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from csps.loadgen.workloads.request import (
    HASH_BLOCK_TOKENS,
    ConversationTurns,
    RequestObjective,
    Slo,
    WorkloadRequest,
    converse,
)
from csps.loadgen.workloads.text import Writer
from csps.loadgen.workloads.traces import (
    TraceRules,
    at_rate,
    read_trace,
    with_times,
    write_trace,
)
from csps.models.needle_prompts.haystack import is_correct
from csps.protocols.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

requests_st = st.builds(
    WorkloadRequest,
    arrival_ns=st.integers(0, 10**13),
    input_length=st.integers(1, 10**6),
    output_length=st.integers(1, 10**4),
    hash_ids=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    prompt=st.none() | st.text(min_size=1),
    answer=st.none() | st.text(),
    objective=st.none() | st.just(RequestObjective(objective="ttft", max_accuracy_loss=0.01)),
    conversation=st.none() | st.sampled_from(["", "a", "\n"]),
    tenant=st.text(),
    delay_ns=st.integers(0, 10**12),
    slo=st.none() | st.builds(Slo, ttft=st.floats(0, 1e9), tpot=st.none() | st.just(20)),
    max_tokens=st.none() | st.integers(1, 10**4),
    leaves_after_ns=st.none() | st.integers(0, 10**12),
    cls=st.text(),
    priority=st.integers(-9, 9),
)


@given(requests=st.lists(requests_st, max_size=8))
def test_a_written_trace_is_read_back_equal(
    requests: list[WorkloadRequest], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(requests, path)
    read = read_trace(path)
    assert sorted(map(repr, read)) == sorted(map(repr, requests))
    alone = [request for request in requests if request.conversation is None]
    assert [request for request in read if request.conversation is None] == sorted(
        alone, key=lambda request: request.arrival_ns
    )
    for name in {request.conversation for request in requests} - {None}:
        turns = [request for request in requests if request.conversation == name]
        assert [request for request in read if request.conversation == name] == turns
        first = read.index(turns[0])
        assert all(request.arrival_ns <= turns[0].arrival_ns for request in read[:first])


def test_a_line_of_mooncakes(tmp_path: Path) -> None:
    line = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}'
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line}\n\n")
    (request,) = read_trace(path, speedup=2)
    assert request == WorkloadRequest(
        arrival_ns=13_741_000_000, input_length=6955, output_length=52, hash_ids=(46, 47)
    )
    write_trace(read_trace(path), path)
    assert json.loads(path.read_text()) == json.loads(line)


def test_a_rate_for_a_trace() -> None:
    requests = [
        WorkloadRequest(arrival_ns=ns * 10**9, input_length=1, output_length=1)
        for ns in (0, 1, 9, 10)
    ]
    stretched = at_rate(requests, 6.0)
    assert [request.arrival_ns / 1e9 for request in stretched] == pytest.approx(
        [0, 0.05, 0.45, 0.5]
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"trace.jsonl:2:2: Expecting"),
        ("[1]", "trace.jsonl:2:1: expected an object"),
        ('{"input_length": "x", "output_length": 1}', "'input_length' must be a number"),
        ('{"input_length": 5}', "'output_length' must be a number"),
        ('{"input_length": 5, "output_length": 0}', "jsonl:2:21: 'output_length' must be a whole"),
        ('{"input_length": 5, "output_length": 1.5}', "jsonl:2:21: 'output_length'"),
        ('{"input_length": 5, "output_length": 1, "delay": -1}', "jsonl:2:41: 'delay'"),
        ('{"input_length": 5, "output_length": 1, "turn": 2}', "jsonl:2:41: unknown field 'turn'"),
        (
            '{"slo": {"ttft": 5}, "input_length": 5, "output_length": 1, "sl": 2}',
            "jsonl:2:61: unknown field 'sl'.*'slo'",
        ),
        ('{"slo": {"tfft": 5}, "input_length": 5, "output_length": 1}', "jsonl:2:2: slo: .*'ttft'"),
        ('{"input_length": 5, "output_length": 1, "csps": {"max_ttft": 1}}', "'max_ttft_ms'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5, "output_length": 1}\n' + line)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_what_cannot_be_honored_is_refused_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5, "output_length": 1, "answer": "blue", "turn": 3}')
    rules = TraceRules(refused={"answer": "no text is computed"}, ignored={"turn"})
    with pytest.raises(ConfigError, match="jsonl:1:41: field 'answer': no text is computed"):
        read_trace(path, rules=rules)
    (read,) = read_trace(path, rules=TraceRules(refused=rules.refused, ignored={"answer", "turn"}))
    assert read == WorkloadRequest(arrival_ns=0, input_length=5, output_length=1)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00,7,1
"""


def test_azures_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert [
        (read.arrival_ns, read.input_length, read.output_length) for read in read_trace(path)
    ] == [
        (0, 374, 44),
        (4_314_579_000, 396, 109),
        (20_653_319_410_000, 7, 1),
    ]
    assert read_trace(path, speedup=2)[1].arrival_ns == 2_157_289_500


def test_dates_of_azures_second_trace_have_a_zone(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
    )
    assert [read.arrival_ns for read in read_trace(path)] == [0, 7_405_000]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Generated", "Output", "azure.csv:1:25: unknown column 'OutputTokens'"),
        (",GeneratedTokens", "", "azure.csv:1:1: column GeneratedTokens is missing"),
        (",109", ",0", "azure.csv:3:33: GeneratedTokens must be a whole number"),
        (",396,", ",4e2,", "azure.csv:3:29: ContextTokens must be a whole number"),
        ("2023-11-17 00", "2023-13-17 00", "azure.csv:4:1: TIMESTAMP: no date"),
        ("2023-11-17 00", "2022-11-17 00", "azure.csv:4:1: .* is before the first request"),
        (",396,109", ",396", "azure.csv:3:1: expected 3 values, got 2"),
    ],
)
def test_a_wrong_line_of_a_csv_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in AZURE
    path = tmp_path / "azure.csv"
    path.write_text(AZURE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_later_turns_get_times_for_planning(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "session_id": "a"},
        {"delay": 1000, "session_id": "a"},
        {"timestamp": 5500},
        {"delay": 1000, "session_id": "a", "timestamp": 9000},
    ]
    rows = [{"input_length": n, "output_length": 1, **line} for n, line in enumerate(lines, 1)]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = with_times(read_trace(path))
    found = [(request.input_length, request.arrival_ns // 10**6) for request in read]
    assert found == [(1, 5000), (3, 5500), (2, 6000), (4, 9000)]


def test_a_missing_trace_is_named() -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        read_trace(Path("/nowhere"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "models" / "needle" / "tokenizer.json"))


def tokens(tokenizer: Tokenizer, text: str | None) -> int:
    assert text is not None
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@given(length=st.integers(1, 700), chat=st.booleans())
def test_text_has_the_tokens_that_were_asked_for(
    length: int, chat: bool, tokenizer: Tokenizer
) -> None:
    """The included model's own tokenizer counts, with room for the cue that a chat leaves out."""
    request = WorkloadRequest(arrival_ns=0, input_length=length, output_length=1)
    (written,) = Writer(chat=chat).write([request])
    missing = 3 if chat and written.answer else 0
    assert tokens(tokenizer, written.prompt) == length - missing
    assert (written.answer is not None) == (length >= 24)


def test_the_answer_is_in_the_text_once() -> None:
    request = WorkloadRequest(arrival_ns=0, input_length=900, output_length=1)
    for written in Writer(seed=3).write([request] * 20):
        assert written.prompt is not None
        assert written.answer is not None
        key = written.prompt.rpartition(" of ")[2].removesuffix("?\nAnswer:")
        assert written.prompt.count(f"The password of {key} is {written.answer}.") == 1
        assert is_correct(written.answer, f" {written.answer}")


def test_every_request_has_text_of_its_own_that_its_seed_repeats() -> None:
    requests = [WorkloadRequest(arrival_ns=0, input_length=200, output_length=1)] * 5
    texts = [request.prompt for request in Writer(seed=1).write(requests)]
    assert len(set(texts)) == 5
    assert texts == [request.prompt for request in Writer(seed=1).write(requests)]
    assert not set(texts) & {request.prompt for request in Writer(seed=2).write(requests)}


def test_equal_hash_ids_are_equal_text(tokenizer: Tokenizer) -> None:
    lengths = 3 * HASH_BLOCK_TOKENS + 100, 2 * HASH_BLOCK_TOKENS + 300, 40
    ids = (5, 6, 7, 8), (5, 6, 9), (10,)
    first, second, third = Writer().write(
        WorkloadRequest(arrival_ns=0, input_length=length, output_length=1, hash_ids=blocks)
        for length, blocks in zip(lengths, ids, strict=True)
    )
    assert [tokens(tokenizer, request.prompt) for request in (first, second, third)] == list(
        lengths
    )
    encoded = [tokenizer.encode(request.prompt or "").ids for request in (first, second)]
    shared = next(i for i, (a, b) in enumerate(zip(*encoded, strict=False)) if a != b)
    assert shared >= 2 * HASH_BLOCK_TOKENS
    assert first.answer
    assert f" is {first.answer}." in (first.prompt or "")
    assert third.answer is None


def test_a_later_turn_has_only_what_is_added(tokenizer: Tokenizer) -> None:
    first = WorkloadRequest(arrival_ns=0, input_length=1000, output_length=20)
    spoken = list(Writer().write(converse([first], ConversationTurns(count=3, added_tokens=80))))
    assert [tokens(tokenizer, request.prompt) for request in spoken] == [1000, 80, 80]
    assert len({request.prompt for request in spoken}) == 3


def test_a_prompt_that_is_there_stays() -> None:
    request = WorkloadRequest(arrival_ns=0, input_length=5, output_length=1, prompt="as it is")
    assert list(Writer().write([request])) == [request]


def test_another_tokenizer_counts_for_itself() -> None:
    """The other tokenizer has one token for each character."""
    request = WorkloadRequest(arrival_ns=0, input_length=2000, output_length=1)
    (written,) = Writer(count=len).write([request])
    assert written.answer
    assert 1900 < len(written.prompt or "") <= 2000

"""Command lines of `vllm bench serve` from vLLM's documentation mean the same here."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from csps.loadgen.bench import options
from csps.loadgen.bench.requests import load_requests
from csps.loadgen.bench.serve import parse
from csps.loadgen.workloads.traces import read_sharegpt
from csps.models.needle_prompts.words import count_words
from csps.protocols.core.errors import ConfigError

LINES: list[tuple[str, dict[str, Any]]] = [
    (
        """--backend vllm --model NousResearch/Hermes-3-Llama-3.1-8B --endpoint /v1/completions
        --dataset-name sharegpt --dataset-path ShareGPT_V3_unfiltered_cleaned_split.json
        --num-prompts 10""",
        {"model": "NousResearch/Hermes-3-Llama-3.1-8B", "num_prompts": 10},
    ),
    (
        """--port 9001 --save-result --save-detailed --backend vllm
        --model meta-llama/Llama-3.1-8B-Instruct --endpoint /v1/completions --dataset-name custom
        --dataset-path data.jsonl --skip-chat-template --num-prompts 80 --max-concurrency 1
        --temperature=0.3 --top-p=0.75 --result-dir "./log/" """,
        {"port": 9001, "max_concurrency": 1, "temperature": 0.3, "top_p": 0.75},
    ),
    (
        """--backend vllm --model NousResearch/Hermes-3-Llama-3.1-8B --endpoint /v1/completions
        --dataset-name sharegpt --dataset-path ShareGPT_V3_unfiltered_cleaned_split.json
        --top-k 10 --top-p 0.9 --temperature 0.5 --num-prompts 10""",
        {"top_k": 10, "top_p": 0.9},
    ),
    (
        """--backend openai-chat --model Qwen/Qwen3-8B --endpoint /v1/chat/completions
        --dataset-name random --random-input-len 1024 --random-output-len 1024 --num-prompts 200""",
        {"input_len": 1024, "output_len": 1024, "endpoint": "/v1/chat/completions"},
    ),
    (
        """--host 0.0.0.0 --port 8000 --model openai/gpt-oss-120b --dataset-name random
        --random-input-len 1024 --random-output-len 1024 --random-range-ratio 0.2
        --max-concurrency 128 --num-prompts 640 --ignore-eos --percentile-metrics ttft,tpot,itl,e2el
        --request-rate inf --seed 1 --random-prefix-len 0""",
        {"random_range_ratio": 0.2, "percentile_metrics": ("ttft", "tpot", "itl", "e2el")},
    ),
    (
        """--backend vllm --model Qwen/Qwen3-8B --dataset-name random --random-input-len 512
        --random-output-len 64 --random-prefix-len 256 --request-rate 4 --probe-request-rate 2""",
        {"random_prefix_len": 256, "probe_request_rate": 2.0},
    ),
    (
        """--model Qwen/Qwen3-8B --served-model-name qwen --num-prompts -1
        --dataset-name custom --dataset-path data.jsonl --ready-check-timeout-sec 600
        --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 10""",
        {"served_model_name": "qwen", "num_prompts": None, "ready_check_timeout_sec": 600.0},
    ),
]


def parsed(words: str) -> argparse.Namespace:
    return parse(shlex.split(words))


@pytest.mark.parametrize(("words", "expected"), LINES)
def test_a_documented_line_parses(words: str, expected: dict[str, Any]) -> None:
    arguments = parsed(words)
    assert {name: getattr(arguments, name) for name in expected} == expected


def test_sampling_parameters_are_fields_of_every_request() -> None:
    given = options.sampling(
        parsed('--top-k 10 --min-p 0.1 --extra-body \'{"min_p": 0.2, "csps": {}}\'')
    )
    assert given == {"top_k": 10, "min_p": 0.2, "csps": {}}


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5])
def test_random_lengths_stay_in_their_range(ratio: float) -> None:
    words = f"--random-input-len 100 --random-output-len 20 --random-range-ratio {ratio}"
    asked = load_requests(parsed(f"{words} --num-prompts 400"), chat=False, positions=None)
    for lengths, middle in (
        ([request.input_length for request in asked.requests], 100),
        ([request.output_length for request in asked.requests], 20),
    ):
        assert min(lengths) >= middle * (1 - ratio)
        assert max(lengths) <= middle * (1 + ratio)
        if ratio:
            assert min(lengths) < middle * (1 - 0.8 * ratio)
            assert max(lengths) > middle * (1 + 0.8 * ratio)


def sharegpt(path: Path) -> Path:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    entries = [
        talk("What is the capital of France?", "It is the city of Paris", "Thanks a lot"),
        talk("Hi", "Hello to you my friend"),
        talk("Tell me a long story please", "No"),
        talk("Only a question without any answer"),
        talk("word " * 1025, "one two three four"),
        talk("How many are five and six?", "They are eleven altogether " + "and " * 20),
        {"id": "nothing"},
    ]
    path.write_text(json.dumps(entries))
    return path


def test_a_file_of_sharegpt_gives_first_turns_of_a_usable_length(tmp_path: Path) -> None:
    path = sharegpt(tmp_path / "sharegpt.json")
    requests = read_sharegpt(path, None)
    assert [request.prompt for request in requests] == [
        "What is the capital of France?",
        "How many are five and six?",
    ]
    assert [(r.input_length, r.output_length) for r in requests] == [(6, 6), (6, 24)]


def test_a_file_of_sharegpt_is_sent_at_the_rate(tmp_path: Path) -> None:
    path = sharegpt(tmp_path / "sharegpt.json")
    words = f"--dataset-name sharegpt --dataset-path {path} --request-rate 2 --seed 3"
    asked = load_requests(parsed(words), chat=False, positions=None).requests
    assert len(asked) == 2
    assert all(request.prompt for request in asked)
    assert 0 < asked[0].arrival_ns < asked[1].arrival_ns
    short = load_requests(
        parsed(f"{words} --num-prompts 1 --sharegpt-output-len 5"), chat=False, positions=None
    )
    assert [request.output_length for request in short.requests] == [5]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="not a file of ShareGPT"):
        read_sharegpt(tmp_path / "other.json", None)
    with pytest.raises(ConfigError, match="No such file"):
        read_sharegpt(tmp_path / "none.json", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--random-prefix-len -1", "expected a number from 0 on"),
        ("--probe-request-rate inf", "expected a finite number, 0 or more"),
        ("--random-range-ratio 1", "expected a share from 0 to less than 1"),
        ("--num-prompts 0", "expected a number from 1 on, or -1 for all"),
    ],
)
def test_what_has_no_meaning_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("turns", [1, 3])
def test_random_prompts_begin_with_the_same_tokens_before_their_own(turns: int) -> None:
    words = f"--random-input-len 60 --num-prompts 20 --turns {turns}"
    with_prefix, without = (
        load_requests(parsed(f"{words} --random-prefix-len {tokens}"), chat=False, positions=None)
        for tokens in (40, 0)
    )
    assert with_prefix.facts["random_prefix_len"] == 40
    prefixes = set()
    for one, other in zip(with_prefix.requests, without.requests, strict=True):
        assert one.input_length == other.input_length + 40
        assert one.prompt is not None
        assert other.prompt is not None
        assert one.prompt.endswith(other.prompt)
        prefixes.add(one.prompt.removesuffix(other.prompt))
    (shared,) = prefixes - {""}
    assert count_words(shared) == 40
    assert ("" in prefixes) == (turns > 1), "later turns follow their first"


def test_prompts_with_a_prefix_fit_into_the_models_positions() -> None:
    words = "--random-input-len 900 --random-output-len 50 --random-prefix-len 200 --num-prompts 3"
    asked = load_requests(parsed(words), chat=False, positions=1024)
    assert all(one.input_length + one.output_length <= 1024 for one in asked.requests)


def test_a_trace_cannot_hold_a_prefix(tmp_path: Path) -> None:
    words = f"--random-prefix-len 8 --num-prompts 1 --save-trace {tmp_path / 'trace.jsonl'}"
    with pytest.raises(ConfigError, match="--random-prefix-len"):
        load_requests(parsed(words), chat=False, positions=None)

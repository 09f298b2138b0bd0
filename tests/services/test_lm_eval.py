"""lm-eval against the server, without a network: likelihoods of its answers are transformers' own.

lm-eval has an environment of its own (`make lm-eval`), and its tasks are made from the generator of
the included model's prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from http_over_ranks import Served, served
from tiny_checkpoints import reference_logits

from csps.models.needle_prompts.prompt import NeedleConfig, generate
from csps.models.needle_prompts.words import VALUES
from csps.models.tokenizers.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
LM_EVAL = ROOT / ".venv-lm-eval" / "bin" / "lm-eval"
MODEL = ROOT / "models" / "needle"
TOKENS = (200, 700, 1500)
CHOICES = 3
END_S = 300.0
ANSWER = {
    "output_type": "generate_until",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
    "filter_list": [
        {
            "name": "bare",
            "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [{"metric": "exact_match"}],
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LM_EVAL.exists(), reason="needs .venv-lm-eval: make lm-eval"),
]
TASKS = {
    "needle_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "needle_answer": {"doc_to_text": "text", **ANSWER},
    "needle_chat": {"doc_to_text": "chat", **ANSWER},
}


def make_tasks(folder: Path) -> list[dict[str, Any]]:
    """Write the tasks and their documents; return these."""
    documents = []
    for seed, tokens in enumerate(TOKENS):
        prompt = generate(NeedleConfig(length=tokens, seed=seed))
        wrong = [value for value in VALUES if value not in prompt.text][: CHOICES - 1]
        documents.append(
            {
                "text": prompt.text,
                "chat": prompt.chat_text,
                "choices": [prompt.answer, *(f"{word}." for word in wrong)],
                "label": 0,
                "answer": prompt.answer,
            }
        )
    data = folder / "documents.jsonl"
    data.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    for name, task in TASKS.items():
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole))
    return documents


async def evaluate(
    server: Served, folder: Path, task: str, model: str, route: str, *options: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the results of a task and its samples."""
    url = f"{server.client.base_url}".rstrip("/") + route
    arguments = f"model=tiny,base_url={url},tokenizer={MODEL},max_length=8192,num_concurrent=2"
    program = await asyncio.create_subprocess_exec(
        *(str(LM_EVAL), "run", "--model", model, "--model_args", arguments),
        *("--tasks", task, "--include_path", str(folder), "--output_path", str(folder / "out")),
        *("--log_samples", *options),
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(folder / "hub"),
            "PYTHONPATH": "",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(END_S):
            said, _ = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, said.decode()[-4000:]
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], lines


def likelihood(text: str, choice: str) -> tuple[float, bool]:
    """Return transformers' log-probability of a choice behind a text, and whether it is the
    likeliest text."""
    tokenizer = Tokenizer(MODEL)
    before = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text + choice, add_special_tokens=False)
    assert whole[: len(before)] == before
    logprobs_tv = reference_logits(MODEL, whole).log_softmax(-1)[len(before) - 1 : -1]
    behind = whole[len(before) :]
    own = logprobs_tv[range(len(behind)), behind]
    return float(own.sum()), logprobs_tv.argmax(-1).tolist() == behind


async def test_likelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    documents = make_tasks(tmp_path)
    async with served(MODEL, kv_slots=16384) as server:
        results, samples = await evaluate(
            server, tmp_path, "needle_choice", "local-completions", "/v1/completions"
        )
        await server.settled()
    assert results["acc,none"] == 1.0
    for sample in samples:
        document = documents[sample["doc_id"]]
        for choice, (shown,) in zip(document["choices"], sample["resps"], strict=True):
            logprob, greedy = likelihood(document["text"], f" {choice}")
            assert float(shown[0]) == pytest.approx(logprob, abs=1e-3)
            assert shown[1] in (greedy, str(greedy))


@pytest.mark.parametrize(
    ("task", "model", "route", "options"),
    [
        ("needle_answer", "local-completions", "/v1/completions", ()),
        (
            *("needle_chat", "local-chat-completions", "/v1/chat/completions"),
            ("--apply_chat_template",),
        ),
    ],
)
async def test_answers_are_found(
    tmp_path: Path, task: str, model: str, route: str, options: tuple[str, ...]
) -> None:
    make_tasks(tmp_path)
    async with served(MODEL, kv_slots=16384) as server:
        results, samples = await evaluate(server, tmp_path, task, model, route, *options)
        await server.settled()
    assert len(samples) == len(TOKENS)
    assert results["exact_match,bare"] == 1.0, [sample["resps"] for sample in samples]

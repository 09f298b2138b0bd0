"""Tools, structured output, several answers and progress over HTTP on real ranks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from agent_checkpoints import CLOCK, HERMES_TEMPLATE, WEATHER, with_template
from gang_threads import eventually
from http_over_ranks import Served, served
from tiny_checkpoints import make_checkpoint

from csps.protocols.core.placement import Span
from csps.services.scheduling.events.limits import BLOCK_TOKENS

pytestmark = pytest.mark.slow
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "né"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(make_checkpoint(tmp_path_factory.mktemp("agents")), HERMES_TEMPLATE)


async def chat(server: Served, messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 400, **fields}
    answer = await server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize("tp", [1, 2])
async def test_answers_of_a_random_model_follow_their_schemas(model: Path, tp: int) -> None:
    """Beside an answer without a schema, which stays as it is alone."""
    question = [{"role": "user", "content": "Who?"}]
    async with served(model, prefill_tp=tp) as server:
        alone = await chat(server, question, temperature=0, max_tokens=30)
        answers = await asyncio.gather(
            chat(server, question, temperature=0, max_tokens=30),
            *(
                chat(server, question, seed=seed, response_format=schema_of(PERSON))
                for seed in range(8)
            ),
        )
        assert answers[0]["choices"] == alone["choices"]
        for answer in answers[1:]:
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        again = await chat(server, question, seed=3, response_format=schema_of(PERSON))
        assert again["choices"] == answers[4]["choices"]
        await server.settled()


async def test_several_answers_share_one_prefill(model: Path) -> None:
    """The answers that follow find the prompt's whole blocks in the prefix cache, and are those of
    requests of their own."""
    words = [{"role": "user", "content": "word " * 60}]
    async with served(model, reuse=True, kv_slots=8192) as server:
        alone = [
            await chat(server, words, seed=seed, max_tokens=12, cache_salt=f"alone {seed}")
            for seed in (7, 8, 9)
        ]
        answer = await chat(server, words, seed=7, max_tokens=12, n=3, cache_salt="together")
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [each["choices"][0]["message"]["content"] for each in alone]
        prompt = answer["usage"]["prompt_tokens"]
        assert prompt == alone[0]["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        hits = [
            float(line.split()[-1])
            for line in server.metrics.render().decode().splitlines()
            if line.startswith("csps:prefix_cache_hits_total")
        ]
        assert sum(hits) >= 2 * ((prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


@pytest.mark.parametrize("elastic", [False, True])
async def test_every_turn_with_tools_finds_its_whole_history(model: Path, elastic: bool) -> None:
    """Every answer of 20 turns calls tools; a stop string ends each third one.

    The gang that decodes has the whole history. A prefill gang has the prompts alone.
    """
    turns = 20
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
    tools, before = [WEATHER, CLOCK], 0
    policy: dict[str, Any] = {}
    if elastic:
        policy = {"policy": "context_parallel", "options": {}, "elastic": True}
    async with served(model, reuse=True, kv_slots=16384, **policy) as server:
        for turn in range(turns):
            answer = await chat(
                server,
                messages,
                tools=tools,
                tool_choice="required",
                parallel_tool_calls=bool(turn % 2),
                seed=turn,
                max_tokens=700,
                stop=["</tool_call>"] if turn % 3 == 1 else [],
                csps={"explain": True},
            )
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            usage = answer["usage"]
            shares = answer["csps"]["placement"]["shares"]
            there = [Span(**share["span"]) for share in shares if share["origin"] is not None]
            cached = sum(len(span.positions) for span in there)
            if elastic:
                assert cached == usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= before // BLOCK_TOKENS * BLOCK_TOKENS
            # The last token of an answer has no KV.
            before = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            calls = choice["message"]["tool_calls"]
            for call in calls:
                function = next(
                    tool["function"]
                    for tool in tools
                    if tool["function"]["name"] == call["function"]["name"]
                )
                jsonschema.validate(
                    json.loads(call["function"]["arguments"]), function["parameters"]
                )
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"}
                for call in calls
            ]
            messages += [choice["message"], *results]
            await eventually(lambda: not server.service.counts.decode_kv)


async def test_progress_reaches_the_total_before_the_first_token(model: Path) -> None:
    text = "word " * 1500
    async with (
        served(model, kv_slots=16384) as server,
        server.client.stream(
            "POST",
            "/v1/completions",
            json={
                "model": "tiny",
                "prompt": text,
                "max_tokens": 3,
                "stream": True,
                "return_progress": True,
            },
        ) as answer,
    ):
        chunks = [
            json.loads(line[6:])
            async for line in answer.aiter_lines()
            if line.startswith("data: {")
        ]
        reports = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        texts = [number for number, chunk in enumerate(chunks) if chunk["choices"]]
        assert texts[0] == len(reports)
        processed = [report["processed"] for report in reports]
        assert processed == sorted(processed)
        assert processed[-1] == reports[-1]["total"] >= len(text)

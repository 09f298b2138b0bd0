"""What agents ask for over HTTP, of a service that answers what a test scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agent_checkpoints import CLOCK, WEATHER
from agent_server import DEADLINE_S, AgentServer, agent_parser, agent_server
from fake_service import FakeService

from csps.protocols.core.errors import QueueFull
from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import Settings

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'
UNKNOWN = {"type": "function", "function": {"name": "f", "parameters": {"type": "?"}}}
QUESTION = [{"role": "user", "content": "Is it raining?"}]


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> RequestParser:
    return agent_parser(tmp_path_factory.mktemp("agents"))


@pytest.fixture
async def server(parser: RequestParser) -> AsyncIterator[AgentServer]:
    async with agent_server(parser) as server:
        yield server


@pytest.fixture
def client(server: AgentServer) -> httpx.AsyncClient:
    return server.client


@pytest.fixture
def service(server: AgentServer) -> FakeService:
    return server.service


@pytest.fixture
async def official(server: AgentServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 500, **fields}
    return await client.post("/v1/chat/completions", json=body)


# --- several answers -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_have_their_indices(
    official: openai.AsyncOpenAI, service: FakeService, stream: bool
) -> None:
    texts = {0: "", 1: "", 2: ""}
    if stream:
        async for chunk in await official.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            n=3,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage
    else:
        whole = await official.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], n=3, seed=7
        )
        texts = {choice.index: choice.message.content or "" for choice in whole.choices}
        usage = whole.usage
    assert texts == dict.fromkeys(range(3), "Yes.")
    assert [spec.sampling.seed for spec in service.specs] == [7, 8, 9]
    assert usage is not None
    assert usage.completion_tokens == 3 * (len(service.script) + 1)
    assert usage.prompt_tokens == service.specs[0].prompt.size


async def test_several_prompts_have_answers_in_order(
    client: httpx.AsyncClient, service: FakeService, parser: RequestParser
) -> None:
    body = {"model": "tiny", "prompt": ["one", [1, 2]], "n": 2, "echo": True, "max_tokens": 50}
    answer = (await client.post("/v1/completions", json=body)).json()
    second = parser.tokenizer.decode([1, 2])
    assert [choice["text"] for choice in answer["choices"]] == [
        *["oneYes."] * 2,
        *[f"{second}Yes."] * 2,
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [spec.prompt.size for spec in service.specs]
    assert answer["usage"]["prompt_tokens"] == sum(set(prompts))


async def test_the_likeliest_of_several_answers_are_returned(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    body = {"model": "tiny", "prompt": "x", "n": 1, "best_of": 3, "max_tokens": 50}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "Yes.")]
    assert answer["choices"][0]["logprobs"] is None
    assert len(service.specs) == 3
    assert answer["usage"]["completion_tokens"] == 3 * (len(service.script) + 1)


async def test_answers_to_one_prompt_wait_for_its_kv(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """The first one computes the prompt for all: the others find it in the prefix cache."""
    service.gate = asyncio.Event()
    words = "word " * 100
    asking = asyncio.ensure_future(chat(client, messages=[{"role": "user", "content": words}], n=3))
    await asyncio.wait_for(service.submitted.wait(), DEADLINE_S)
    assert len(service.specs) == 1
    assert service.specs[0].hashes
    service.handles[0].prefill_over.set()
    service.gate.set()
    assert len((await asking).json()["choices"]) == 3


async def test_a_refused_sibling_fails_the_request_and_leaves_nothing(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.gate = asyncio.Event()
    asking = asyncio.ensure_future(
        chat(client, messages=[{"role": "user", "content": "word " * 100}], n=2)
    )
    await asyncio.wait_for(service.submitted.wait(), DEADLINE_S)
    service.refusal = QueueFull("full", retry_after_s=1)
    service.handles[0].prefill_over.set()
    assert (await asking).status_code == 429
    await asyncio.wait_for(service.cancelled.wait(), DEADLINE_S)


# --- fields ----------------------------------------------------------------------------------


async def test_sampling_defaults_are_the_models(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    await chat(client)
    asked = service.specs[-1].sampling
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (0.6, 20, 0.95, 0.0)
    await chat(client, temperature=0, top_k=0)
    asked = service.specs[-1].sampling
    assert (asked.temperature, asked.top_k, asked.top_p) == (0, 0, 0.95)


async def test_the_default_length_is_told(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post("/v1/chat/completions", json={"model": "tiny", "messages": QUESTION})
    card = (await client.get("/v1/models/tiny")).json()
    assert service.specs[-1].sampling.max_tokens == card["default_max_tokens"] == 4096


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-5, None)), ("right", slice(5))])
async def test_a_prompt_is_cut(
    client: httpx.AsyncClient, service: FakeService, side: str, kept: slice
) -> None:
    body = {"model": "tiny", "prompt": list(range(40)), "truncate_prompt_tokens": 5}
    await client.post("/v1/completions", json={**body, "truncation_side": side})
    assert service.specs[-1].prompt.tolist() == list(range(40))[kept]


async def test_a_prompt_is_cut_to_what_fits(
    client: httpx.AsyncClient, service: FakeService, parser: RequestParser
) -> None:
    body = {
        "model": "tiny",
        "prompt": [7] * (parser.max_positions + 50),
        "truncate_prompt_tokens": -1,
        "max_tokens": 10,
    }
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert service.specs[-1].prompt.size == parser.max_positions - 10


async def test_a_stop_string_may_be_shown(server: AgentServer, client: httpx.AsyncClient) -> None:
    server.say("one END two")
    answer = await chat(client, stop=["END"], include_stop_str_in_output=True)
    assert answer.json()["choices"][0]["message"]["content"] == "one END"


async def test_template_fields_reach_the_template(
    server: AgentServer, client: httpx.AsyncClient
) -> None:
    template = (
        "{{ messages[0].content }}|{{ documents[0].text }}|{{ color }}|{{ reasoning_effort }}"
        "{% if add_generation_prompt %}|go{% endif %}"
    )
    asked = {
        "chat_template": template,
        "documents": [{"text": "doc"}],
        "chat_template_kwargs": {"color": "red"},
        "reasoning_effort": "low",
    }
    assert (await chat(client, **asked)).status_code == 200
    assert server.prompt == "Is it raining?|doc|red|low|go"
    assert (await chat(client, **asked, add_generation_prompt=False)).status_code == 200
    assert server.prompt == "Is it raining?|doc|red|low"
    await chat(client, reasoning_effort="none")
    assert server.prompt.endswith("<think>\n\n</think>\n\n")


async def test_a_client_s_template_runs_only_where_it_can_be_stopped(
    client: httpx.AsyncClient, parser: RequestParser
) -> None:
    refusing = RequestParser(Settings(model=parser.body_parser.model.folder))
    body = json.dumps({"model": "x", "messages": QUESTION, "chat_template": "x"}).encode()
    body = body.replace(b'"x"', json.dumps(refusing.model).encode(), 1)
    with pytest.raises(ValueError, match="chat_template: not allowed by this server"):
        refusing.body_parser.parse("chat", body, b"")
    answer = await chat(client, chat_template="{{ 1 / 0 }}")
    assert answer.status_code == 400
    assert "the chat template rejects the messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize("echo", [False, True])
async def test_the_last_message_is_continued(
    server: AgentServer, client: httpx.AsyncClient, echo: bool
) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "I think: "}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "echo": echo}
    answer = await chat(client, messages=begun, **options)
    assert server.prompt.endswith("<|im_start|>assistant\nI think: ")
    shown = answer.json()["choices"][0]["message"]["content"]
    assert shown == ("I think: Yes." if echo else "Yes.")


async def test_words_and_tokens_reach_the_sampler(
    client: httpx.AsyncClient, service: FakeService, parser: RequestParser
) -> None:
    await chat(client, bad_words=["no"], allowed_token_ids=[5, 6])
    asked = service.specs[-1].sampling
    encode = parser.tokenizer.encode
    assert asked.bad_words == (tuple(encode("no", False)), tuple(encode(" no", False)))
    assert asked.allowed_token_ids == (5, 6)
    refused = await chat(client, allowed_token_ids=[999])
    assert refused.json()["error"]["param"] == "allowed_token_ids"


# --- tools -----------------------------------------------------------------------------------


async def test_calls_are_found_in_an_answer(
    server: AgentServer, official: openai.AsyncOpenAI
) -> None:
    server.say(f"Let me see.\n{CALL}\n{CALL}")
    whole = await official.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[WEATHER, CLOCK],
        max_tokens=500,  # type: ignore[arg-type, list-item]
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [call.function.arguments for call in calls] == ['{"city":"Oslo"}'] * 2  # type: ignore[union-attr]
    assert len({call.id for call in calls}) == 2


async def test_calls_are_streamed(server: AgentServer, official: openai.AsyncOpenAI) -> None:
    server.say(f"Let me see.\n{CALL}\n{CALL}")
    names, arguments, content, reasons = {}, {0: "", 1: ""}, "", set()
    async for chunk in await official.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=[WEATHER],
        stream=True,
        max_tokens=500,  # type: ignore[arg-type, list-item]
    ):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons.add(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                names[call.index] = call.function.name
            arguments[call.index] += call.function.arguments or ""
    assert content == "Let me see."
    assert names == {0: "weather", 1: "weather"}
    assert set(arguments.values()) == {'{"city":"Oslo"}'}
    assert reasons == {None, "tool_calls"}


async def test_one_call_ends_the_answer_if_one_is_wanted(
    server: AgentServer, client: httpx.AsyncClient, service: FakeService
) -> None:
    server.say(f"{CALL}\n{CALL}")
    answer = await chat(client, tools=[WEATHER], parallel_tool_calls=False)
    choice = answer.json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] is None
    assert answer.json()["usage"]["completion_tokens"] < len(service.script)


async def test_no_call_is_found_where_none_is_allowed(
    server: AgentServer, client: httpx.AsyncClient
) -> None:
    server.say(CALL)
    answer = await chat(client, tools=[WEATHER], tool_choice="none")
    assert answer.json()["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize(
    ("choice", "functions"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
async def test_a_wanted_call_is_a_grammar(
    client: httpx.AsyncClient, service: FakeService, choice: Any, functions: set[str]
) -> None:
    await chat(client, tools=[WEATHER, CLOCK], tool_choice=choice)
    grammar = service.specs[-1].sampling.grammar
    assert {name for name in ("weather", "clock") if name in grammar} == functions
    await chat(client, tools=[WEATHER, CLOCK])
    assert service.specs[-1].sampling.grammar == ""


async def test_an_answer_is_the_same_text_in_the_history(
    server: AgentServer, client: httpx.AsyncClient, service: FakeService
) -> None:
    """The prompt of the next turn begins with prompt and answer of this one, token for token."""
    odd = (
        '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo",  "x": [ 1,2]}}\n</tool_call>'
    )
    server.say(f"Let me see.\n{odd}\n{CALL}")
    answer = (await chat(client, tools=[WEATHER, CLOCK])).json()["choices"][0]["message"]
    before = [*service.specs[-1].prompt.tolist(), *service.script]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        for call in answer["tool_calls"]
    ]
    await chat(client, messages=[*QUESTION, answer, *results], tools=[WEATHER, CLOCK])
    assert service.specs[-1].prompt.tolist()[: len(before)] == before


async def test_tools_need_a_format(tiny_llama: Path) -> None:
    plain = RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))
    body = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER]}
    with pytest.raises(ValueError, match="shows no format of calls"):
        plain.body_parser.parse("chat", json.dumps(body).encode(), b"")


# --- reasoning -------------------------------------------------------------------------------


@pytest.mark.parametrize("included", [True, False])
async def test_reasoning_is_apart_from_the_answer(
    server: AgentServer, client: httpx.AsyncClient, included: bool
) -> None:
    server.say(f"<think>\nIs it?\n</think>\n\nLook.\n{CALL}")
    fields = {"tools": [WEATHER], "include_reasoning": included}
    message = (await chat(client, **fields)).json()["choices"][0]["message"]
    assert message.get("reasoning_content") == ("Is it?" if included else None)
    assert message["content"] == "Look."
    assert len(message["tool_calls"]) == 1
    streamed = (await chat(client, **fields, stream=True)).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == ("Is it?" if included else "")
    assert "".join(delta.get("content") or "" for delta in deltas) == "Look."


# --- structured output -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, None),
        ({"structured_outputs": {"choice": ["a", "b"]}}, None),
        ({"structured_outputs": {"json": '{"type": "integer"}', "whitespace_pattern": ""}}, None),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}},
            "response_format",
        ),
        ({"tools": [UNKNOWN], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
async def test_a_form_that_can_be_followed_is_a_grammar(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], param: str | None
) -> None:
    answer = await chat(client, **fields)
    if param is None:
        assert answer.status_code == 200, answer.text
        assert service.specs[-1].sampling.grammar
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

"""The Messages and Responses APIs by their official clients, and the questions to the tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from agent_checkpoints import WEATHER
from agent_server import DEADLINE_S, AgentServer, agent_parser, agent_server

from csps import __version__
from csps.protocols.core.errors import GangLost, QueueFull
from csps.services.http import answer as http_answer
from csps.services.http import api as http_api
from csps.services.http.request_parser import RequestParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = f"<think>\nIs it?\n</think>\n\nLook.\n{CALL}\n{CALL}"
SCHEMA = WEATHER["function"]["parameters"]
TOOL = {"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> RequestParser:
    return agent_parser(tmp_path_factory.mktemp("agents"))


@pytest.fixture
async def server(parser: RequestParser) -> AsyncIterator[AgentServer]:
    async with agent_server(parser) as server:
        yield server


@pytest.fixture
async def claude(server: AgentServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def official(server: AgentServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def ask(**fields: Any) -> Any:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Rain?"}]}]
    return {"model": "tiny", "max_tokens": 500, "messages": messages, **fields}


# --- /v1/messages ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_blocks(
    server: AgentServer, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    server.say(THOUGHT)
    if stream:
        async with claude.messages.stream(**ask(tools=[TOOL])) as events:
            message = await events.get_final_message()
    else:
        message = await claude.messages.create(**ask(tools=[TOOL]))
    thinking, text, *calls = (block.model_dump() for block in message.content)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Is it?")
    assert (text["type"], text["text"]) == ("text", "Look.")
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": "Oslo"})] * 2
    assert len({call["id"] for call in calls}) == 2
    assert message.stop_reason == "tool_use"
    spec = server.service.specs[-1]
    assert message.usage.input_tokens == spec.prompt.size
    assert message.usage.output_tokens == len(server.service.script) + 1


async def test_the_fields_of_messages_are_those_of_a_chat(
    server: AgentServer, claude: anthropic.AsyncAnthropic
) -> None:
    server.say("one END two")
    message = await claude.messages.create(
        **ask(
            system=[{"type": "text", "text": "Be brief."}],
            stop_sequences=["END"],
            extra_body={"temperature": 0.5, "top_k": 3},
            thinking={"type": "disabled"},
            metadata={"user_id": "u"},
        )
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    sampling = server.service.specs[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 500)
    assert server.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_calls_and_results_are_the_same_text_in_the_history(
    server: AgentServer, claude: anthropic.AsyncAnthropic
) -> None:
    server.say(f"Look.\n{CALL}\n{CALL}")
    asked = ask(tools=[TOOL])
    first = await claude.messages.create(**asked)
    before = [*server.service.specs[-1].prompt.tolist(), *server.service.script]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "r"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    history = [
        *asked["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    await claude.messages.create(**{**asked, "messages": history})
    prompt = server.service.specs[-1].prompt.tolist()
    assert prompt[: len(before)] == before
    assert server.prompt.count("<tool_response>\nr\n</tool_response>") == 2
    assert "<|im_start|>user\nSo?<|im_end|>" in server.prompt


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
    ],
)
async def test_a_tool_may_be_required(
    server: AgentServer, claude: anthropic.AsyncAnthropic, choice: Any, grammar: bool
) -> None:
    await claude.messages.create(**ask(tools=[TOOL], tool_choice=choice))
    assert bool(server.service.specs[-1].sampling.grammar) == grammar


async def test_a_message_may_have_a_schema(
    server: AgentServer, claude: anthropic.AsyncAnthropic
) -> None:
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    await claude.messages.create(**ask(output_config=wanted))
    assert "Oslo" in server.service.specs[-1].sampling.grammar


async def test_tokens_are_counted(server: AgentServer, claude: anthropic.AsyncAnthropic) -> None:
    asked = ask(tools=[TOOL])
    del asked["max_tokens"]
    counted = await claude.messages.count_tokens(**asked)
    assert not server.service.specs
    message = await claude.messages.create(**{**asked, "max_tokens": 9})
    assert message.usage.input_tokens == counted.input_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: must not be empty"),
        ({"max_tokens": 0}, "max_tokens: must be between 1 and"),
        ({"max_tokens": None}, "max_tokens: required"),
        ({"top_j": 1}, "top_j: unknown field"),
        ({"mcp_servers": [{}]}, "mcp_servers: not supported by this server"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools: only tools of the"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content: only blocks of type 'text' are supported here, got 'image'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: must be 'user' or"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a string"),
        ({"thinking": {"type": "deep"}}, "thinking: must be an object with a type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs 'tools'"),
    ],
)
async def test_refusals_have_the_shape_of_the_messages_api(
    server: AgentServer, claude: anthropic.AsyncAnthropic, fields: dict[str, Any], message: str
) -> None:
    answer = await server.client.post("/v1/messages", json=ask(**fields))
    error = answer.json()
    assert (answer.status_code, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(message)


async def test_errors_are_those_of_the_client(
    server: AgentServer, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**ask(model="other"))
    server.service.refusal = QueueFull("full", retry_after_s=1)
    with pytest.raises(anthropic.RateLimitError):
        await claude.messages.create(**ask())
    server.service.refusal = None
    server.service.failure, server.service.fail_after = GangLost("gone"), 2
    with pytest.raises(anthropic.APIStatusError) as failed:
        async with claude.messages.stream(**ask()) as events:
            await events.get_final_message()
    assert "being restarted" in str(failed.value)


async def test_a_key_is_that_of_the_api(parser: RequestParser) -> None:
    async with agent_server(parser, "secret") as server:
        for key, expected in (("secret", 200), ("wrong", 401)):
            headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
            answer = await server.client.post("/v1/messages", json=ask(), headers=headers)
            assert answer.status_code == expected
        assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_client_that_leaves_ends_the_work(
    server: AgentServer, claude: anthropic.AsyncAnthropic
) -> None:
    server.service.turns = asyncio.Semaphore(2)
    async with claude.messages.stream(**ask()) as events:
        async for _ in events.text_stream:
            break
    await asyncio.wait_for(server.service.cancelled.wait(), DEADLINE_S)


# --- /v1/responses ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_items(
    server: AgentServer, official: openai.AsyncOpenAI, stream: bool
) -> None:
    server.say(THOUGHT)
    asked: Any = {"model": "tiny", "input": "Rain?", "tools": [FLAT], "max_output_tokens": 500}
    if stream:
        kinds = []
        async with official.responses.stream(**asked) as events:
            async for event in events:
                kinds.append(event.type)
            response: Any = await events.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
    else:
        response = await official.responses.create(**asked)
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "Is it?"
    assert response.output_text == message.content[0].text == "Look."
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Oslo"}')] * 2
    assert response.status == "completed"
    assert response.usage.output_tokens == len(server.service.script) + 1
    assert response.usage.input_tokens == server.service.specs[-1].prompt.size


async def test_items_are_the_same_text_in_the_history(
    server: AgentServer, official: openai.AsyncOpenAI
) -> None:
    server.say(f"Look.\n{CALL}\n{CALL}")
    asked: Any = {"model": "tiny", "instructions": "Be brief.", "tools": [FLAT]}
    first = await official.responses.create(input="Rain?", **asked)
    before = [*server.service.specs[-1].prompt.tolist(), *server.service.script]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "r"}
        for item in first.output
        if item.type == "function_call"
    ]
    items: Any = [{"role": "user", "content": "Rain?"}, *first.output, *results]
    await official.responses.create(input=items, **asked)
    assert server.service.specs[-1].prompt.tolist()[: len(before)] == before


GROUPED = {
    "type": "namespace",
    "name": "sky",
    "description": "About the sky.",
    "tools": [{**FLAT, "description": "Of a city."}, {"type": "function", "name": "stars"}],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_in_namespaces_are_called_there(
    server: AgentServer, official: openai.AsyncOpenAI, stream: bool
) -> None:
    called = CALL.replace("weather", "sky__weather")
    server.say(f"Look.\n{called}\n{CALL}")
    tools: Any = [GROUPED, FLAT, {"type": "web_search", "external_web_access": False}]
    asked: Any = {"model": "tiny", "tools": tools}
    if stream:
        async with official.responses.stream(input="Rain?", **asked) as events:
            response: Any = await events.get_final_response()
    else:
        response = await official.responses.create(input="Rain?", **asked)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.namespace, call.name) for call in calls] == [
        ("sky", "weather"),
        (None, "weather"),
    ]
    assert [call.arguments for call in calls] == ['{"city": "Oslo"}'] * 2
    assert server.prompt.count("About the sky.") == 1
    assert '"About the sky.\\n\\nOf a city."' in server.prompt
    assert '"sky__stars"' in server.prompt
    assert "web_search" not in server.prompt

    before = [*server.service.specs[-1].prompt.tolist(), *server.service.script]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in calls
    ]
    items: Any = [{"role": "user", "content": "Rain?"}, *response.output, *results]
    await official.responses.create(input=items, **asked)
    assert server.service.specs[-1].prompt.tolist()[: len(before)] == before


async def test_a_function_in_a_namespace_may_be_required(server: AgentServer) -> None:
    choice = {"type": "function", "namespace": "sky", "name": "weather"}
    body = {"model": "tiny", "input": "Rain?", "tools": [GROUPED], "tool_choice": choice}
    answer = await server.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "sky__weather" in server.service.specs[-1].sampling.grammar


async def test_what_openai_runs_may_be_the_only_tool(server: AgentServer) -> None:
    for kind in ("web_search", "web_search_preview_2025_03_11", "image_generation"):
        body = {"model": "tiny", "input": "Rain?", "tools": [{"type": kind}]}
        answer = await server.client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert kind not in server.prompt


async def test_a_cut_response_is_incomplete(
    server: AgentServer, official: openai.AsyncOpenAI
) -> None:
    response = await official.responses.create(model="tiny", input="Rain?", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "file_search"}]}, "tools"),
        ({"tools": [{"type": "web_search_for_all"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "", "tools": []}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": []}, "messages"),
    ],
)
async def test_responses_refuse_by_name(
    server: AgentServer, fields: dict[str, Any], param: str
) -> None:
    answer = await server.client.post(
        "/v1/responses", json={"model": "tiny", "input": "x", **fields}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


# --- progress of a prompt --------------------------------------------------------------------


def reports_of(text: str) -> list[dict[str, Any]]:
    """Return the reports of a stream, which come before anything of the answer."""
    found = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            data = json.loads(line[6:])
            if "prompt_progress" in data:
                assert "Yes" not in text[: text.index(line)]
                found.append(data["prompt_progress"])
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_says_how_far_the_prompt_is(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(http_answer, "PROGRESS_PERIOD_S", 0.01)
    service = server.service
    service.gate = asyncio.Event()
    words = "word " * 40
    body = ask(messages=[{"role": "user", "content": words}])
    if path == "/v1/responses":
        body = {"model": "tiny", "input": words}
    lines: list[str] = []
    async with server.client.stream(
        "POST", path, json={**body, "stream": True, "return_progress": True}
    ) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            seen = len(reports_of("\n".join(lines)))
            if service.handles and seen == 2:
                service.handles[0].prefilled_up_to(50)
            if seen == 4:
                service.handles[0].prefilled_up_to(20)  # another attempt
            if seen == 6:
                service.gate.set()
    reports = reports_of("\n".join(lines))
    total = service.specs[0].prompt.size
    processed = [report["processed"] for report in reports]
    assert processed == sorted(processed)
    assert {0, 50} <= set(processed)
    assert processed[-1] == total == reports[0]["total"]
    assert reports[-1]["predicted_s"] == 0.0


async def test_without_being_asked_a_stream_says_nothing_of_its_prompt(
    server: AgentServer,
) -> None:
    answer = await server.client.post("/v1/messages", json=ask(stream=True))
    assert "prompt_progress" not in answer.text


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", ": still working"),
        ("/v1/messages", "event: ping"),
        ("/v1/responses", "event: response.in_progress"),
    ],
)
async def test_a_silent_stream_is_kept_alive(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch, path: str, event: str
) -> None:
    """By events where clients count events, and otherwise by comments."""
    monkeypatch.setattr(http_api, "FIRST_TOKEN_GRACE_S", 0.01)
    monkeypatch.setattr(http_api.EventStream.__init__, "__kwdefaults__", {
        **http_api.EventStream.__init__.__kwdefaults__, "heartbeat_s": 0.01,
    })  # fmt: skip
    service = server.service
    service.gate = asyncio.Event()
    body = {"model": "tiny", "input": "x"} if path == "/v1/responses" else ask()
    found = 0
    async with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            found += line == event
            if found == 3:
                service.gate.set()
    assert found >= 3


# --- the tokenizer ---------------------------------------------------------------------------


async def test_text_becomes_tokens_and_back(server: AgentServer) -> None:
    text = "naïve 🙂"
    found = (await server.client.post("/tokenize", json={"prompt": text})).json()
    assert found["tokens"] == server.parser.tokenizer.encode(text)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == server.parser.max_positions
    back = await server.client.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": f"<s>{text}"}


async def test_a_chat_becomes_tokens(server: AgentServer) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    found = (await server.client.post("/tokenize", json=asked)).json()
    await server.client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": asked["messages"]}
    )
    assert server.service.specs[-1].prompt.tolist() == found["tokens"]
    assert "".join(found["token_strs"]).startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "model": "other"}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": "x"}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": "x"}),
    ],
)
async def test_bad_questions_are_refused(server: AgentServer, path: str, body: Any) -> None:
    answer = await server.client.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert "error" in answer.json()


async def test_a_long_text_is_tokenized_beside_the_router(server: AgentServer) -> None:
    body = json.dumps({"prompt": "x" * 200_000}).encode()
    answer = await server.client.post("/tokenize", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_version_is_told(server: AgentServer) -> None:
    assert (await server.client.get("/version")).json() == {"version": __version__}

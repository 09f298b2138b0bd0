"""Chats with a model that writes harmony, over HTTP with OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_checkpoints import HARMONY_TEMPLATE, WEATHER, with_template
from agent_server import AgentServer, agent_server
from openai import AsyncOpenAI
from tiny_checkpoints import make_checkpoint

from csps.services.http.request_parser import RequestParser
from csps.services.settings.settings import Settings

ANSWER = (
    "<|channel|>analysis<|message|>It is far.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
)
FINAL = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
QUESTION: Any = [{"role": "user", "content": "How is it there?"}]


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> RequestParser:
    model = with_template(make_checkpoint(tmp_path_factory.mktemp("harmony")), HARMONY_TEMPLATE)
    return RequestParser(Settings(model=str(model), served_model_name="tiny"))


@pytest.fixture
async def server(parser: RequestParser) -> AsyncIterator[AgentServer]:
    async with agent_server(parser) as server:
        yield server


@pytest.fixture
async def client(server: AgentServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


async def test_an_answer_of_channels(server: AgentServer, client: AsyncOpenAI) -> None:
    server.say(FINAL)
    answer: Any = await client.chat.completions.create(model="tiny", messages=QUESTION)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("Yes.", "Hm.")
    assert choice.finish_reason == "stop"
    # This tokenizer has one token for each byte. The first counted one ends the mark before.
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == len(">Hm.<|end|>")
    streamed: Any = await client.chat.completions.create(
        model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage async for chunk in streamed if chunk.usage is not None]
    assert usages == [answer.usage]
    response: Any = await client.responses.create(model="tiny", input="How?")
    assert response.usage.output_tokens_details.reasoning_tokens == details.reasoning_tokens


async def test_an_answer_without_reasoning_counts_none(
    server: AgentServer, client: AsyncOpenAI
) -> None:
    server.say("<|channel|>final<|message|>Yes.")
    answer = await client.chat.completions.create(model="tiny", messages=QUESTION)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is None
    assert server.prompt.endswith(
        "<|start|>user<|message|>How is it there?<|end|><|start|>assistant"
    )


async def test_a_streamed_call_and_the_next_turn(server: AgentServer, client: AsyncOpenAI) -> None:
    server.say(ANSWER)
    tools: Any = [WEATHER]
    said, thought, arguments, reason = "", "", "", None
    stream: Any = await client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=tools, stream=True
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        said += delta.content or ""
        thought += getattr(delta, "reasoning_content", None) or ""
        arguments += "".join(call.function.arguments or "" for call in delta.tool_calls or ())
        reason = chunk.choices[0].finish_reason or reason
    assert (said, thought, arguments) == ("", "It is far.", '{"city": "Oslo"}')
    assert reason == "tool_calls"
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]
    server.say(FINAL)
    await client.chat.completions.create(model="tiny", messages=history, tools=tools)
    assert "<|channel|>analysis<|message|>It is far.<|end|><|start|>assistant to=" in server.prompt
    assert '<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>' in server.prompt

"""First requests of coding agents, as they were recorded, with their texts and ids taken out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_server import AgentServer, agent_parser, agent_server

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("agents_requests.json").read_text(encoding="utf-8")
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[AgentServer]:
    async with agent_server(agent_parser(tmp_path)) as made:
        yield made


def functions(name: str) -> list[str]:
    """Return the functions that a recorded request has, without tools that the vendor runs."""
    tools = RECORDED[name]["body"]["tools"]
    return [tool["name"] for tool in tools if tool.get("type", "function") == "function"]


@pytest.mark.parametrize("name", RECORDED)
async def test_recorded_requests_are_answered(server: AgentServer, name: str) -> None:
    """Codex also has tools that are no functions, which are refused by name."""
    body = {**RECORDED[name]["body"], "model": "tiny"}
    if name.startswith("codex"):
        refused = await server.client.post(RECORDED[name]["path"], json=body)
        assert refused.status_code == 400
        assert "only tools of type 'function'" in refused.json()["error"]["message"]
        body["tools"] = [tool for tool in body["tools"] if tool["type"] == "function"]
    if "max_tokens" in body:
        body["max_tokens"] = 100  # the model has no room for 64,000
    answer = await server.client.post(RECORDED[name]["path"], json=body)
    assert answer.status_code == 200, answer.text
    last = "message_stop" if "messages" in RECORDED[name]["path"] else "response.completed"
    assert f"event: {last}" in answer.text
    assert all(f'"{function}"' in server.prompt for function in functions(name))

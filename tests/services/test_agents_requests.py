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
    """Return the names of a recorded request's functions, as the model reads them."""
    names = []
    for tool in RECORDED[name]["body"]["tools"]:
        match tool:
            case {"type": "namespace", "name": namespace, "tools": inside}:
                names += [f"{namespace}__{each['name']}" for each in inside]
            case {"name": function}:
                names.append(function)
    return names


@pytest.mark.parametrize("name", RECORDED)
async def test_recorded_requests_are_answered(server: AgentServer, name: str) -> None:
    body = {**RECORDED[name]["body"], "model": "tiny"}
    if "max_tokens" in body:
        body["max_tokens"] = 100  # the model has no room for 64,000
    answer = await server.client.post(RECORDED[name]["path"], json=body)
    assert answer.status_code == 200, answer.text
    last = "message_stop" if "messages" in RECORDED[name]["path"] else "response.completed"
    assert f"event: {last}" in answer.text
    assert all(f'"{function}"' in server.prompt for function in functions(name))
    assert '"web_search"' not in server.prompt

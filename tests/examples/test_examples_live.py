"""Examples against real ranks: a bound through OpenAI's client, and a policy of one's own."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path

import pytest
from http_over_ranks import served

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


async def test_a_bound_through_openais_client(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(tiny_llama) as server:
        words = ["bounds.py", "--base-url", f"{server.client.base_url}/v1", "Who?"]
        monkeypatch.setattr(sys, "argv", words)
        await asyncio.to_thread(runpy.run_path, str(EXAMPLES / "bounds.py"), run_name="__main__")
        await server.settled()
    said = capsys.readouterr().out
    assert "{'attention': 'exact'}: " in said
    assert "'max_accuracy_loss': 0.01}: " in said
    assert said.count(" tokens, exact: ") == 2, "nothing was measured for this model"


@pytest.mark.parametrize("elastic", [False, True])
async def test_a_policy_of_ones_own_serves(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    policy = "shortest_first:ShortestFirst"
    async with served(tiny_llama, policy=policy, options={}, elastic=elastic) as server:
        body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(
            *(
                server.client.post("/v1/completions", json={**body, "prompt": "ab" * length})
                for length in (300, 20, 100)
            )
        )
        for answer in answers:
            assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
        await server.settled()

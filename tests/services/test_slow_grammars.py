"""A grammar that compiles slowly keeps its own request waiting, and no other."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from real_cell import ELASTIC, PAIR, answer, real_cell
from tiny_checkpoints import reference_tokens

from csps.models.tokenizers.grammar import Grammars, regex_grammar
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import Sampling
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec

GRAMMAR = regex_grammar("[a-c]{6}")
TOKENS = 6


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_other_requests_go_on_while_a_grammar_compiles(
    tiny_llama: Path, roles: tuple[GangRole, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own request is tried again until the compiled grammar is there."""
    go_on, compiling = threading.Event(), threading.Event()

    compile_now = Grammars._compile

    def compile_slowly(grammars: Grammars, grammar: str) -> LLMatcher:
        compiling.set()
        assert go_on.wait(60), "nobody lets it go on"
        return compile_now(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_slowly)
    policy = "context_parallel" if roles == ELASTIC else "csps"
    async with real_cell(tiny_llama, policy, roles=roles) as cell:

        def ask(grammar: str = "") -> RequestHandle:
            sampling = Sampling(temperature=0.0, max_tokens=TOKENS, grammar=grammar)
            prompt = np.arange(100, dtype=np.int32)
            return cell.service.submit(
                RequestSpec(client_request_id="r", prompt=prompt, sampling=sampling)
            )

        slow = ask(GRAMMAR)
        assert await asyncio.to_thread(compiling.wait, 60)
        assert await answer(ask()) == reference_tokens(tiny_llama, list(range(100)), TOKENS)
        assert not slow.timings.tokens
        go_on.set()
        assert all(ord("a") - 33 <= token <= ord("c") - 33 for token in await answer(slow))
        await cell.settled()

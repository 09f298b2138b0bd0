"""Answers of a random model validate under schemas that bound every length, whatever happens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from arbitrary_layout_policy import AnyLayout
from bounded_schemas import bounded_schemas
from gang_threads import eventually
from real_cell import ELASTIC, Cell, real_cell
from tiny_checkpoints import make_checkpoint

from csps.models.tokenizers.grammar import json_grammar
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.gang.messages import Sampling
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec

END = 257
LONGEST = 3000
AT_ONCE = 12
DEADLINE_S = 1800


async def check_answers(model: Path, *, kinds: int, answers: int) -> None:
    """Have answers move between instances, and kill a rank in the middle of some."""
    tokenizer = Tokenizer(model)
    work = [
        (schema, answers * number + answer)
        for answer in range(answers)
        for number, schema in enumerate(bounded_schemas(kinds))
    ]
    handles: list[RequestHandle] = []
    places = asyncio.Semaphore(AT_ONCE)
    half = asyncio.Event()
    policy: Any = AnyLayout(7, moves=True)
    slots = AT_ONCE * (LONGEST + 500)
    async with real_cell(model, policy, roles=ELASTIC, mortal="elastic", kv_slots=slots) as cell:

        async def ask(schema: dict[str, Any], seed: int) -> None:
            async with places:
                sampling = Sampling(
                    seed=seed,
                    max_tokens=LONGEST,
                    stop_token_ids=(END,),
                    grammar=json_grammar(schema),
                )
                prompt = np.random.default_rng(seed).integers(0, 256, 20 + seed % 400)
                handle = cell.service.submit(
                    RequestSpec(
                        client_request_id=f"r{seed}",
                        prompt=prompt.astype(np.int32),
                        sampling=sampling,
                    )
                )
                handles.append(handle)
                if len(handles) > len(work) // 2:
                    half.set()
                tokens = [token.token async for token in handle]
            assert handle.finish_reason == "stop", f"{handle.finish_reason}: {schema}"
            assert tokens.pop() == END
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for schema, seed in work:
                group.create_task(ask(schema, seed))
            await half.wait()
            await replace_gang(cell, handles)
        await cell.settled()
    assert len(handles) == len(work)
    assert any(handle.timings.attempts > 1 and handle.generated_tokens.size for handle in handles)
    assert any(event.kind == "migrate" for handle in handles for event in handle.elastic)


async def replace_gang(cell: Cell, handles: list[RequestHandle]) -> None:
    """Kill a rank while answers are in progress, and start another gang."""
    await eventually(lambda: any(handle.state == "decoding" for handle in handles))
    cell.gangs["elastic"].process(1).kill()
    await eventually(lambda: not cell.service.ready)
    await cell.start_gang("elastic")
    cell.publish()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
async def test_a_thousand_answers_validate_across_a_killed_rank_and_moves(tmp_path: Path) -> None:
    await check_answers(make_checkpoint(tmp_path), kinds=50, answers=20)

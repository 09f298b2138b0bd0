"""The policy `tetris` on the deployed server, by a line of its settings: prompts in chunks on four
prefill ranks and two decode ranks."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from pathlib import Path

import openai
import pytest
from deployed_server import DEADLINE_S, MODEL, POLL_S, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens

from csps.actors.timing.timeline import PHASE, RANK
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.telemetry.traces.spans import Trace, read_spans, span_files, traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = [random_tokens(length, seed=length) for length in (4_000, 150, 2_500, 700, 3_000, 1_200)]
STEP = "csps.job"


async def answers(server: Deployed) -> list[str]:
    """Request all answers at once, so that prompts begin on fewer instances than they end on."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    ) as client:
        wanted = [
            client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=6,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for prompt in PROMPTS
        ]
        return [answer.choices[0].text for answer in await asyncio.gather(*wanted)]


def test_chunks_on_growing_groups_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=65_536)
    args = {
        "scheduling": {"policy": "tetris", "improvement_rate": 0.0, "min_chunk": 64},
        "prefill": {"instances": 4, "kv_slots": 16_384},
        "decode": {"instances": 2, "kv_slots": 16_384},
        "telemetry": {"spans_dir": str(tmp_path / "traces"), "timeline_sample": 1.0},
    }
    with deployed(model, tmp_path, **args) as server:
        found = asyncio.run(answers(server))
        server.assert_only_cache_left()
        tokenizer = Tokenizer(model)
        assert found == [tokenizer.decode(reference_tokens(model, prompt, 6)) for prompt in PROMPTS]
        check_chunks(asyncio.run(written(tmp_path / "traces")))


async def written(folder: Path) -> list[Trace]:
    """Return traces of all prompts, once the ranks have written their last spans."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = traces(read_spans(span_files(folder)))
            received = [
                trace for trace in found if any(span.name == "kv.landing" for span in trace.spans)
            ]
            if len(received) == len(PROMPTS) and all(map(groups, received)):
                return received
            await asyncio.sleep(POLL_S)


def check_chunks(found: list[Trace]) -> None:
    """Check that some prompt had several chunks on growing groups, and history was balanced."""
    chains = list(filter(None, map(groups, found)))
    assert max(map(len, chains)) > 1
    for chain in chains:
        assert all(before <= after for before, after in itertools.pairwise(chain))
    phases = {span.attributes.get(PHASE) for trace in found for span in trace.spans}
    assert {"balancing", "kv transfer"} <= phases


def groups(trace: Trace) -> list[set[int]]:
    """Return ranks of the steps of a trace, in their order."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for span in trace.spans:
        if span.name == "prefill.compute":
            ranks[span.attributes[STEP]].add(span.attributes[RANK])
    return [ranks[step] for step in sorted(ranks)]

"""LoongServe on a real Ray: an elastic gang of four against the policy `csps`, token by token."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from deployed import DEADLINE_S, MODEL, POLL_S, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens

from csps.loadgen.workloads.named import workload
from csps.services.telemetry.traces.spans import Span, read_spans, span_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LONGEST, ANSWER, REQUESTS = 16_000, 24, 12
KV_SLOTS = 20_000
TIE = 1e-4
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "llama", max_position_embeddings=65_536)


def mixed() -> list[dict[str, Any]]:
    """LoongServe's Mixed workload, its longest prompt scaled to `LONGEST`."""
    drawn = workload("mixed")
    inputs, outputs = drawn.draw(REQUESTS, np.random.default_rng(3))
    lengths = np.maximum(1, inputs * LONGEST // drawn.longest_input)
    return [
        {
            "model": MODEL,
            "prompt": random_tokens(int(length), seed=seed),
            "max_tokens": int(min(output, ANSWER)),
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
        }
        for seed, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]


def answers(server: Deployed, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log-probabilities of all answers, sent at once."""

    async def all_of_them() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S * 4) as client:
            posts = (client.post("/v1/completions", json=body) for body in bodies)
            return [it.raise_for_status().json() for it in await asyncio.gather(*posts)]

    return [it["choices"][0]["logprobs"] for it in asyncio.run(all_of_them())]


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal tokens, or first different where the two likeliest are as good as equal."""
    for at, (one, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if one != other:
            best, second = sorted(theirs["top_logprobs"][at].values(), reverse=True)[:2]
            assert best - second <= TIE, f"token {at}: {one!r}, not {other!r}"
            return


def spans_of(server: Deployed) -> list[Span]:
    spans = read_spans(span_files(Path(server.config.settings.telemetry.spans_dir)))
    return [it for it in spans if it.trace_id == TRACE]


def check_trace(server: Deployed) -> None:
    """A prompt on four instances whose KV stays on one, and whose answer needs a second one."""
    body = {
        "model": MODEL,
        "prompt": random_tokens(LONGEST, seed=99),
        "max_tokens": KV_SLOTS - LONGEST + 500,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(5):
            next(lines)
    # Ranks write their spans when they like.
    wanted = Counter({"prefill.compute": 4, "elastic.scale_down": 1, "elastic.scale_up": 1})
    deadline = time.monotonic() + DEADLINE_S
    while not wanted <= (found := Counter(it.name for it in spans_of(server))):
        assert time.monotonic() < deadline, f"only {found}"
        time.sleep(POLL_S)
    spans = spans_of(server)
    (down,) = [it for it in spans if it.name == "elastic.scale_down"]
    assert down.attributes["csps.elastic.tokens"] == LONGEST


def test_loongserve_says_what_csps_says(model: Path, tmp_path: Path) -> None:
    bodies = mixed()
    assert max(len(it["prompt"]) for it in bodies) > 2_000
    two = {"instances": 2, "kv_slots": 65_536}
    scheduling = {"policy": "csps"}
    with deployed(model, tmp_path, prefill=two, decode=two, scheduling=scheduling) as server:
        expected = answers(server, bodies)
    elastic = {"instances": 4, "kv_slots": KV_SLOTS}
    with deployed(model, tmp_path, elastic=elastic, scheduling={"policy": "loongserve"}) as server:
        for ours, theirs in zip(answers(server, bodies), expected, strict=True):
            check_same(ours, theirs)
        check_trace(server)
        server.assert_all_slots_free()
        assert server.gauge("request_retries_total") == 0
        assert server.gauge("request_failures_total") == 0

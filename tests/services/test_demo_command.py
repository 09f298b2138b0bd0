"""What `csps demo` says of an answer, whether it was computed or found."""

from __future__ import annotations

import json

import pytest

from csps.models.needle_prompts.prompt import NeedleConfig, generate
from csps.services.launch.demo_command import Streamed, summary

REPORT = {
    "plan": {"attention": "exact", "strategy": "ring_kv", "reason": "short"},
    "placement": {
        "bounds": [0, 100],
        "shares": [{"span": {"start": 0, "stop": 100}, "instance": 2}],
        "group": [0],
        "master": 2,
    },
}


@pytest.mark.parametrize("cached", [0, 64])
def test_reused_kv_is_told_beside_the_time_that_it_saved(cached: int) -> None:
    prompt = generate(NeedleConfig(length=100, seed=1))
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    streamed = Streamed(text=prompt.answer, stamps=[11.5, 11.6], usage=usage, report=REPORT)
    lines = summary(prompt, streamed, 10.0)
    assert "(right)" in lines[0]
    times = next(number for number, line in enumerate(lines) if "first token: 1.50 s" in line)
    assert ("KV of 64 tokens" in lines[times + 1]) == bool(cached)
    assert ("earlier request" in json.dumps(lines)) == bool(cached)

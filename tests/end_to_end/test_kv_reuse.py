"""A deployed server with its default prefix cache: later turns, the death of the gang that retains
it, and files from which it comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from deployed_server import DEADLINE_S, MODEL, Deployed, deployed
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.scheduling.events.limits import BLOCK_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIRST = random_tokens(700, seed=1)
SECOND = [*FIRST, *random_tokens(150, seed=2)]
THIRD = [*SECOND, *random_tokens(40_000, seed=3)]
ANSWER = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "llama", max_position_embeddings=65_536)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Deployed]:
    with deployed(model, tmp_path, kv_reuse={"enabled": True}) as server:
        yield server


def ask(server: Deployed, prompt: list[int], **more: str) -> tuple[str, int]:
    """Return the greedy answer and the number of reused prompt tokens, once nothing runs any
    more.
    """
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0
    ) as client:
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=ANSWER,
            temperature=0,
            extra_body={"ignore_eos": True, **more},
        )
    server.wait_zero("num_requests_running")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


def whole_blocks(prompt: list[int]) -> int:
    return len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS


def test_turns_are_right_before_and_after_their_kv_dies(server: Deployed, model: Path) -> None:
    expected = Tokenizer(model).decode(reference_tokens(model, SECOND, ANSWER))
    assert ask(server, FIRST)[1] == 0
    assert ask(server, SECOND) == (expected, whole_blocks(FIRST))
    assert ask(server, SECOND, cache_salt="fresh") == (expected, 0)

    started = server.gauge("request_queue_time_seconds_count")
    answers: list[tuple[str, int]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, THIRD)))
    asking.start()
    server.wait_gauge("request_queue_time_seconds_count", started + 1)
    server.kill_replica("PrefillGang")
    asking.join(DEADLINE_S)
    fresh, _ = ask(server, THIRD, cache_salt="fresh")
    assert answers == [(fresh, 0)]  # the prefix cache ends with its gang

    assert ask(server, SECOND)[0] == expected
    assert ask(server, SECOND) == (expected, whole_blocks(SECOND))  # on the gang that came after
    server.wait_ready()


LONG = random_tokens(12_000, seed=4)
"""A prompt that no machine computes as fast as its KV is read."""
TURNS = [[*LONG, *random_tokens(100, seed=seed)] for seed in (5, 6)]


def test_kv_in_files_outlives_a_killed_gang_and_a_redeployment(model: Path, tmp_path: Path) -> None:
    files = {"enabled": True, "max_share": 1.0, "files": {"path": str(tmp_path / "kv")}}
    with deployed(model, tmp_path, kv_reuse=files) as server:
        assert ask(server, LONG)[1] == 0
        server.wait_gauge("kv_saved_tokens_total", whole_blocks(LONG))
        right = [ask(server, turn, cache_salt="fresh") for turn in TURNS]

        ranks = server.pids("PrefillGang")
        server.kill_replica("PrefillGang")
        server.wait_replaced("PrefillGang", ranks)
        assert ask(server, TURNS[0]) == (right[0][0], whole_blocks(LONG))
        assert server.gauge("kv_restored_tokens_total") == whole_blocks(LONG)

        ranks = server.pids("DecodeGang")
        successor = server.redeploy(queue={"max_waiting": 300})
        successor.wait_replaced("DecodeGang", ranks)
        assert ask(successor, TURNS[1]) == (right[1][0], whole_blocks(LONG))
        assert successor.gauge("kv_restored_tokens_total") == whole_blocks(LONG)

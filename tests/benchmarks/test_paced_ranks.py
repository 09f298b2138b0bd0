"""Paced ranks speak the ranks' protocol, and keep to the model's times and slots."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from paced import compare, processes, tetris
from paced.clock import PacedTimeline
from paced.decode import PacedDecode
from paced.http_client import Connection
from paced.prefill import PacedPrefill
from paced.ranks import Words

from csps.loadgen.results.result import read_result
from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    CancelSequence,
    JoinBatch,
    ReserveKv,
    SampledTokens,
)
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc.schema import pack, unpack

SECRET = b"only for tests"
PATIENCE_S = 60.0
CLUSTER = parse_cluster(
    {
        "servers": [
            {"instances": 2, "permissions": ["prefill"], "kv_slots": 1000},
            {"instances": 2, "permissions": ["decode"], "kv_slots": 1000},
        ],
        "latency": {"steps": {1: [1e-3, 0, 0, 0]}, "decode": {2: [1e-3, 0, 0]}},
    },
    name="paced",
)


ELASTIC = parse_cluster(
    {
        "servers": [{"instances": 2, "permissions": ["prefill", "decode"], "kv_slots": 1000}],
        "latency": {"steps": {1: [1e-3, 1e-5, 0, 0]}, "decode": {2: [1e-3, 0, 0]}},
    },
    name="paced",
)


class Cell:
    """Both gangs, and all that they tell."""

    def __init__(self) -> None:
        self.clock = PacedTimeline()
        words = Words(range(100, 200))
        self.decode = PacedDecode(self.clock, CLUSTER, words, SECRET)
        self.prefill = PacedPrefill(self.clock, CLUSTER, self.decode, words, SECRET)
        self.messages: list[tuple[str, int, str, Any]] = []
        self.news = asyncio.Event()
        self.gangs: dict[str, GangClient] = {}

    async def start(self) -> None:
        for role, ranks in (("prefill", self.prefill.ranks), ("decode", self.decode.ranks)):
            gang = GangClient(role, await ranks.start(), self._notified)  # type: ignore[arg-type]
            await gang.connect(secret=SECRET, router_id="test")
            await gang.attach(1)
            self.gangs[role] = gang

    async def close(self) -> None:
        for gang in self.gangs.values():
            await gang.close()
        await self.prefill.ranks.close()
        await self.decode.ranks.close()

    def _notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        self.messages.append((gang.role, rank, method, payload))
        self.news.set()

    def received(self, method: str) -> list[tuple[int, Any]]:
        return [(rank, payload) for _, rank, own, payload in self.messages if own == method]

    def tokens(self) -> list[int]:
        frames = [unpack(SampledTokens, payload) for _, payload in self.received("tokens")]
        return [token.index for frame in frames for token in frame.each()]

    async def until(self, method: str, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.received(method)) < count:
                self.news.clear()
                await self.news.wait()

    async def ask(self, sequence_id: int, *, tokens: int, generated_tokens: int = 0) -> None:
        """Reserve and prefill 10 tokens on both instances, to land on both decode instances."""
        slices = (
            KvSlice(0, 0, 4),
            KvSlice(1, 4, 10),
        )
        reserve = ReserveKv(
            sequence_id=sequence_id,
            epoch="e",
            slices=slices,
            master=1,
            prompt_tokens=10,
            output_tokens=tokens - generated_tokens,
            first_index=generated_tokens,
        )
        await self.gangs["decode"].call_all("reserve", pack(reserve))
        chunk = PrefillChunk(
            sequence_id=sequence_id,
            start=0,
            length=10,
            destinations=slices,
            decoded=tokens - generated_tokens > 1,
            first_index=generated_tokens,
        )
        step = PrefillStep(step_id=sequence_id, group=(0, 1), bounds=(0, 5, 10), chunks=(chunk,))
        self.gangs["prefill"].notify_all("prefill", pack(step))


@pytest.fixture
async def cell() -> Any:
    cell = Cell()
    await cell.start()
    try:
        yield cell
    finally:
        await cell.close()


async def test_one_request_from_reservation_to_freed_slots(cell: Cell) -> None:
    await cell.ask(7, tokens=4)
    await cell.until("received", 2)
    await cell.until("prefill_done", 2)
    assert sorted((rank, message["tokens"]) for rank, message in cell.received("received")) == [
        (0, 4),
        (1, 6),
    ]
    assert {rank for rank, _ in cell.received("prefill_done")} == {0, 1}
    assert cell.tokens() == [0]
    cell.gangs["decode"].notify(0, "join", pack(JoinBatch(sequence_id=7, first_token=100)))
    await cell.until("freed", 2)
    assert cell.tokens() == [0, 1, 2, 3]
    assert unpack(SampledTokens, cell.received("tokens")[-1][1]).finish_reasons == {0: "length"}
    assert (cell.prefill.steps, cell.decode.sequences) == (0, 0)


async def test_an_answer_that_was_begun_goes_on(cell: Cell) -> None:
    await cell.ask(8, tokens=5, generated_tokens=2)
    await cell.until("received", 2)
    cell.gangs["decode"].notify(0, "join", pack(JoinBatch(sequence_id=8, first_token=100)))
    await cell.until("freed", 2)
    assert cell.tokens() == [2, 3, 4]


async def test_a_cancelled_request_gives_its_slots_back(cell: Cell) -> None:
    await cell.ask(9, tokens=500)
    await cell.until("received", 2)
    cell.gangs["decode"].notify(0, "join", pack(JoinBatch(sequence_id=9, first_token=100)))
    await cell.until("tokens", 3)
    for gang in cell.gangs.values():
        gang.notify_all("cancel", pack(CancelSequence(sequence_id=9)))
    await cell.until("freed", 2)
    assert cell.decode.sequences == 0


async def test_a_piggybacked_prompt_is_computed_in_chunks() -> None:
    """Runs on an elastic gang, beside a decoding sequence. The first rank receives the command
    without the prompt, because another rank is own master.
    """
    decode = PacedDecode(PacedTimeline(), ELASTIC, Words(range(100, 200)), SECRET)
    frames: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
    gang = GangClient(
        "elastic",
        await decode.ranks.start(),
        lambda _gang, _rank, method, payload: frames.put_nowait((method, payload)),
    )
    try:
        await gang.connect(secret=SECRET, router_id="test")
        await gang.attach(1)
        for sequence_id, prompt, tokens in ((1, 4, 8), (2, 21, 2)):
            reserve = ReserveKv(
                sequence_id=sequence_id,
                epoch="e",
                slices=(KvSlice(1, 0, prompt),),
                master=1,
                prompt_tokens=prompt,
                output_tokens=tokens,
            )
            await gang.call_all("reserve", pack(reserve))
        generated_tokens: list[tuple[tuple[int, int], ...]] = []
        for sequence_id in (1, 2):
            gang.notify(
                0, "join", pack(JoinBatch(sequence_id=sequence_id, first_token=None, budget=6))
            )
        async with asyncio.timeout(PATIENCE_S):
            while sum(map(len, generated_tokens)) < 10:
                method, payload = await frames.get()
                if method == "tokens":
                    frame = unpack(SampledTokens, payload)
                    generated_tokens.append(
                        tuple(zip(frame.sequence_ids, frame.indices, strict=True))
                    )
    finally:
        await gang.close()
        await decode.ranks.close()
    # Beside each token of the first, an iteration computes 5 tokens of the second prompt; which
    # begins with the first one's, or after two grants at most.
    first, second = (
        [token for row in generated_tokens for token in row if token[0] == sequence_id]
        for sequence_id in (1, 2)
    )
    assert first == [(1, index) for index in range(8)]
    assert second == [(2, 0), (2, 1)]
    beside = next(number for number, row in enumerate(generated_tokens) if (2, 0) in row)
    assert 4 <= beside <= 6


async def test_actions_run_at_the_times_they_were_planned_for() -> None:
    """However late the loop is, no lateness is handed on to what follows."""
    clock = PacedTimeline()
    done = asyncio.Event()
    begin = clock.now_ns
    times: list[int] = []

    def act() -> None:
        times.append(clock.now_ns - begin)
        if len(times) == 50:
            done.set()
        else:
            clock.at(clock.now_ns + 300_000, act)

    clock.at(begin + 300_000, act)
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    assert times == [300_000 * (number + 1) for number in range(50)]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param("16", "csps", marks=pytest.mark.slow),
        ("elastic-4", "chunked_prefill"),
    ],
)
async def test_the_router_serves_from_paced_ranks(name: str, policy: str) -> None:
    """Runs three processes like a benchmark, and leaves nothing over."""
    cluster = str(compare.CLUSTERS / f"{name}.yaml")
    with processes.served(cluster, policy, *compare.POLICY_OPTIONS[policy]) as server:
        connection = Connection(server.port)
        await connection.open()
        streamed = await connection.ask(
            {
                "model": "paced",
                "prompt": [300] * 500,
                "max_tokens": 5,
                "ignore_eos": True,
                "stream": True,
            }
        )
        whole = await connection.ask({"model": "paced", "prompt": [300] * 50, "max_tokens": 5})
        connection.close()
    assert (streamed.status, streamed.events) == (200, 5)
    assert whole.status == 200
    assert b'"completion_tokens":5' in whole.body
    assert server.after["left"] == 0


@pytest.mark.slow
def test_tetris_traces_reach_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts cut in chunks and whole ones, a result each and the table."""
    names = ["tetris", "fixed_sp 16"]
    options = ["--traces", "long", "--policies", *names, "--seconds", "2"]
    monkeypatch.setattr("sys.argv", ["tetris.py", *options, "--results", str(tmp_path)])
    tetris.main()
    rows = json.loads((tmp_path / "paced-tetris.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == names
    for name, row in zip(names, rows, strict=True):
        result = read_result(tmp_path / f"paced-long-{name.replace(' ', '')}.json")
        assert result["completed"] == row["requests"] == 4
        assert result["p50_ttft_ms"] == pytest.approx(1e3 * row["p50_s"], abs=1)

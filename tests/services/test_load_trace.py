"""What a server got becomes a trace that the simulator reads, without a word of text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang_threads import eventually
from http_over_ranks import served

from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.rates_command import main as rates
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.request import FittedRequests
from csps.loadgen.workloads.traces import read_trace
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.messages import Sampling
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import ApiKey, PrefixKey, RequestSpec
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.load_trace import HASH_BLOCK_TOKENS, LoadTrace

SESSION = "the talk about violet umbrellas"


async def test_what_a_server_got_can_be_simulated(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    trace = LoadTrace(path)
    rng = np.random.default_rng(1)
    first = rng.integers(0, 256, 1100).tolist()
    async with served(
        tiny_llama, reuse=True, keys=("key-of-mine",), load_trace=trace, kv_slots=4096
    ) as server:

        async def complete(prompt: list[int], slo: dict[str, str], **more: Any) -> list[int]:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
            headers = {"authorization": "Bearer key-of-mine", **slo}
            answer = await server.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return prompt

        ttft = {"x-slo-ttft-ms": "2500"}
        await complete(first, ttft, session_id=SESSION)
        second = [*first, *rng.integers(0, 256, 100).tolist()]
        await complete(second, {}, session_id=SESSION)
        await complete(rng.integers(0, 256, 300).tolist(), {}, csps={"max_ttft_ms": 9000})
        await complete(rng.integers(0, 256, 40).tolist(), {}, csps={"strategy": "ring"})
        too_long = {"model": "tiny", "prompt": "x", "max_tokens": 10**6}
        headers = {"authorization": "Bearer key-of-mine"}
        refused = await server.client.post("/v1/completions", json=too_long, headers=headers)
        assert refused.status_code == 400
        body = {"model": "tiny", "prompt": first, "max_tokens": 900, "ignore_eos": True}
        asking = server.client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
        )
        async with asking as answer:
            await anext(answer.aiter_bytes())
        await eventually(lambda: len(path.read_text().splitlines()) == 5)
    trace.close()

    read = {request.input_length: request for request in read_trace(path)}
    turns = [request for request in read_trace(path) if request.conversation]
    assert [turn.input_length for turn in turns] == [1100, 1200]
    assert turns[1].arrival_ns == 0 < turns[1].delay_ns < 10**9
    assert turns[0].hash_ids == turns[1].hash_ids
    assert len(turns[0].hash_ids) == 2
    assert turns[0].slo is not None
    assert turns[0].slo.ttft == 2500
    assert {request.output_length for request in turns} == {8}
    objective = read[300].objective
    assert objective is not None
    assert objective.max_ttft_ms == 9000
    assert read[40].cls.startswith("ring")
    left = next(request for request in read_trace(path) if request.leaves_after_ns is not None)
    assert (left.input_length, left.output_length, left.max_tokens) == (1100, 900, 900)
    assert left.hash_ids == turns[0].hash_ids

    requests = tuple(read_trace(path))
    found = simulate(
        load_cluster("tetris-16"), "fixed_sp", {}, FittedRequests(requests=requests, cut=0)
    )
    assert all(outcome.ended_ns > 0 for outcome in found.outcomes)
    check_silent(path.read_text(), first)


def check_silent(text: str, tokens: list[int]) -> None:
    """Check that neither words nor tokens nor their known hashes are in a trace."""
    assert "umbrella" not in text
    assert "key-of-mine" not in text
    assert ", ".join(map(str, tokens[:3])) not in text
    for row in map(json.loads, text.splitlines()):
        assert {type(value) for value in row.values()} <= {int, float, str, list, dict}
        numbers = set(row["hash_ids"])
        for owner in (b"", b"key-of-mine"):
            prefix = PrefixKey.of(owner=owner, salt=None, block=HASH_BLOCK_TOKENS)
            hashes = prefix.hashes(np.array(tokens, np.int32))
            for size in (4, 5, 6, 7, 8, 16):
                assert not numbers & {int.from_bytes(known[:size], "big") for known in hashes}


def ended(
    tokens: int = 10, *, session: str | None = None, submitted_s: float, ended_s: float
) -> RequestHandle:
    prompt = np.arange(tokens, dtype=np.int32)
    prefix = PrefixKey(b"owner", 64)
    spec = RequestSpec(
        client_request_id="r",
        api_key=ApiKey("alice", 1, b"digest"),
        prompt=prompt,
        sampling=Sampling(temperature=0.0, max_tokens=5),
        prefix=prefix,
        hashes=prefix.hashes(prompt),
        session=session,
    )
    handle = RequestHandle(spec, request_id=1, on_cancel=lambda handle: None)
    handle.finish("length")
    handle.marks.submitted, handle.marks.ended = submitted_s, ended_s
    return handle


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_who_does_not_wait_for_the_answer_is_no_conversation(tmp_path: Path) -> None:
    trace = LoadTrace(tmp_path / "a")
    for submitted_s, ended_s in ((1e9, 1e9 + 5), (1e9 + 3, 1e9 + 6), (1e9 + 7, 1e9 + 8)):
        trace.record(ended(session="s", submitted_s=submitted_s, ended_s=ended_s))
    first, beside, later = rows(tmp_path / "a")
    assert first["session_id"] == later["session_id"]
    assert "session_id" not in beside
    assert (later["delay"], "timestamp" in later) == (2000, False)


def test_numbers_differ_between_routers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        trace = LoadTrace(tmp_path / name)
        trace.record(ended(2000, session="s", submitted_s=0.0, ended_s=1.0))
    (one,), (other,) = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert len(one["hash_ids"]) == 2000 // HASH_BLOCK_TOKENS
    assert not set(one["hash_ids"]) & set(other["hash_ids"])
    assert one["session_id"] != other["session_id"]
    assert one["tenant"] == other["tenant"] == "alice"


def test_tetris_is_profiled_on_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later turns have no time of their own, and are planned behind those before."""
    trace = LoadTrace(tmp_path / "a")
    for number in range(12):
        begin_s = 1e9 + 0.1 * number
        trace.record(
            ended(20_000, session=f"s{number % 4}", submitted_s=begin_s, ended_s=begin_s + 0.05)
        )
    assert sum("delay" in row for row in rows(tmp_path / "a")) == 8
    rates(["--cluster", "tetris-16", "--trace", str(tmp_path / "a")])
    assert "  - [0.5, 0." in capsys.readouterr().out


def test_a_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a"
    trace = LoadTrace(path, max_bytes=2000)
    for number in range(200):
        trace.record(ended(session="s", submitted_s=float(number), ended_s=number + 0.5))
        assert path.stat().st_size < 2400
    assert sorted(os.listdir(path.parent)) == ["a", "a.1"]
    # A conversation begins anew, because its first turn is in the other file.
    assert "timestamp" in rows(path)[0]
    assert read_trace(path)


def test_a_router_keeps_the_file_of_the_one_before(tmp_path: Path) -> None:
    before = LoadTrace(tmp_path / "a", max_bytes=2000)
    before.record(ended(submitted_s=0.0, ended_s=1.0))
    after = LoadTrace(tmp_path / "a")
    for number in range(100):  # it drains, and its file is full
        before.record(ended(submitted_s=0.0, ended_s=1.0))
        after.record(ended(tokens=20 + number, submitted_s=0.0, ended_s=1.0))
    assert [row["input_length"] for row in rows(tmp_path / "a")] == list(range(20, 120))
    assert {row["input_length"] for row in rows(tmp_path / "a.1")} == {10}
    assert sorted(os.listdir(tmp_path)) == ["a", "a.1"]


def test_a_file_that_cannot_be_written_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"telemetry\.request_trace: .*file/a"):
        LoadTrace(tmp_path / "file" / "a")


def test_a_full_disk_stops_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = LoadTrace(tmp_path / "a")

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("csps.services.telemetry.load_trace.os.write", full)
    for _ in range(3):
        trace.record(ended(submitted_s=0.0, ended_s=1.0))
    assert caplog.text.count("No space left") == 1


def test_the_setting_is_an_absolute_path(tmp_path: Path) -> None:
    path = TelemetrySettings(request_trace="run/requests.jsonl").resolved().request_trace
    assert path is not None
    assert Path(path).is_absolute()

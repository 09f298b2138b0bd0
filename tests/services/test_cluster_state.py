"""The server's state: as a snapshot of fake gangs, through the API, and in a headless browser at 4
and 64 instances."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_gangs import FakeCell, FakeGang, fake_cell
from fake_service import http_api
from live_server import serving

from csps.protocols.core.errors import FaultError
from csps.services.http.request_parser import RequestParser
from csps.services.launch.top_command import lines
from csps.services.launch.top_command import main as top
from csps.services.requests.request_spec import SloBounds
from csps.services.router.cluster_state import MOST_RUNNING, MOST_WAITING, StateSnapshots
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import AuthSettings, Settings

BROWSER_S = 60.0
KEYS = ["operator good-key", "client other-key"]


@pytest.fixture(scope="module")
def parser(tiny_llama: Path) -> RequestParser:
    return RequestParser(Settings(model=str(tiny_llama), served_model_name="tiny"))


def snapshots(cell: FakeCell, **slo: tuple[int, int]) -> StateSnapshots:
    return cell.service.snapshots(lambda: slo)


@asynccontextmanager
async def busy_cell(instances: int, requests: int = 12) -> AsyncIterator[FakeCell]:
    """Yield a cell with requests in every state: decoding, prefilling and waiting."""
    half = instances // 2
    gangs = {
        "prefill": FakeGang("prefill", "p1", instances=half),
        "decode": FakeGang("decode", "d1", instances=half, kv_slots=20_000),
    }
    async with fake_cell(**gangs) as cell:
        first = cell.submit(tokens=1500, client_request_id="decoding-<b>", max_tokens=40)
        await cell.decoding(first)
        for number in range(requests):
            cell.submit(
                tokens=4000 + 500 * (number % 7),
                client_request_id=f"request-{number}",
                max_tokens=60,
                slo=SloBounds(ttft_ms=60_000.0 * (1 + number)) if number % 2 else SloBounds(),
            )
        await asyncio.sleep(0)
        second = cell.submit(tokens=1200, client_request_id="last")
        assert not second.ended
        await asyncio.sleep(0)
        yield cell


async def test_a_snapshot_says_who_computes_what_and_where_kv_lies() -> None:
    async with busy_cell(4) as cell:
        state = snapshots(cell, ttft=(3, 1)).snapshot()
        lanes = {instance["name"]: instance for instance in state["instances"]}
        assert list(lanes) == ["prefill 0", "prefill 1", "decode 0", "decode 1"]
        assert all(lane["kv_used"] <= lane["kv_slots"] for lane in lanes.values())
        by_id = {request["id"]: request for request in state["requests"]}
        decoding = by_id["decoding-<b>"]
        assert (decoding["state"], decoding["prompt"]) == ("decoding", 1500)
        assert sum(decoding["kv"].values()) == 1500
        assert decoding["master"] in decoding["kv"]
        steps = [step for lane in lanes.values() for step in lane["steps"]]
        computed = {chunk["request"] for step in steps for chunk in step["chunks"]}
        prefilling = {one["id"] for one in state["requests"] if one["state"] != "decoding"}
        assert computed <= prefilling | {"?"}
        assert computed & prefilling
        queued = [one["id"] for one in state["queue"]]
        assert len(queued) == state["waiting"]
        assert not set(queued) & set(by_id)
        times = [one["first_token_in_ms"] for one in state["queue"]]
        assert all(time_ms > 0 for time_ms in times)
        with_slack = [one for one in state["queue"] if one["slack_ms"] is not None]
        slacks = [one["slack_ms"] for one in with_slack]
        assert slacks == sorted(slacks)  # least slack first
        assert state["slo"] == {"ttft": {"met": 3, "missed": 1}}
        assert state["running"] == len(state["requests"])


async def test_a_snapshot_is_bounded_and_made_once_for_all_who_look() -> None:
    async with busy_cell(4, requests=200) as cell:
        made = snapshots(cell)
        state = json.loads(made.encoded())
        assert state["waiting"] > MOST_WAITING == len(state["queue"])
        assert len(state["requests"]) <= MOST_RUNNING
        assert len(made.encoded()) < 200_000
        assert made.encoded() is made.encoded()


@asynccontextmanager
async def page(
    parser: RequestParser, cell: FakeCell, *, on: bool = True, **options: Any
) -> AsyncIterator[str]:
    """Serve the state of a cell over HTTP; yield the URL."""
    api = http_api(
        parser,
        cell.service,
        state=snapshots(cell, ttft=(9, 3), all=(7, 5)).encoded if on else None,
        **options,
    )
    async with serving(api.app()) as url:
        yield url


async def test_neither_state_nor_page_is_served_unless_set(parser: RequestParser) -> None:
    async with (
        fake_cell() as cell,
        page(parser, cell, on=False) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for path in ("/v1/csps/state", "/ui"):
            assert (await client.get(path)).status_code == 404
    assert Settings(model="needle").http.ui is False


async def test_the_state_is_for_those_who_may_look(parser: RequestParser) -> None:
    auth = AuthSettings(diagnostics=("operator",))
    async with (
        fake_cell() as cell,
        page(parser, cell, keys=ApiKeys(KEYS), auth=auth) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for key, status in (("good-key", 200), ("other-key", 403), ("no-key", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/v1/csps/state", headers=headers)).status_code == status
        assert (await client.get("/v1/csps/state")).status_code == 401
        shown = await client.get("/ui")  # the page itself has no data
        assert shown.status_code == 200
        assert "default-src 'none'" in shown.headers["content-security-policy"]
        assert not re.search(r"(src|href)=[\"']?(http|//)", shown.text)


async def test_top_shows_the_same_state_on_a_screen(
    parser: RequestParser, capsys: pytest.CaptureFixture[str]
) -> None:
    async with busy_cell(4) as cell:
        cell.submit(tokens=1000, client_request_id="evil\x1b[2J")
        async with page(parser, cell) as url:
            await asyncio.to_thread(top, ["--once", "--url", f"{url}/v1"])
            shown = capsys.readouterr().out
            assert "csps  4 instances" in shown
            for name in ("prefill 0", "prefill 1", "decode 0", "decode 1"):
                assert f"\n{name} " in shown
            assert "decoding-<b>" in shown
            assert "objectives met: ttft 9/12, all 7/12" in shown
            assert "first token in" in shown
            assert "\x1b" not in shown  # a client's name commands no terminal
        async with page(parser, cell, on=False) as url:
            with pytest.raises(FaultError, match="does not show its state"):
                await asyncio.to_thread(top, ["--once", "--url", url])


def test_a_screen_is_no_larger_than_the_terminal() -> None:
    state = {
        "policy": "csps", "instances": [], "requests": [], "slo": {}, "running": 0, "waiting": 99,
        "queue": [
            {"id": "r" * 99, "prompt": 9, "waited_ms": 1, "slack_ms": None, "first_token_in_ms": 1}
        ] * 99,
    }  # fmt: skip
    shown = list(lines(state, os.terminal_size((60, 20))))
    assert len(shown) == 19
    assert max(map(len, shown)) <= 60
    assert "more lines" in shown[-1]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("instances", [4, pytest.param(64, marks=pytest.mark.slow)])
async def test_a_browser_shows_the_state(
    parser: RequestParser, tmp_path: Path, instances: int
) -> None:
    async with busy_cell(instances) as cell, page(parser, cell) as url:
        dom = await browser(tmp_path, f"{url}/ui", "--dump-dom")
        assert dom.count('class="lane"') == instances
        assert 'data-shown="' in dom
        assert "decoding-&lt;b&gt;" in dom  # a client's name is text
        assert "first token in" in dom
        assert "9 of 12" in dom
        assert ">nothing runs<" not in dom


async def browser(tmp_path: Path, url: str, *options: str) -> str:
    """Open a page in a headless browser and return what it prints."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=1500", *options, url,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(BROWSER_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode()

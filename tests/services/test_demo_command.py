"""Test what `csps demo` prints about an answer, computed or reused."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from free_ports import free_port

from csps.models.needle_prompts.prompt import NeedleConfig, generate
from csps.protocols.core.errors import FaultError
from csps.services.launch.demo_command import StreamedAnswer, ask, plan_lines, summary, usage_hints
from csps.services.launch.deploy_config import read_config

CONFIG = Path(__file__).resolve().parents[2] / "config.yaml"
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
def test_reused_kv_is_shown_beside_the_time_that_it_saved(cached: int) -> None:
    prompt = generate(NeedleConfig(length=100, seed=1))
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    streamed = StreamedAnswer(text=prompt.answer, stamps=[11.5, 11.6], usage=usage, report=REPORT)
    lines = summary(prompt, streamed, 10.0)
    assert "(right)" in lines[0]
    times = next(number for number, line in enumerate(lines) if "first token: 1.50 s" in line)
    assert ("KV of 64 tokens" in lines[times + 1]) == bool(cached)
    assert ("earlier request" in json.dumps(lines)) == bool(cached)


def test_without_a_server_the_error_says_how_to_start_one() -> None:
    with pytest.raises(FaultError, match=r"no server at http://127.0.0.1:\d+ .*`make serve`"):
        ask(read_config(CONFIG, port=free_port()), "hello")


def test_a_key_that_may_not_ask_for_the_plan_gets_an_answer_all_the_same() -> None:
    assert plan_lines({}) == []


class _Guarded(BaseHTTPRequestHandler):
    """Answers whoever has the key, and breaks off in the middle."""

    def do_POST(self) -> None:
        known = self.headers["Authorization"] == "Bearer one"
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n')

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_it_has_the_servers_key_and_a_broken_connection_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CSPS_API_KEYS", "one,two")
    server = HTTPServer(("127.0.0.1", 0), _Guarded)
    thread = Thread(target=server.handle_request)
    thread.start()
    config = read_config(CONFIG, port=server.server_port)
    try:
        with pytest.raises(FaultError, match=r"the connection to .* broke"):
            ask(config, "hello")
    finally:
        thread.join(30)
        server.server_close()
    assert "Bearer $KEY" in usage_hints(config)

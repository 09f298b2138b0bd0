"""`csps ask` and `csps chat`: what they send, and what they show of the answer."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from free_ports import free_port

from csps.cli import main
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_request,
)
from csps.services.settings.settings import shipped_models

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class _Server(ThreadingHTTPServer):
    asked: list[tuple[str, dict[str, Any], str | None]]


class _Answer(BaseHTTPRequestHandler):
    """Streams the number of the request in two pieces."""

    server: _Server

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._send(b'{"error": {"message": "nothing is here"}}', 404)
            return
        self._send(json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        self.server.asked.append((self.path, request, self.headers["Authorization"]))
        chat = self.path.endswith("chat/completions")
        # What is sent is valid for the server that it is meant for.
        parse_request(ChatCompletionRequest if chat else CompletionRequest, body)
        pieces = ["answer ", str(len(self.server.asked))]
        choices = [{"delta": {"content": one}} if chat else {"text": one} for one in pieces]
        chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        chunks.append({"choices": [], "usage": USAGE})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._send("".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[_Server]:
    made = _Server(("127.0.0.1", 0), _Answer)
    made.asked = []
    thread = Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def url(server: _Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_question_about_files_is_one_message(
    server: _Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("Once.")
    (tmp_path / "two.txt").write_text("Twice.")
    files = ("--file", str(tmp_path / "one.txt"), "--file", str(tmp_path / "two.txt"))
    asked = ("ask", "--base-url", f"{url(server)}/v1", "--api-key", "secret", *files, "How often?")
    assert main(asked) == 0
    ((path, request, key),) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert request["messages"] == [{"role": "user", "content": "Once.\n\nTwice.\n\nHow often?"}]
    assert request["model"] == "served"
    shown = capsys.readouterr()
    assert shown.out == "answer 1"
    assert "7 tokens in (4 reused), 2 out, first token after" in shown.err


def test_a_model_without_a_chat_template_gets_a_prompt(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is found by the configuration."""
    model = shutil.copytree(shipped_models() / "needle", tmp_path / "plain")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The text.")))
    (tmp_path / "config.yaml").write_text(
        f"http_options: {{port: {server.server_port}}}\n"
        "applications: [{import_path: 'csps.services.app:build', args: {model: plain}}]\n"
    )
    assert main(["ask", "--file", "-", "Who?"]) == 0
    ((path, request, _),) = server.asked
    assert path == "/v1/completions"
    assert request["prompt"] == "The text.\n\nQuestion: Who?\nAnswer:"
    assert request["model"] == "plain"
    assert main(["chat"]) == 1


def test_a_conversation_has_its_turns(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand again\n/exit\nnever\n"))
    assert main(["chat", "--base-url", url(server), "--system", "Be brief."]) == 0
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "answer 1"}
    again = {"role": "user", "content": "and again"}
    assert [request["messages"] for _, request, _ in server.asked] == [
        [system, first],
        [system, first, answer, again],
    ]
    assert capsys.readouterr().out == "answer 1answer 2"


def test_an_address_needs_no_scheme(server: _Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--base-url", url(server).removeprefix("http://"), "Who?"]) == 0
    assert capsys.readouterr().out == "answer 1"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("{url}/other", "/other names no model: 404, nothing is here\n"),
        ("localhost:1", "no server at http://localhost:1 ("),
        ("http://[", "no server at http://[ ("),
    ],
)
def test_a_wrong_address_is_one_line(
    server: _Server, address: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "--base-url", address.format(url=url(server)), "Who?"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--file", "/nowhere"], "--file /nowhere: No such file"),
        ([], "no server at http://127.0.0.1:"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--base-url", f"http://127.0.0.1:{free_port()}", "--model", "any"]
    assert main(["ask", *base, *words, "Who?"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1

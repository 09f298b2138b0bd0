"""Run `csps ask` and `csps chat`: a question about a long text, and a conversation, in a terminal.

`Client` streams from any server with the OpenAI API; without options it is the one that was started
from this directory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx

from csps.models.tokenizers.chat_template import read_chat_template
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError, FaultError, abridged
from csps.services.launch.deploy_config import DeployConfig, find_config, read_config
from csps.services.launch.ray_head import RUN_DIR, command_for, find_head
from csps.services.settings.credentials import known_keys

DEPLOYED_FILE = "deployed.yaml"
"""Configuration of the running server, in `RUN_DIR`."""
DEADLINE_S = 600.0
"""Limit between two chunks of an answer; the first one takes longest."""
LIST_DEADLINE_S = 10.0
MAX_FILE_BYTES = 64 * 2**20
"""Largest text that is read into memory: a router takes less (`max_body_bytes`)."""
LEAVE = ("/exit", "/quit")
ABOUT_TEXT = "{text}\n\nQuestion: {question}\nAnswer:"
"""Prompt of a question about a text, for a model without a chat template."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client of one server."""

    url: str
    model: str
    key: str | None = None
    chats: bool = True
    """True if the server renders chats: its model has a template."""

    @classmethod
    def of(cls, config: DeployConfig) -> Client:
        """Return a client of the server with this configuration, with the first of its keys."""
        settings = config.settings
        keys = known_keys(settings.api_keys_file)
        return cls(
            url=config.url,
            model=settings.model_name,
            key=keys[0].split()[-1] if keys else None,
            chats=read_chat_template(settings.model_dir, settings.chat_template) is not None,
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer.

        Raises:
            FaultError: there is no server, or it answers with an error.
        """
        try:
            # Not through a proxy of the environment, which may know no way back to this machine.
            with httpx.stream(
                "POST",
                f"{self.url}{path}",
                json={**body, "model": self.model, "stream": True},
                headers=self.headers,
                timeout=DEADLINE_S,
                trust_env=False,
            ) as response:
                if not response.is_success:
                    response.read()
                    why = _why(response)
                    raise FaultError(f"the server answered {response.status_code}: {why}")
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise FaultError(chunk["error"]["message"])
                        yield chunk
        except httpx.ConnectError as error:
            raise FaultError(
                f"no server at {self.url} ({error}); `{command_for('serve')}` starts one"
            ) from None
        except httpx.TransportError as error:
            raise FaultError(f"the connection to {self.url} broke: {error!r}") from None


def running_config(given: Path | None, *, port: int | None = None) -> DeployConfig:
    """Return the given configuration; without one, that of the server that was started from this
    directory, or what `csps serve` would start."""
    deployed = RUN_DIR / DEPLOYED_FILE
    if given is None and find_head(RUN_DIR) is not None and deployed.exists():
        return read_config(deployed, port=port)
    return read_config(find_config(given), port=port)


def first_model(url: str, key: str | None) -> str:
    """Return the name of the first model that a server lists.

    Raises:
        FaultError: it lists none.
    """
    try:
        answer = httpx.get(
            f"{url}/v1/models",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=LIST_DEADLINE_S,
            trust_env=False,
        )
        if not answer.is_success:
            raise FaultError(f"{url} names no model: {answer.status_code}, {_why(answer)}")
        return str(answer.json()["data"][0]["id"])
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise FaultError(f"no server at {url} ({error})") from None
    except (ValueError, LookupError, TypeError):
        raise FaultError(f"{url} names no model: is it a server with the OpenAI API?") from None


def _why(response: httpx.Response) -> str:
    """Return the message of an error, or its body if that is none of the API."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return abridged(response.text)


@dataclass
class Shown:
    """An answer as it was shown."""

    text: str = ""
    began: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    """Seconds to the first token."""
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any], out: TextIO) -> None:
        """Show what a chunk adds."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            if piece:
                if self.first_s is None:
                    self.first_s = time.perf_counter() - self.began
                self.text += piece
                out.write(piece)
                out.flush()

    @property
    def summary(self) -> str:
        """A line about tokens and times."""
        if not self.usage:
            return "no tokens were counted"
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        reused = f" ({cached} reused)" if cached else ""
        first = "" if self.first_s is None else f", first token after {self.first_s:.2f} s"
        return (
            f"{self.usage['prompt_tokens']} tokens in{reused}, "
            f"{self.usage['completion_tokens']} out{first}, "
            f"{time.perf_counter() - self.began:.2f} s in all"
        )


def ask(argv: Sequence[str]) -> None:
    """Ask one question, about a text if one is given."""
    parser = _parser("ask", "Ask the running server a question, about a text if one is given.")
    parser.add_argument("question", help="what to ask, in quotation marks")
    parser.add_argument(
        "--file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="text that the question is about; - is standard input. May be given several times",
    )
    arguments = parser.parse_args(argv)
    client = _client(arguments)
    text = "\n\n".join(_text(path) for path in arguments.file)
    if client.chats:
        asked = f"{text}\n\n{arguments.question}" if text else arguments.question
        shown = _show_chat(client, [{"role": "user", "content": asked}], arguments)
    else:
        prompt = ABOUT_TEXT.format(text=text, question=arguments.question)
        body = {"prompt": prompt if text else arguments.question, "stop": ["\n"]}
        shown = _show(client, "/v1/completions", body, arguments)
    print(f"\n({shown.summary})", file=sys.stderr)


def chat(argv: Sequence[str]) -> None:
    """Hold a conversation until its end of input."""
    parser = _parser("chat", f"Talk to the running server; {LEAVE[0]} or Ctrl-D ends it.")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    arguments = parser.parse_args(argv)
    client = _client(arguments)
    if not client.chats:
        raise ConfigError(
            f"{client.model} has no chat template: use `csps ask`, or serve it with --chat-template"
        )
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    print(f"{client.model} at {client.url}; {LEAVE[0]} ends it", file=sys.stderr)
    while (line := _line()) is not None:
        if line:
            messages.append({"role": "user", "content": line})
            shown = _show_chat(client, messages, arguments)
            messages.append({"role": "assistant", "content": shown.text})
            print(f"\n({shown.summary})", file=sys.stderr)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"csps {name}", description=description)
    parser.add_argument(
        "--config", type=Path, help="configuration of the server (default: of the one started here)"
    )
    parser.add_argument(
        "--base-url", metavar="URL", help="another server, such as http://127.0.0.1:8000"
    )
    parser.add_argument("--model", help="model of that server (default: the first that it lists)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key (default: the first that this server was given)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        metavar="TOKENS",
        help="longest answer (default: 512)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="NUMBER",
        help="randomness of the answer (default: 0, always the likeliest token)",
    )
    return parser


def _client(arguments: argparse.Namespace) -> Client:
    if arguments.base_url is None:
        client = Client.of(running_config(arguments.config))
        model, key = arguments.model or client.model, arguments.api_key or client.key
        return Client(url=client.url, model=model, key=key, chats=client.chats)
    url = arguments.base_url.rstrip("/").removesuffix("/v1")
    url = url if "://" in url else f"http://{url}"
    model = arguments.model or first_model(url, arguments.api_key)
    return Client(url=url, model=model, key=arguments.api_key)


def _text(path: Path) -> str:
    try:
        data = (
            sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
            if str(path) == "-"
            else _head(path, MAX_FILE_BYTES + 1)
        )
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--file {path}: {why}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--file {path}: longer than {MAX_FILE_BYTES // 2**20} MiB")
    return text


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _line() -> str | None:
    """Return the next line that was typed; None at the end."""
    print("> ", end="", file=sys.stderr, flush=True)
    typed = sys.stdin.readline()
    return None if not typed or typed.strip() in LEAVE else typed.strip()


def _show_chat(
    client: Client, messages: Sequence[Mapping[str, str]], arguments: argparse.Namespace
) -> Shown:
    return _show(client, "/v1/chat/completions", {"messages": list(messages)}, arguments)


def _show(
    client: Client, path: str, body: Mapping[str, Any], arguments: argparse.Namespace
) -> Shown:
    shown = Shown()
    asked = {
        **body,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream_options": {"include_usage": True},
    }
    for chunk in client.stream(path, asked):
        shown.take(chunk, sys.stdout)
    return shown

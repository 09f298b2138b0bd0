"""Run `csps top`: what the server does, in a terminal. It shows what `/ui` shows, from the same
snapshot."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import FaultError
from csps.services.launch.ask_command import Client, running_config
from csps.services.settings.credentials import KEYS_VARIABLE

DEADLINE_S = 10.0
PERIOD_S = 1.0
NAME_COLUMNS = 12
CLEAR = "\x1b[H\x1b[2J"
FULL, CACHED, FREE = "█", "▒", "·"


def main(argv: Sequence[str]) -> None:
    """Show the server's state until somebody ends this process."""
    parser = CommandParser(prog="csps top", description=main.__doc__)
    parser.add_argument("--url", help="of a server (default: the one that was started from here)")
    parser.add_argument("--once", action="store_true", help="show it once")
    arguments = parser.parse_args(argv)
    if arguments.url is None:
        client = Client.of(running_config(None))
        url, headers = client.url, client.headers
    else:
        url = arguments.url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEYS_VARIABLE, "").split(",")[0].split()[-1:]
        headers = {"Authorization": f"Bearer {key[0]}"} if key else {}
    with httpx.Client(headers=headers, timeout=DEADLINE_S, trust_env=False) as connection:
        while True:
            shown = "\n".join(lines(_state(connection, url), shutil.get_terminal_size()))
            if arguments.once:
                print(shown)
                return
            sys.stdout.write(f"{CLEAR}{shown}\n")
            sys.stdout.flush()
            time.sleep(PERIOD_S)


def _state(connection: httpx.Client, url: str) -> dict[str, Any]:
    """Return the state of a server.

    Raises:
        FaultError: there is no server, or it does not show its state.
    """
    try:
        answer = connection.get(f"{url}/v1/csps/state")
    except httpx.TransportError as error:
        raise FaultError(f"no server at {url} ({error})") from None
    if answer.status_code == 404:
        raise FaultError(
            f"{url} does not show its state; `http: {{ui: true}}` in its settings does"
        )
    if not answer.is_success:
        raise FaultError(f"the server answered {answer.status_code}: {answer.text}")
    state: dict[str, Any] = answer.json()
    return state


def lines(state: dict[str, Any], size: os.terminal_size) -> Iterator[str]:
    """Yield the lines of a screen, no longer and no more than fit."""
    screen = list(_all_lines(state, size.columns))
    more = len(screen) - size.lines + 1
    if more > 0:
        screen = [*screen[: size.lines - 2], f"… {more + 1} more lines"]
    yield from (line[: size.columns] for line in screen)


def _all_lines(state: dict[str, Any], columns: int) -> Iterator[str]:
    yield (
        f"csps  {state['policy']}  {len(state['instances'])} instances  "
        f"{state['running']} running  {state['waiting']} waiting"
    )
    met = [
        f"{name} {found['met']}/{found['met'] + found['missed']}"
        for name, found in state["slo"].items()
    ]
    if met:
        yield f"objectives met: {', '.join(met)}"
    yield ""
    meter = max(8, min(24, columns // 5))
    decoded: dict[str, list[str]] = {}
    for request in state["requests"]:
        if request["state"] == "decoding":
            decoded.setdefault(request["master"], []).append(_printable(request["id"]))
    for instance in state["instances"]:
        work = [_step(step) for step in instance["steps"]]
        work += decoded.get(instance["name"], [])
        yield (
            f"{instance['name']:<{NAME_COLUMNS}} {_meter(instance, meter)} "
            f"{_tokens(instance['kv_used']):>6}  {'  '.join(work) or 'idle'}"
        )
    if state["queue"]:
        yield ""
        yield f"{'waiting':<24} {'prompt':>8} {'waited':>8} {'slack':>8} {'first token in':>15}"
    for request in state["queue"]:
        slack_ms = request["slack_ms"]
        yield (
            f"{_printable(request['id']):<24.24} {_tokens(request['prompt']):>8} "
            f"{_time(request['waited_ms']):>8} "
            f"{'-' if slack_ms is None else _time(slack_ms):>8} "
            f"{_time(request['first_token_in_ms']):>15}"
        )


def _step(step: dict[str, Any]) -> str:
    chunk: dict[str, Any] = step["chunks"][0] if step["chunks"] else {"request": "?"}
    name = _printable(chunk["request"])
    if "length" in chunk:
        start = chunk["start"]
        name += f" [{_tokens(start)}, {_tokens(start + chunk['length'])})"
    return f"({name})" if not step["sent"] else name


def _printable(name: str) -> str:
    """Return a client's name without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in name)[:32]


def _meter(instance: dict[str, Any], columns: int) -> str:
    slots = max(1, instance["kv_slots"])
    used: int = round(columns * instance["kv_used"] / slots)
    cached: int = min(columns - used, round(columns * instance["kv_cached"] / slots))
    return FULL * used + CACHED * cached + FREE * (columns - used - cached)


def _tokens(count: int) -> str:
    return f"{round(count / 1000)}K" if count >= 10_000 else str(count)


def _time(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if abs(ms) >= 1000 else f"{ms:.0f} ms"

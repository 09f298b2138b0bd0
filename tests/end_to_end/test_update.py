"""Updates under load: the next rollout takes over, and no client sees an error.

The next version of the code is a copy of the package with other wire numbers, which the
application's `runtime_env` puts before the installed one.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from deployed_server import CONFIG, MODEL, Deployed, commands_in, deployed, replaced
from free_ports import free_port
from tiny_checkpoints import make_checkpoint, random_tokens, reference_tokens
from watched_streams import client_of

import csps
from csps.cli import main
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.core.errors import ConfigError, ProtocolMismatch
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.wire import SCHEMA_VERSION
from csps.services.cluster.handover import HandoverDeadlines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 400.0
POLL_S = 0.2
TOKENS = 24
CLIENTS = 3


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: str
    """The reference's greedy answer."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=32_768
    )


@pytest.fixture(scope="module")
def questions(model_dir: Path) -> list[Question]:
    tokenizer = Tokenizer(model_dir)
    prompts = [random_tokens(length, seed=length) for length in (3, 90, 700, 1_400)]
    return [
        Question(prompt, tokenizer.decode(reference_tokens(model_dir, prompt, TOKENS)))
        for prompt in prompts
    ]


@dataclass
class Load:
    """Clients that ask one question after the other, and what they saw."""

    questions: list[Question]
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    """Errors, and answers other than the reference's."""
    longest_s: float = 0.0
    """Longest time of an answer."""

    async def ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        question = self.questions[number % len(self.questions)]
        began = time.monotonic()
        try:
            text = await self._text(client, question, stream=number % 3 != 0)
        except Exception as error:
            self.wrong.append(repr(error))
            await asyncio.sleep(POLL_S)
            return
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.answered += 1
        if text != question.answer:
            self.wrong.append(f"{text!r}, not {question.answer!r}")

    async def _text(self, client: openai.AsyncOpenAI, question: Question, *, stream: bool) -> str:
        fields: dict[str, Any] = {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        if not stream:
            answer = await client.completions.create(**fields)
            return str(answer.choices[0].text)
        chunks = await client.completions.create(stream=True, **fields)
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])


@asynccontextmanager
async def load_on(server: Deployed, questions: list[Question]) -> AsyncIterator[Load]:
    load = Load(questions)

    async def one_after_the_other(client: openai.AsyncOpenAI, number: int) -> None:
        while True:
            await load.ask(client, number)
            number += 1

    async with client_of(server) as client:
        tasks = [asyncio.create_task(one_after_the_other(client, at)) for at in range(CLIENTS)]
        try:
            yield load
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def until_answered(load: Load, more: int) -> None:
    """Wait for so many further answers."""
    wanted = load.answered + more
    async with asyncio.timeout(DEADLINE_S):
        while load.answered < wanted and not load.wrong:  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(POLL_S)


async def version_of(address: tuple[str, int]) -> int:
    """Return the schema version that a rank speaks."""
    try:
        client = await RpcClient.connect(
            *address,
            secret=b"another one, because the version is compared first",
            name="test",
            deadline_s=DEADLINE_S,
            version=0,
        )
    except ProtocolMismatch as error:
        return error.theirs
    await client.close()
    raise AssertionError("no rank speaks version 0")


def broken_version(folder: Path, before: str, line: str) -> Path:
    """Copy the package with a line where ranks start; return the folder to import from."""
    copy = folder / "csps"
    shutil.copytree(Path(csps.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "services/deployments/gang_rank.py"
    text, found = re.subn(rf"(?m)^( *)({re.escape(before)})", rf"\1{line}\n\1\2", path.read_text())
    assert found == 1
    path.write_text(text)
    return folder


def next_version(folder: Path) -> Path:
    """Copy the package, with another schema and another log; return the folder to import from."""
    copy = folder / "csps"
    shutil.copytree(Path(csps.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, number in (
        ("protocols/rpc/wire.py", "SCHEMA_VERSION"),
        ("protocols/sequencer/log_connection.py", "LOG_VERSION"),
    ):
        text, found = re.subn(
            rf"(?m)^{number} = (\d+)$", rf"{number} = 10\1", copy.joinpath(name).read_text()
        )
        assert found == 1
        copy.joinpath(name).write_text(text)
    return folder


async def test_a_version_with_another_wire_takes_over_without_an_error(
    model_dir: Path, questions: list[Question], tmp_path: Path
) -> None:
    runtime_env = {"env_vars": {"PYTHONPATH": str(next_version(tmp_path / "next"))}}
    with deployed(model_dir, tmp_path, drain_s=20.0) as server:
        former = await asyncio.to_thread(server.registry.rank_addresses)
        assert {await version_of(address) for address in former} == {SCHEMA_VERSION}
        async with load_on(server, questions) as load:
            await until_answered(load, 2 * len(questions))
            successor = await asyncio.to_thread(server.redeploy, runtime_env=runtime_env)
            await asyncio.to_thread(successor.wait_ready)
            await until_answered(load, 2 * len(questions))
        assert not load.wrong
        ranks = await asyncio.to_thread(server.registry.rank_addresses)
        assert not set(former) & set(ranks)
        assert {await version_of(address) for address in ranks} == {int(f"10{SCHEMA_VERSION}")}
    print(f"{load.answered} answers, the longest took {load.longest_s:.1f} s")


async def test_gangs_that_do_not_fit_side_by_side_replace_each_other_under_waiting_requests(
    model_dir: Path, questions: list[Question], tmp_path: Path
) -> None:
    """Two gangs of these are more than the two CPUs that Ray has."""
    prefill = {"instances": 2, "num_cpus": 0.6}
    with deployed(model_dir, tmp_path, drain_s=20.0, prefill=prefill) as server:
        former = await asyncio.to_thread(server.registry.rank_addresses)
        async with load_on(server, questions) as load:
            await until_answered(load, 2 * len(questions))
            successor = await asyncio.to_thread(server.redeploy, revision="next")
            await asyncio.to_thread(successor.wait_ready)
            await until_answered(load, 2 * len(questions))
        assert not load.wrong
        ranks = await asyncio.to_thread(server.registry.rank_addresses)
        assert not set(former) & set(ranks)
    print(f"{load.answered} answers, the longest took {load.longest_s:.1f} s")


async def test_a_rollout_that_cannot_start_leaves_the_former_one_serving(
    model_dir: Path, questions: list[Question], tmp_path: Path
) -> None:
    """Its ranks find that the machine's memory would not do."""
    with deployed(model_dir, tmp_path, drain_s=20.0) as server:
        former = await asyncio.to_thread(server.registry.rank_addresses)
        async with load_on(server, questions) as load:
            successor = await asyncio.to_thread(server.redeploy, prefill={"kv_slots": 10**12})
            with pytest.raises(ConfigError, match=r"^deployment failed: .*GiB of memory, but"):
                await asyncio.to_thread(successor.wait_ready)
            await until_answered(load, 2 * len(questions))
        assert not load.wrong
        assert await asyncio.to_thread(server.registry.rank_addresses) == former


@pytest.mark.parametrize(
    ("before", "line", "error"),
    [
        (
            "gang = _gang_context()",
            "raise RuntimeError('no such instruction')",
            "deployment failed: .*no such instruction",
        ),
        (
            "self._rank = _make_rank(",
            "await asyncio.Event().wait()",
            "deployment .*PrefillGang 2/2 and 2 starting.* within 150 s",
        ),
    ],
    ids=["fails", "hangs"],
)
async def test_a_version_that_never_starts_is_reported_and_replaced_by_one_that_does(
    model_dir: Path,
    questions: list[Question],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: str,
    line: str,
    error: str,
) -> None:
    """The former one serves meanwhile, also when the next router has waited for its gangs for
    longer than `HandoverDeadlines.placement_s`, and through both updates by `csps serve`."""
    broken = {"env_vars": {"PYTHONPATH": str(broken_version(tmp_path / "broken", before, line))}}
    with replaced(model_dir, tmp_path, free_port()) as server, commands_in(tmp_path):
        former = await asyncio.to_thread(server.registry.rank_addresses)
        async with load_on(server, questions) as load:
            await until_answered(load, len(questions))
            capsys.readouterr()
            began = time.monotonic()
            timeout = () if "failed" in error else ("--ready-timeout", "150")
            assert await asyncio.to_thread(serve_again, server, *timeout, runtime_env=broken)
            assert re.search(error, capsys.readouterr().err)
            while time.monotonic() < began + 2.5 * HandoverDeadlines().placement_s:
                await until_answered(load, len(questions))
                assert not load.wrong
            assert await asyncio.to_thread(server.registry.rank_addresses) == former
            policy = {"policy": "fixed_sp", "sp": 2}
            assert not await asyncio.to_thread(
                serve_again, server, runtime_env={}, scheduling=policy
            )
            await until_answered(load, 2 * len(questions))
        assert not load.wrong
        ranks = await asyncio.to_thread(server.registry.rank_addresses)
        assert not set(former) & set(ranks)
    print(f"{load.answered} answers, the longest took {load.longest_s:.1f} s")


async def test_csps_serve_on_a_changed_file_updates_without_an_error(
    model_dir: Path, questions: list[Question], tmp_path: Path
) -> None:
    port = free_port()
    with replaced(model_dir, tmp_path, port) as server:
        former = await asyncio.to_thread(server.registry.rank_addresses)
        async with load_on(server, questions) as load:
            await until_answered(load, 2 * len(questions))
            with commands_in(tmp_path):
                assert (
                    await asyncio.to_thread(
                        serve_again, server, scheduling={"policy": "fixed_sp", "sp": 2}
                    )
                    == 0
                )
            await until_answered(load, 2 * len(questions))
        assert not load.wrong
        ranks = await asyncio.to_thread(server.registry.rank_addresses)
        assert not set(former) & set(ranks)
    print(f"{load.answered} answers, the longest took {load.longest_s:.1f} s")


def serve_again(
    server: Deployed, *more: str, runtime_env: dict[str, Any] | None = None, **args: Any
) -> int:
    """Run `csps serve` with more options, other settings and another environment."""
    path = server.run_dir / CONFIG
    data = yaml.safe_load(path.read_text())
    data["applications"][0]["args"] |= args
    if runtime_env is not None:
        data["applications"][0]["runtime_env"] = runtime_env
    path.write_text(yaml.safe_dump(data))
    command = ["serve", "--no-demo", "--config", str(path), "--port", str(server.config.port)]
    return main([*command, *more])

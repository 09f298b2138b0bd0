"""A configurator that measures what it lacks: in order, when the machine is idle, and to the end or
not at all; what is not known meanwhile stays cold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from csps.protocols.attention.plan import StrategyQuestion, StrategyQuestions
from csps.services.deployments.configurator import make_rules
from csps.services.launch.deploy_config import read_config
from csps.services.measured.identity import identity_of
from csps.services.profiling import idle_profile
from csps.services.profiling.idle_profile import COMMANDS, profile_when_idle
from csps.services.settings.settings import Settings


@pytest.fixture
def settings(tiny_llama: Path, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "model": str(tiny_llama),
            "scaling_information_base": str(tmp_path / "sib.sqlite"),
            "topology": {"link_ratio": 3.0},
            "configurator": {"profile_when_idle": True},
        }
    )


async def test_commands_wait_for_an_idle_machine_and_have_the_servers_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_profile, "LOOK_S", 0.0)
    loads, said = [2.0, 0.7, 0.1, 0.9, 0.2, 0.0], []

    async def run(arguments: Sequence[str]) -> str | None:
        *command, _, config = arguments
        read = read_config(Path(config)).settings
        assert identity_of(read) == identity_of(settings)
        assert read.topology == settings.topology
        assert read.scaling_information_base == settings.scaling_information_base
        said.append((tuple(command), len(loads)))
        return None

    assert await profile_when_idle(settings, run, lambda: loads.pop(0))
    assert said == list(zip(COMMANDS, (3, 1, 0), strict=True))


async def test_after_a_failure_nothing_more_is_tried(settings: Settings) -> None:
    tried = []

    async def run(arguments: Sequence[str]) -> str | None:
        tried.append(arguments[0])
        return "no space left" if arguments[1] == "phases" else None

    assert not await profile_when_idle(settings, run, lambda: 0.0)
    assert tried == ["profile", "profile"]


@pytest.mark.slow
async def test_a_command_that_fails_says_why() -> None:
    error = await idle_profile._run(("guess",))
    assert error is not None
    assert "unknown command 'guess'" in error


def test_until_then_only_exact_attention_has_an_answer(settings: Settings) -> None:
    rules = make_rules(settings, later=True)
    assert rules.waits
    asked = StrategyQuestion(csa=None, servers=(2,), tp=1, tokens=100)
    bounded = StrategyQuestion(csa=None, bounded=True, servers=(2,), tp=1, tokens=100)
    (exact,), nothing = rules.answer(StrategyQuestions(asked=(asked, bounded))).chosen
    assert exact.strategy in ("ulysses", "sp_tp")
    assert nothing == ()
    assert not make_rules(settings).waits

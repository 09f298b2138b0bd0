"""The router's connection to the configurator: over RPC, remade after it was replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import StrategyQuestion, StrategyQuestions
from csps.protocols.rpc.schema import pack, unpack
from csps.protocols.rpc.server import RpcServer
from csps.services.deployments.configurator import ConfiguratorClient
from csps.services.settings.credentials import ClusterSecret

SECRET = ClusterSecret(b"a secret of the tests")


class FakeHandle:
    """A Serve handle with one method, which returns a changeable address."""

    def __init__(self) -> None:
        self.listening: tuple[str, int] = ("", 0)
        self.asked = 0

    @property
    def address(self) -> FakeHandle:
        return self

    async def remote(self) -> tuple[str, int]:
        self.asked += 1
        return self.listening


RULES = StrategyRules(AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2))
QUESTIONS = StrategyQuestions(
    asked=(
        StrategyQuestion(csa=None, servers=(2,), tp=1, tokens=100),
        StrategyQuestion(
            csa=CsaSettings(levels=2, drop_ratios=((0.0,), (0.25, 0.5)), strategy="tp"),
            servers=(1, 1),
            tp=2,
            tokens=9,
        ),
    )
)


@asynccontextmanager
async def configurator(handle: FakeHandle) -> AsyncIterator[None]:
    def strategies(payload: Any, _: object) -> dict[str, Any]:
        return pack(RULES.answer(unpack(StrategyQuestions, payload)))

    server = RpcServer({"strategies": strategies}, secret=SECRET.value)
    handle.listening = await server.start("127.0.0.1")
    try:
        yield
    finally:
        await server.close(0)


async def test_the_address_is_asked_for_once_per_configurator() -> None:
    handle = FakeHandle()
    client = ConfiguratorClient(cast(Any, handle), SECRET)
    for incarnation in (1, 2):
        async with configurator(handle):
            for _ in range(3):
                assert await client.strategies(QUESTIONS) == RULES.answer(QUESTIONS)
        assert handle.asked == incarnation
    await client.close()

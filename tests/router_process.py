"""A router in a process of its own, without Ray or HTTP, for what only a process can do: be killed,
or stand still. `python tests/router_process.py CONFIG` serves one greedy request and then waits;
`RouterProcess` drives it.

It prints a JSON line for each fact: `ready` with its generation, each `token`, `finished`, the HTTP
`status` that a client would have got for a failure, and each `phase` of the cluster. A line on its
standard input makes it drain and end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from cluster_waits import linked
from file_generation_store import FileGenerations
from gang_driver import SECRET

from csps.configurator.costs.cost_table import CostTable, Unmeasured
from csps.configurator.model.attention_shape import AttentionShape
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.gang.members import GangMembers, RankAddress
from csps.protocols.gang.messages import Sampling
from csps.protocols.openai.responses import error_body
from csps.protocols.rpc.tls import Tls
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.membership import ClusterView, StaticDirectory
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.service import RequestService
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.policies.registry import make_policy

WAIT_S = 60.0


def make_router(
    prefill: GangMembers, decode: GangMembers, generations: Path, tls: Tls | None = None
) -> tuple[Cluster, RequestService]:
    """Return a cluster over these gangs, and the service of requests over it."""
    cluster = Cluster(
        StaticDirectory(ClusterView(prefill=prefill, decode=decode)),
        secret=SECRET,
        router_id=f"router{os.getpid()}",
        generations=FileGenerations(generations),
        tls=tls,
    )
    costs = CostTableService(CostTable(latencies=Unmeasured()), _silent)
    options = {"spt_tokens": 256, "short_tokens": 32, "spread_tokens": 256}
    scheduler = Scheduler(make_policy("csps", options), costs.costs)
    shape = AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2)
    return cluster, RequestService(cluster=cluster, scheduler=scheduler, costs=costs, shape=shape)


def greedy(service: RequestService, prompt: list[int], max_tokens: int) -> RequestHandle:
    """Submit a request that samples the likeliest tokens."""
    return service.submit(
        RequestSpec(
            client_request_id="r",
            prompt=np.array(prompt, dtype=np.int32),
            sampling=Sampling(temperature=0, max_tokens=max_tokens),
        )
    )


async def _silent(questions: StrategyQuestions) -> StrategyChoices:
    raise ConnectionError("no configurator in this test")


class RouterProcess:
    """The process, and what it has said."""

    def __init__(
        self,
        prefill: GangMembers,
        decode: GangMembers,
        generations: Path,
        *,
        prompt: list[int],
        max_tokens: int,
    ) -> None:
        config = {
            "gangs": [asdict(prefill), asdict(decode)],
            "generations": str(generations),
            "prompt": prompt,
            "max_tokens": max_tokens,
        }
        self.facts: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def tokens(self) -> list[int]:
        """Return the tokens received so far."""
        return [fact["token"] for fact in self.facts if "token" in fact]

    async def until(self, name: str, value: Any = None) -> Any:
        """Read on until there is such a fact (of this value, if one is given); returns it."""
        while True:
            fact = await self._next()
            if name in fact and value in (None, fact[name]):
                return fact[name]

    async def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        reading = asyncio.to_thread(self._process.stdout.readline)
        line = await asyncio.wait_for(reading, WAIT_S)
        assert line, f"the router ended, having said {self.facts[-3:]}"
        fact: dict[str, Any] = json.loads(line)
        self.facts.append(fact)
        return fact

    def drain(self) -> None:
        """Let it finish what it does, and end."""
        assert self._process.stdin is not None
        self._process.stdin.write("drain\n")
        self._process.stdin.flush()

    def stand_still(self) -> None:
        """Stop the process; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after `stand_still`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()
        self._process.communicate()


def _say(**fact: object) -> None:
    print(json.dumps(fact), flush=True)


async def _main(config: dict[str, Any]) -> None:
    prefill, decode = (_members(gang) for gang in config["gangs"])
    cluster, service = make_router(prefill, decode, Path(config["generations"]))
    await service.start()
    await linked(cluster, WAIT_S)
    _say(ready=cluster.generation)
    work = asyncio.create_task(_serve(service, config["prompt"], config["max_tokens"]))
    watch = asyncio.create_task(_tell_phases(cluster))
    await asyncio.to_thread(sys.stdin.readline)
    await service.close(WAIT_S)
    await work
    watch.cancel()


async def _serve(service: RequestService, prompt: list[int], max_tokens: int) -> None:
    try:
        async for token in greedy(service, prompt, max_tokens):
            _say(token=token.token)
    except Exception as error:
        _say(status=error_body(error)[0], error=str(error))
    else:
        _say(finished=True)


async def _tell_phases(cluster: Cluster) -> None:
    said = ""
    while True:
        if cluster.phase != said:
            said = cluster.phase
            _say(phase=said)
        await asyncio.sleep(0.01)


def _members(fields: dict[str, Any]) -> GangMembers:
    ranks = tuple(RankAddress(**address) for address in fields["ranks"])
    return GangMembers(**{**fields, "ranks": ranks})


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))

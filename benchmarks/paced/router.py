"""The router as a plain process: `python benchmarks/paced/router.py CLUSTER POLICY [OPTION...]`.

It reads the ranks' addresses from standard input, prints its port, and serves until standard input
is closed. Everything inside Ray Serve's shell is the deployed code. A static directory replaces the
registry, and there is no configurator: all attention is exact.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

# Run as a script, the module path starts inside the folder, where `paced` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from csps.configurator.costs.cost_table import (
    EXACT_STRATEGY,
    CostTable,
)
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.simulate import (
    options_of,
    scheduler_with,
)
from csps.protocols.attention.plan import (
    StrategyChoice,
    StrategyChoices,
    StrategyQuestions,
)
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.membership import (
    ClusterView,
    StaticDirectory,
)
from csps.services.deployments.configurator import attention_shape
from csps.services.http.api import HttpApi
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.service import RequestService
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import Settings
from csps.services.telemetry.metrics import Metrics
from paced.cell import SECRET
from paced.driver import members

READY_S = 20.0
"""Time limit for the router to attach to all ranks."""


async def exact(questions: StrategyQuestions) -> StrategyChoices:
    """Choose exact attention for every request, in place of the configurator."""
    choice = StrategyChoice(strategy=EXACT_STRATEGY, reason="paced ranks know no other")
    return StrategyChoices(chosen=((choice,),) * len(questions.asked))


async def serve(
    listing: dict[str, Any], cluster_name: str, policy: str, options: Sequence[str]
) -> None:
    """Serve until the standard input is closed."""
    model = load_cluster(cluster_name)
    view = ClusterView(**{role: members(listing[role]) for role in model.roles})
    cluster = Cluster(
        StaticDirectory(view),
        secret=SECRET,
        router_id="paced",
        generations=MemoryGenerations(),
        roles=model.roles,
    )
    settings = Settings(model="needle", served_model_name="paced")
    metrics = Metrics(settings.model_name)
    costs = CostTableService(CostTable(latencies=model.table), exact)
    service = RequestService(
        cluster=cluster,
        scheduler=scheduler_with(costs.costs, policy, options_of(options)),
        costs=costs,
        shape=attention_shape(settings),
        observer=metrics,
    )
    metrics.watch(service)
    parser = RequestParser(settings)
    parser_pool = ParserPool(parser.body_parser)
    api = HttpApi(
        parser=parser,
        parser_pool=parser_pool,
        service=service,
        keys=ApiKeys([]),
        metrics=metrics,
        max_body_bytes=settings.max_body_bytes,
    )
    await service.start()
    try:
        async with asyncio.timeout(READY_S):
            while cluster.link is None:  # noqa: ASYNC110 (a cluster has no event for it)
                await asyncio.sleep(0.01)
        await _listen(api)
        service.check_health()
        service.check_integrity()
    finally:
        await parser_pool.close()
        await service.close(0.0)


async def _listen(api: HttpApi) -> None:
    config = uvicorn.Config(
        api.app(), port=0, log_level="warning", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    gc.freeze()
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        server.should_exit = server.force_exit = True
        await serving


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.stdin.readline()), sys.argv[1], sys.argv[2], sys.argv[3:]))

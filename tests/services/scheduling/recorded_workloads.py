"""Schedulers whose streams are recorded, and the simulations that some streams come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from csps.configurator.costs.cost_table import Allowed, Bucket, Costs, CostTable, Unmeasured
from csps.configurator.costs.latency import StepCost
from csps.configurator.costs.latency_tables import SHIPPED
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster, parse_cluster
from csps.loadgen.simulator.kernel import Abandoned, GangFault, Simulator
from csps.loadgen.simulator.kernel import SchedulerLike as Deciding
from csps.loadgen.simulator.requests import Arrival, chained
from csps.protocols.attention.plan import RING_CLASSES, Objective, RequestClass
from csps.protocols.attention.ring_choice import RingModel, RingRules, RingSpeeds
from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings
from csps.services.scheduling.events.limits import SchedulerDeadlines as DeadlineSettings
from csps.services.scheduling.policies.registry import make_policy

MS = 1_000_000
SECOND = 1000 * MS
BLOCK_TOKENS = 64
LATER = "later"
"""Digest under which a scheduler finds the cost table that `CostTableUpdated` puts in force."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Cluster, arrivals and faults that the simulator plays."""

    cluster: ClusterModel
    arrivals: Sequence[Arrival]
    faults: Sequence[GangFault] = ()
    abandoned: Sequence[Abandoned] = ()

    def play(self, scheduler: Deciding) -> None:
        """Run it to its end."""
        simulator = Simulator(
            scheduler,
            self.cluster,
            self.arrivals,
            faults=self.faults,
            abandoned=self.abandoned,
        )
        simulator.run()
        simulator.gangs.check_idle()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Scheduler with all inputs, besides the events, on which its commands depend."""

    policy: str
    options: dict[str, Any]
    table: CostTable
    later: CostTable | None = None
    limits: QueueLimits = field(default_factory=QueueLimits)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)
    reuse: ReuseSettings = field(default_factory=ReuseSettings)
    simulation: Callable[[], Simulation] | None = None
    """Source of its events; None: random gangs, which only `record_streams.py` makes."""

    def scheduler(self, watched: Callable[[Policy], Policy] = lambda policy: policy) -> Scheduler:
        """Make a new one."""
        return Scheduler(
            watched(make_policy(self.policy, self.options)),
            Costs(self.table, {LATER: self.later or self.table}),
            limits=self.limits,
            deadlines=self.deadlines,
            reuse=self.reuse,
        )


# --- clusters ------------------------------------------------------------------------------------

_LATENCY = {
    "steps": {
        1: [6e-3, 2e-5, 3e-8, 1e-8],
        2: [9e-3, 1.1e-5, 1.6e-8, 6e-9],
        4: [1.4e-2, 6e-6, 9e-9, 4e-9],
    },
    "decode": {1: [4e-3, 1e-6, 4e-4], 2: [5e-3, 6e-7, 3e-4], 4: [7e-3, 4e-7, 2e-4]},
}
_REST = {
    "latency": _LATENCY,
    "kv": {"bytes_per_token": 2048, "layers": 4},
    "max_positions": 16384,
    "gaps_us": {"step": 500, "iteration": 100, "notice": 200, "front": 300},
    "quantum_ms": 5,
}


def pair(kv_slots: int = 6000) -> ClusterModel:
    """Make two servers that prefill and one that decodes, two instances each, over slow links."""
    servers = [
        {"rack": 0, "count": 2, "instances": 2, "permissions": ["prefill"], "kv_slots": kv_slots},
        {"rack": 1, "instances": 2, "permissions": ["decode"], "kv_slots": kv_slots * 3 // 2},
    ]
    links = {
        "inside": {"gbps": 4, "latency_us": 10},
        "between": {"gbps": 1, "latency_us": 30, "shared": True},
    }
    data = {"servers": servers, "links": links, "receiving_backends": 1, **_REST}
    return parse_cluster(data, name="pair")


def elastic(kv_slots: int = 6000) -> ClusterModel:
    """Make two servers with two instances each that do both."""
    both = ["prefill", "decode"]
    servers = [{"count": 2, "instances": 2, "permissions": both, "kv_slots": kv_slots}]
    links = {
        "inside": {"gbps": 400, "latency_us": 10},
        "between": {"gbps": 100, "latency_us": 30},
    }
    return parse_cluster({"servers": servers, "links": links, **_REST}, name="elastic")


# --- arrivals ------------------------------------------------------------------------------------


def mixed(
    seed: int,
    *,
    requests: int = 140,
    rate: float = 12.0,
    longest: int = 5000,
    classes: Sequence[str] = ("exact",),
) -> list[Arrival]:
    """Draw short prompts with long ones among them; some answers end before they have to."""
    rng, now_ns, arrivals = random.Random(seed), 0, []
    for _ in range(requests):
        now_ns += round(rng.expovariate(rate) * SECOND)
        short = rng.random() < 0.6
        output = rng.choice((1, 2, 10, 60, 150))
        arrivals.append(
            Arrival(
                at_ns=now_ns,
                prompt_tokens=rng.randint(1, 200) if short else rng.randint(400, longest),
                output_tokens=output,
                max_tokens=output + rng.choice((0, 50)),
                cls=rng.choice(classes),
            )
        )
    return arrivals


def conversations(seed: int, *, count: int = 12, turns: int = 6) -> list[Arrival]:
    """Draw conversations, each turn of which begins with all of the one before."""
    rng, arrivals = random.Random(seed), []
    for number in range(count):
        blocks = 0
        for turn in range(turns):
            blocks += rng.randint(1, 6)
            names = [1000 * number + block for block in range(blocks)]
            if turn and rng.random() < 0.2:
                names = names[: blocks // 2] + [1000 * number + 500 + name for name in names]
            arrivals.append(
                Arrival(
                    at_ns=turn * 500 * MS + rng.randint(0, 150) * MS,
                    prompt_tokens=blocks * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS),
                    output_tokens=rng.choice((1, 5, 40)),
                    hashes=tuple(chained(names[:blocks])),
                )
            )
    return sorted(arrivals, key=lambda arrival: arrival.at_ns)


def _faults(*roles: str, since_ns: int, down_ns: int = 400 * MS) -> list[GangFault]:
    """Let gangs die one after the other, and come back."""
    faults = []
    for index, role in enumerate(roles):
        at_ns = since_ns * (index + 1)
        faults.append(GangFault(at_ns=at_ns, role=role))  # type: ignore[arg-type]
        up = GangFault(at_ns=at_ns + down_ns, role=role, up=True)  # type: ignore[arg-type]
        faults.append(up)
    return faults


def _gone(arrivals: Sequence[Arrival], every: int, after_ns: int = 150 * MS) -> list[Abandoned]:
    """Let every so many-th client leave."""
    gone = [
        Abandoned(at_ns=arrivals[index].at_ns + after_ns, request=index + 1)
        for index in range(every - 1, len(arrivals), every)
    ]
    return sorted(gone, key=lambda arrival: arrival.at_ns)


def _mixed(cluster: ClusterModel, seed: int, **options: Any) -> Simulation:
    roles = ("elastic", "elastic") if cluster.in_place else ("decode", "prefill")
    arrivals = mixed(seed, **options)
    return Simulation(
        cluster=cluster,
        arrivals=arrivals,
        faults=_faults(*roles, since_ns=arrivals[-1].at_ns // 3),
        abandoned=_gone(arrivals, 9),
    )


def _talks(cluster: ClusterModel, seed: int) -> Simulation:
    roles = ("elastic",) if cluster.in_place else ("prefill", "decode")
    arrivals = conversations(seed)
    return Simulation(
        cluster=cluster,
        arrivals=arrivals,
        faults=_faults(*roles, since_ns=900 * MS, down_ns=150 * MS),
        abandoned=_gone(arrivals, 11, 60 * MS),
    )


def _riding(cluster: ClusterModel, seed: int) -> Simulation:
    """Between turns the gang that prefills loses what it retains; the other has as much."""
    at_ns = (450, 960, 1470, 1980)
    faults = [
        GangFault(at_ns=(since + after) * MS, role="prefill", up=after > 0)
        for since in at_ns
        for after in (0, 10)
    ]
    arrivals = conversations(seed)
    gone = _gone(arrivals, 11, 60 * MS)
    return Simulation(cluster=cluster, arrivals=arrivals, faults=faults, abandoned=gone)


def _published(cluster: ClusterModel, seed: int, rate: float, requests: int = 40) -> Simulation:
    """Prompts of many lengths on a cluster that a paper has, or on this machine's."""
    rng, now_ns, arrivals = random.Random(seed), 0, []
    longest = min(180_000, cluster.max_positions // 4)
    for _ in range(requests):
        now_ns += round(rng.expovariate(rate) * SECOND)
        prompt = min(round(rng.lognormvariate(9.5, 1.3)) + 16, longest)
        output = rng.randint(1, 100)
        arrivals.append(
            Arrival(at_ns=now_ns, prompt_tokens=prompt, output_tokens=output, max_tokens=120)
        )
    return Simulation(cluster=cluster, arrivals=arrivals, abandoned=_gone(arrivals, 13, SECOND))


# --- cost tables ---------------------------------------------------------------------------------

UNMEASURED = CostTable(latencies=Unmeasured())
FASTER = CostTable(latencies=Unmeasured(step_ns=9_000_000, token_ns=60_000))
SHAPES = [GroupShape(shape) for shape in ((1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2))]
_SPEEDS = RingSpeeds(flops=1e14, bytes_per_s=1e10)
RINGS = RingRules(
    model=RingModel(heads=32, kv_heads=8, element_bytes=2),
    inside=_SPEEDS,
    between=replace(_SPEEDS, bytes_per_s=1e9),
)
BOUNDED = RequestClass(objective=Objective(kind="accuracy", max_ttft_ms=150.0)).key
BALANCED = RequestClass(objective=Objective(max_accuracy_loss=0.02)).key
CLASSES = ("exact", "exact", "fast", "auto", BOUNDED, BALANCED, *RING_CLASSES)


def _with_options(table: CostTable) -> CostTable:
    """Let some classes choose between strategies, for prompts of some lengths."""
    options = {
        "fast": (Allowed("ulysses"), Allowed("ring_kv", permille=400)),
        "auto": (Allowed("ulysses"), Allowed("ring_q", permille=900)),
        "bounded": (
            Allowed("ulysses"),
            Allowed("ring_kv", permille=600, loss_ppm=10_000),
            Allowed("ring_q", permille=300, loss_ppm=50_000),
        ),
    }
    buckets = {
        Bucket(row, shape, exponent): allowed
        for row, allowed in options.items()
        for shape in SHAPES
        for exponent in (5, 6, 7, 9, 10, 11)
    }
    return replace(table, buckets=buckets, rings=RINGS, overhead_ns=2 * MS)


def _scaled(cost: StepCost, share: float) -> StepCost:
    a, b, c, d = (round(coefficient * share) for coefficient in (cost.a, cost.b, cost.c, cost.d))
    return StepCost(a=a, b=b, c=c, d=d)


def _predicted(cluster: ClusterModel, share: float = 1.0) -> CostTable:
    """Predict what the cluster's steps take, or only a share of it."""
    table = cluster.table
    if share == 1.0:
        return CostTable(latencies=table)
    steps = tuple((key, _scaled(size, share)) for key, size in table.steps)
    return CostTable(latencies=replace(table, steps=steps))


MOVES = CostTable(
    latencies=replace(
        SHIPPED,
        steps=tuple((key, StepCost.of_seconds(0.5, 1e-3, 0, 0)) for key, _ in SHIPPED.steps),
    )
)
"""Moving takes no time beside prompts, so that it pays."""


# --- the workloads -------------------------------------------------------------------------------

PAIR, ELASTIC = pair(), elastic()
SMALL_PAIR, SMALL_ELASTIC = pair(1800), elastic(1800)
LARGE_PAIR = pair(40_000)
TETRIS_16, LOONGSERVE_8, LOCAL = map(load_cluster, ("tetris-16", "loongserve-8", "local"))
SHORT_LINE = QueueLimits(max_waiting=12, max_waiting_tokens=30_000)
STORM_LINE = QueueLimits(max_waiting=8, max_waiting_tokens=30_000)
IMPATIENT = DeadlineSettings(
    reserve_ns=2 * SECOND,
    transfer_ns=2 * SECOND,
    transfer_token_ns=1000,
    prefill_liveness_ns=SECOND,
    decode_liveness_ns=SECOND,
    gang_recovery_ns=2 * SECOND,
    liveness_check_ns=200 * MS,
)
KEEPS = ReuseSettings(enabled=True, block_tokens=BLOCK_TOKENS)
STORM_KEEPS = ReuseSettings(enabled=True, max_share=1.0, block_tokens=32)
SPREAD = {"spread_tokens": 700, "max_batch": 6}
URGENT = {"short_tokens": 200, "urgent_batch_tokens": 400, "overtaking_s": 0.1}


def _simulated(
    policy: str,
    options: dict[str, Any],
    simulation: Callable[[], Simulation],
    table: CostTable,
    **more: Any,
) -> Workload:
    return Workload(
        policy=policy,
        options={"spread_tokens": 8192, **options},  # which its default once was
        table=table,
        simulation=simulation,
        **more,
    )


def _storm(policy: str, options: dict[str, Any], table: CostTable = UNMEASURED) -> Workload:
    return Workload(
        policy=policy,
        options={**options, **SPREAD},
        table=table,
        later=FASTER,
        limits=STORM_LINE,
        deadlines=IMPATIENT,
    )


def _keeping(policy: str, options: dict[str, Any]) -> Workload:
    short = {"spread_tokens": 200, "max_batch": 6}
    return replace(_storm(policy, options), options={**options, **short}, reuse=STORM_KEEPS)


WORKLOADS: dict[str, Workload] = {
    # csps
    "csps-mixed": _simulated(
        "csps",
        {"spt_tokens": 600, "spread_tokens": 1500, "max_batch": 16, **URGENT},
        lambda: _mixed(PAIR, 1),
        _predicted(PAIR),
        limits=SHORT_LINE,
    ),
    "csps-classes": _simulated(
        "csps",
        {"spt_tokens": 500, "spread_tokens": 1500, **URGENT},
        lambda: _mixed(PAIR, 2, classes=CLASSES),
        _with_options(_predicted(PAIR)),
        limits=SHORT_LINE,
    ),
    "csps-conversations": _simulated(
        "csps",
        {"spt_tokens": 400, "spread_tokens": 400, "prefill_tokens_max": 300, **URGENT},
        lambda: _talks(SMALL_PAIR, 3),
        _predicted(PAIR),
        reuse=KEEPS,
    ),
    "csps-riding": _simulated(
        "csps",
        {"spt_tokens": 500, "prefill_tokens_max": 448, **URGENT},
        lambda: _riding(LARGE_PAIR, 5),
        _predicted(PAIR),
        reuse=KEEPS,
    ),
    "csps-large": _simulated(
        "csps", {}, lambda: _published(TETRIS_16, 4, 3.0, 80), _predicted(TETRIS_16)
    ),
    "csps-storm": _storm("csps", {"spt_tokens": 500, "short_tokens": 100, "most_starts": 2}),
    "csps-keeping": _keeping(
        "csps", {"spt_tokens": 200, "short_tokens": 100, "prefill_tokens_max": 60}
    ),
    # context_parallel
    "context_parallel-mixed": _simulated(
        "context_parallel",
        {"max_batch": 16, **URGENT},
        lambda: _mixed(PAIR, 11),
        _predicted(PAIR),
        limits=SHORT_LINE,
    ),
    "context_parallel-classes": _simulated(
        "context_parallel",
        {"least_saving": 0.3, **URGENT},
        lambda: _mixed(ELASTIC, 12, classes=CLASSES),
        _with_options(_predicted(ELASTIC)),
        limits=SHORT_LINE,
    ),
    "context_parallel-conversations": _simulated(
        "context_parallel",
        {"prefill_tokens_max": 300, **URGENT},
        lambda: _talks(SMALL_PAIR, 13),
        _predicted(PAIR),
        reuse=KEEPS,
    ),
    "context_parallel-riding": _simulated(
        "context_parallel",
        {"prefill_tokens_max": 448, **URGENT},
        lambda: _riding(LARGE_PAIR, 15),
        _predicted(PAIR),
        reuse=KEEPS,
    ),
    "context_parallel-large": _simulated(
        "context_parallel", {}, lambda: _published(TETRIS_16, 14, 3.0), _predicted(TETRIS_16)
    ),
    "context_parallel-crowd": replace(
        _storm("context_parallel", {"jobs_per_instance": 1000, "urgent_batch_tokens": 1}),
        options={"jobs_per_instance": 1000, "urgent_batch_tokens": 1, "max_batch": 1000},
        limits=QueueLimits(),
    ),
    "context_parallel-storm": _storm("context_parallel", {"short_tokens": 100}),
    "context_parallel-elastic-storm": _storm("context_parallel", {"short_tokens": 100}),
    "context_parallel-keeping": _keeping(
        "context_parallel", {"short_tokens": 100, "prefill_tokens_max": 60}
    ),
    # loongserve
    "loongserve-mixed": _simulated(
        "loongserve",
        {"max_batch": 16, "decode_iterations": 2},
        lambda: _mixed(ELASTIC, 21),
        _predicted(ELASTIC),
        limits=SHORT_LINE,
    ),
    "loongserve-moving": _simulated(
        "loongserve",
        {"scale_up_batch": 1, "decode_iterations": 0, "max_num_ooe": 2, "max_delay_s": 0.05},
        lambda: _mixed(ELASTIC, 22, rate=20.0),
        MOVES,
    ),
    "loongserve-static": _simulated(
        "loongserve",
        {"static_dop": 2, "batching": "pruned", "objective": "sum"},
        lambda: _mixed(ELASTIC, 23),
        _predicted(ELASTIC),
        limits=SHORT_LINE,
    ),
    "loongserve-conversations": _simulated(
        "loongserve", {}, lambda: _talks(SMALL_ELASTIC, 25), _predicted(ELASTIC), reuse=KEEPS
    ),
    "loongserve-large": _simulated(
        "loongserve", {}, lambda: _published(LOONGSERVE_8, 25, 1.5, 60), _predicted(LOONGSERVE_8)
    ),
    "loongserve-storm": _storm("loongserve", {"decode_iterations": 2}),
    "loongserve-moving-storm": _storm(
        "loongserve", {"decode_iterations": 0, "scale_up_batch": 1}, MOVES
    ),
    "loongserve-keeping": _keeping("loongserve", {"decode_iterations": 2}),
    # tetris
    "tetris-mixed": _simulated(
        "tetris",
        {"improvement_rate": 0.05, "min_chunk": 64, "max_batch": 16},
        lambda: _mixed(PAIR, 31),
        _predicted(PAIR),
        limits=SHORT_LINE,
    ),
    "tetris-replanning": _simulated(
        "tetris",
        {
            "improvement_rates": [[4, 0.05], [12, 0.3], [20, 0.5]],
            "min_chunk": 64,
            "replan_share": 0.02,
            "launch_ahead_s": 0,
        },
        lambda: _mixed(PAIR, 32, rate=8.0),
        _predicted(PAIR, 0.6),
        limits=SHORT_LINE,
    ),
    "tetris-conversations": _simulated(
        "tetris",
        {"spread_tokens": 400, "min_chunk": 32, "layout": "striped"},
        lambda: _talks(SMALL_PAIR, 33),
        _predicted(PAIR),
        reuse=KEEPS,
    ),
    "tetris-large": _simulated(
        "tetris",
        {"improvement_rate": 0.3},
        lambda: _published(TETRIS_16, 34, 3.0),
        _predicted(TETRIS_16, 0.8),
    ),
    "tetris-storm": _storm("tetris", {"improvement_rate": 0.05, "min_chunk": 1}),
    "tetris-replanning-storm": _storm(
        "tetris",
        {"improvement_rate": 0.05, "min_chunk": 1, "replan_share": 0.01, "launch_ahead_s": 0},
    ),
    "tetris-keeping": _keeping("tetris", {"improvement_rate": 0.05, "min_chunk": 1}),
    # chunked_prefill
    "chunked_prefill-mixed": _simulated(
        "chunked_prefill",
        {"token_budget": 256, "spread_tokens": 1500, "max_batch": 16},
        lambda: _mixed(PAIR, 41),
        _predicted(PAIR),
        limits=SHORT_LINE,
    ),
    "chunked_prefill-elastic": _simulated(
        "chunked_prefill",
        {"token_budget": 256, "spread_tokens": 1500, "max_batch": 16},
        lambda: _mixed(ELASTIC, 42),
        _predicted(ELASTIC),
        limits=SHORT_LINE,
    ),
    "chunked_prefill-conversations": _simulated(
        "chunked_prefill",
        {"token_budget": 256, "spread_tokens": 400},
        lambda: _talks(SMALL_ELASTIC, 43),
        _predicted(ELASTIC),
        reuse=KEEPS,
    ),
    "chunked_prefill-large": _simulated(
        "chunked_prefill", {}, lambda: _published(LOCAL, 44, 2.0), _predicted(LOCAL)
    ),
    "chunked_prefill-storm": _storm("chunked_prefill", {"token_budget": 256}),
    "chunked_prefill-elastic-storm": _storm("chunked_prefill", {"token_budget": 256}),
    "chunked_prefill-keeping": _keeping("chunked_prefill", {"token_budget": 256}),
    # fixed_sp
    "fixed_sp-mixed": _simulated(
        "fixed_sp",
        {"sp": 2, "spread_tokens": 1500, "max_batch": 16},
        lambda: _mixed(PAIR, 51),
        _predicted(PAIR),
        limits=SHORT_LINE,
    ),
    "fixed_sp-classes": _simulated(
        "fixed_sp",
        {"sp": 2, "spread_tokens": 1500},
        lambda: _mixed(PAIR, 52, classes=CLASSES),
        _with_options(_predicted(PAIR)),
    ),
    "fixed_sp-conversations": _simulated(
        "fixed_sp",
        {"sp": 2, "spread_tokens": 400},
        lambda: _talks(SMALL_PAIR, 53),
        _predicted(PAIR),
        reuse=KEEPS,
    ),
    "fixed_sp-large": _simulated(
        "fixed_sp", {"sp": 8}, lambda: _published(TETRIS_16, 54, 2.0), _predicted(TETRIS_16)
    ),
    "fixed_sp-storm": _storm("fixed_sp", {"sp": 2}),
    "fixed_sp-keeping": _keeping("fixed_sp", {"sp": 2}),
}
"""Workloads by the names of their streams."""

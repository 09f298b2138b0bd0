"""Strategies on ranks that are threads of the test's process, and the dense forward pass.

Shape suffixes: t tokens, h heads, g KV heads, d head dim or hidden.

Gangs of tiny models that tests of several strategies run their steps on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_reference import dense_attention
from launch_log import LaunchLog
from rank_world import STRICT, RankWorld, rank_world
from tiny_checkpoints import make_checkpoint
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.base.yield_points import YieldPoints
from csps.actors.attention.step_points import ModelShape, step_points
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.process_group import GroupMaker, InstanceGroup
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.timeline import StepClock
from csps.models.checkpoints.loading import load_network
from csps.models.network.network import Network
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

SLOTS = 512

MakeStrategy = Callable[[SpGroup, Engine], AbstractContextManager[Strategy]]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> attention output of one whole prompt."""


@dataclass(frozen=True)
class Forward:
    """All layers over one whole prompt."""

    x_td: Tensor
    """Rows after the last layer."""
    keys: list[Tensor]
    values: list[Tensor]


def dense_forward(network: Network, token_ids: Tensor, attend: Attend | None = None) -> Forward:
    """Compute by one member that has everything, in fp64 except for the network's own products."""
    positions = torch.arange(len(token_ids))
    rotary, x_td = network.rotary(positions), network.embed(token_ids)
    result = Forward(x_td, [], [])
    for index, layer in enumerate(network.layers):
        q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        if attend is None:
            out_thd, _ = dense_attention(
                q_thd,
                k_thd,
                v_thd,
                q_positions=positions,
                k_positions=positions,
                scale=network.spec.scale,
                window=network.spec.window_of(index),
                sinks_h=layer.weights.sinks,
            )
        else:
            out_thd = attend(index, q_thd, k_thd, v_thd)
        x_td = layer.finish(x_td, out_thd.float())
        result.keys.append(k_thd)
        result.values.append(v_thd)
    return replace(result, x_td=x_td)


@dataclass(frozen=True)
class RankResult:
    """State of one rank after a step."""

    x_td: Tensor
    keys: list[Tensor]
    """Per layer, as the strategy gave them to the pool."""
    values: list[Tensor]
    clock: StepClock
    others: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Circulated keys and values of the members' rows, by layer and member."""
    offered: dict[int, set[int]] = field(default_factory=dict)
    """Members whose KV was to circulate, by layer."""


class StrategyRanks:
    """Ranks with a model each, on which steps run with any strategy."""

    def __init__(
        self, model: Path, world: RankWorld, engines: Sequence[Engine], *, eight_bit_kv: bool
    ) -> None:
        self.network = load_network(model, rounds_kv=eight_bit_kv)
        self.world = world
        self.engines = tuple(engines)
        self.failed = False
        """A step has ended with an error, perhaps in the middle of an exchange."""

    def prompt(self, sequence_id: int, length: int) -> Tensor:
        """Return a request's token ids, always the same."""
        generator = torch.Generator().manual_seed(sequence_id)
        return torch.randint(0, 256, (length,), generator=generator)

    def run(
        self,
        step: PrefillStep,
        make: MakeStrategy,
        part: Callable[[int, int], None] | None = None,
        cancelled: Sequence[int] = (),
    ) -> list[RankResult]:
        """Run the step on every rank of its group's instances, in the group's order.

        Args:
            part: called with the number of each yield point that a rank passes; all layers have
                them, the last one too. The step must name the strategy that is made.
            cancelled: requests that are cancelled from the first layer on.
        """
        layout = self.engines[0].layout
        ranks = [rank for instance in step.group for rank in layout.ranks_of(instance)]
        self.failed = True
        results = self.world.each(
            len(ranks), lambda place: self._run_on(ranks[place], step, make, part, cancelled)
        )
        self.failed = False
        return results

    def points(
        self, step: PrefillStep, rank: int, part: Callable[[int, int], None] | None
    ) -> YieldPoints:
        """Return a rank's way through a step."""
        if part is None:
            return YieldPoints()
        spec = replace(self.network.spec, layers=self.network.spec.layers + 1)
        shape = ModelShape.of(spec, tp=self.engines[0].layout.tp, on_cuda=False)
        return YieldPoints(step_points(step, shape), partial(part, rank))

    def _run_on(
        self,
        rank: int,
        step: PrefillStep,
        make: MakeStrategy,
        part: Callable[[int, int], None] | None,
        cancelled: Sequence[int],
    ) -> RankResult:
        engine, clock = self.engines[rank], StepClock()
        member = step.group.index(engine.instance)
        points = self.points(step, rank, part)
        group = SpGroup(engine.mesh, engine.layout, step, member, clock, points, set(cancelled))
        network, result = engine.network, RankResult(torch.empty(0), [], [], clock)

        def keep(
            index: int,
            k_thd: Tensor,
            v_thd: Tensor,
            kept_ht: Tensor | None = None,
            /,
            *,
            member: int | None = None,
        ) -> None:
            assert kept_ht is None, "decode was to see all"
            if member is not None:
                assert (index, member) not in result.others, "others' KV came twice"
                result.others[index, member] = k_thd, v_thd
                return
            assert index == len(result.keys), "the layer's KV came twice, or another layer's"
            result.keys.append(k_thd)
            result.values.append(v_thd)

        rotary = network.rotary(group.positions)
        x_td = network.embed(self._tokens(group))
        with make(group, engine) as strategy:
            for index, layer in enumerate(network.layers):
                group.points.begin_layer(index)
                x_td = layer.mlp(strategy.attend_layer(index, layer, x_td, rotary, keep))
                result.offered[index] = set(strategy.offered(index, member))
        return replace(result, x_td=x_td)

    def _tokens(self, group: SpGroup) -> Tensor:
        parts = [
            self.prompt(part.chunk.sequence_id, part.span.stop)[part.span.start :]
            for part in group.local
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def check(
        self, step: PrefillStep, results: Sequence[RankResult], forwards: Sequence[Forward]
    ) -> None:
        """Assert that every rank has its instance's rows and KV heads as in the forward passes.

        Args:
            forwards: passes over each chunk's whole prompt.
        """
        whole = self._concatenated(step, [forward.x_td for forward in forwards])
        places = [(m, t) for m in range(len(step.group)) for t in range(self.engines[0].layout.tp)]
        for (member, tp_rank), result in zip(places, results, strict=True):
            rows = slice(step.bounds[member], step.bounds[member + 1])
            assert_near(result.x_td, whole[rows])
            engine = self.engines[self.engines[0].layout.rank_of(step.group[member], tp_rank)]
            heads = slice(engine.kv_heads.start, engine.kv_heads.stop)
            for index in range(engine.spec.layers):
                keys = self._concatenated(step, [forward.keys[index] for forward in forwards])
                values = self._concatenated(step, [forward.values[index] for forward in forwards])
                assert_near(result.keys[index], keys[rows, heads])
                assert_near(result.values[index], values[rows, heads])
                came = {other for at, other in result.others if at == index}
                assert came == result.offered[index]
                for other in came:
                    theirs = slice(step.bounds[other], step.bounds[other + 1])
                    assert_near(result.others[index, other][0], keys[theirs, heads])
                    assert_near(result.others[index, other][1], values[theirs, heads])

    def _concatenated(self, step: PrefillStep, prompts: Sequence[Tensor]) -> Tensor:
        chunks = zip(step.chunks, prompts, strict=True)
        return torch.cat([x[chunk.start : chunk.start + chunk.length] for chunk, x in chunks])

    def forwards(self, step: PrefillStep) -> list[Forward]:
        """Return dense forward passes of all chunks' whole prompts."""
        with torch.inference_mode():
            return [
                dense_forward(
                    self.network, self.prompt(chunk.sequence_id, chunk.start + chunk.length)
                )
                for chunk in step.chunks
            ]

    def hold_history(self, step: PrefillStep, forwards: Sequence[Forward]) -> None:
        """Store the chunks' history where the step says that it is."""
        with torch.inference_mode():
            self._hold_all(step, forwards)

    def all_logits(self, step: PrefillStep, make: MakeStrategy) -> list[Tensor]:
        """Run a step behind its history and free its KV; return the logits of all rows, by
        tensor-parallel rank."""
        self.hold_history(step, self.forwards(step))
        try:
            results = self.run(step, make)
        finally:
            for engine in self.engines:
                for chunk in step.chunks:
                    engine.pool.slots.free_sequence(chunk.sequence_id)
        with torch.inference_mode():
            found = [self.network.logits(result.x_td) for result in results]
        tp = self.engines[0].layout.tp
        return [torch.cat(found[rank::tp]) for rank in range(tp)]

    def _hold_all(self, step: PrefillStep, forwards: Sequence[Forward]) -> None:
        for chunk, forward in zip(step.chunks, forwards, strict=True):
            for share in chunk.history:
                for rank in self.engines[0].layout.ranks_of(share.instance):
                    self._hold(self.engines[rank], chunk.sequence_id, share.span, forward)

    def _hold(self, engine: Engine, sequence_id: int, span: Span, forward: Forward) -> None:
        heads, rows = (
            slice(engine.kv_heads.start, engine.kv_heads.stop),
            slice(span.start, span.stop),
        )
        engine.pool.slots.allocate(sequence_id, [span])
        for index in range(engine.spec.layers):
            k_thd, v_thd = forward.keys[index][rows, heads], forward.values[index][rows, heads]
            engine.pool.write(index, sequence_id, span, k_thd, v_thd)


@contextmanager
def strategy_ranks(
    model: Path,
    *,
    instances: int,
    tp: int = 1,
    data_group: GroupMaker | None = STRICT,
    log: LaunchLog | None = None,
    dtype: torch.dtype = torch.float32,
    eight_bit_kv: bool = False,
) -> Iterator[StrategyRanks]:
    """Yield a gang of so many instances, held to NCCL's rules, or with plain gloo (None); closed on
    the way out. What the ranks begin is noted in the log.
    """
    layout = GangLayout(world_size=instances * tp, tp=tp)
    store = HashStore()
    in_gang = data_group if log is None else log.group("gang", range(layout.world_size))
    with rank_world(layout.world_size, in_gang) as world:

        def build(rank: int) -> tuple[Engine, InstanceGroup]:
            instance = layout.instance_of(rank)
            members = list(layout.ranks_of(instance))
            group = InstanceGroup(
                store,
                name=f"instance{instance}",
                rank=layout.tp_rank_of(rank),
                size=tp,
                device="cpu",
                host="127.0.0.1",
                data_group=data_group if log is None else log.group(f"tp{instance}", members),
            )
            return _engine(model, world, layout, rank, group, dtype, eight_bit_kv), group

        built = world.each(layout.world_size, build)
        try:
            engines = [engine for engine, _ in built]
            yield StrategyRanks(model, world, engines, eight_bit_kv=eight_bit_kv)
        finally:
            world.each(layout.world_size, lambda rank: built[rank][1].close())


def _engine(
    model: Path,
    world: RankWorld,
    layout: GangLayout,
    rank: int,
    group: InstanceGroup,
    dtype: torch.dtype,
    eight_bit_kv: bool,
) -> Engine:
    tp_rank, tp = layout.tp_rank_of(rank), layout.tp
    load = partial(
        load_network, model, tp_rank=tp_rank, tp_size=tp, dtype=dtype, rounds_kv=eight_bit_kv
    )
    network = load(all_reduce=group.all_reduce) if tp > 1 else load()
    pool = KvPool(
        layers=network.spec.layers,
        slots=SLOTS,
        kv_heads=len(network.layers[0].shard.kv_heads),
        head_dim=network.spec.head_dim,
        dtype=dtype,
        device="cpu",
        eight_bits=eight_bit_kv,
    )
    return Engine(
        network=network,
        pool=pool,
        mesh=world.meshes[rank],
        layout=layout,
        device=torch.device("cpu"),
    )


def step_of(
    bounds: Sequence[int],
    lengths: Sequence[int],
    *,
    starts: Sequence[int] | None = None,
    history: Sequence[Sequence[KvSlice]] | None = None,
    group: Sequence[int] | None = None,
    **fields: object,
) -> PrefillStep:
    """Return a step of chunks of these lengths; chunk i belongs to request i."""
    starts = [0] * len(lengths) if starts is None else starts
    history = [()] * len(lengths) if history is None else history
    chunks = tuple(
        PrefillChunk(sequence_id=sequence_id, start=start, length=length, history=tuple(slices))
        for sequence_id, (start, length, slices) in enumerate(
            zip(starts, lengths, history, strict=True)
        )
    )
    assert bounds[-1] == sum(lengths)
    members = tuple(range(len(bounds) - 1)) if group is None else tuple(group)
    return PrefillStep(step_id=0, group=members, bounds=tuple(bounds), chunks=chunks, **fields)  # type: ignore[arg-type]


def cut(total: int, lengths: Sequence[int]) -> list[int]:
    """Return bounds of shards of these lengths, the last one taking what is left."""
    bounds = [0]
    for length in lengths:
        bounds.append(min(total, bounds[-1] + length))
    return [*bounds[:-1], total]


def shard_lengths(bounds: Sequence[int]) -> list[int]:
    """Return rows of each member."""
    return [stop - start for start, stop in pairwise(bounds)]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Assert equality within fp32's error over a few layers of a tiny model."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@contextmanager
def windowed_ranks(folder: Path, *, kv_heads: int) -> Iterator[StrategyRanks]:
    """Yield four instances of a model whose second and fourth of five layers see nine positions."""
    model = make_checkpoint(
        folder,
        "qwen2",
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=[FAR, NEAR, FAR, NEAR, FAR],
    )
    with strategy_ranks(model, instances=4) as ranks:
        yield ranks


LAYERS = 3
NEAR, FAR = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "mha": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    "qk-norm": {"family": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
    "experts": {"family": "glm4_moe", "num_attention_heads": 4, "num_key_value_heads": 2},
    "near": {"family": "mistral", "sliding_window": 7},
    "near-far": {"family": "gpt_oss", "sliding_window": 5, "layer_types": [NEAR, FAR, NEAR]},
    "far-near": {"family": "gemma3_text", "sliding_window": 9, "layer_types": [FAR, NEAR, FAR]},
}

Gangs = Callable[[str, int, int], StrategyRanks]
"""(model, instances, ranks of each) -> a gang, the same for the same arguments."""


@contextmanager
def started_once(
    folders: pytest.TempPathFactory, data_group: GroupMaker | None = STRICT
) -> Iterator[Gangs]:
    """Start each gang when it is first requested, or after a failed step, and close them at the
    end.
    """
    started: dict[tuple[str, int, int], StrategyRanks] = {}
    stacks: list[ExitStack] = []

    def gang(model: str, instances: int, tp: int) -> StrategyRanks:
        key = model, instances, tp
        if key not in started or started[key].failed:
            config = {"num_hidden_layers": LAYERS, **MODELS[model]}
            path = make_checkpoint(folders.mktemp(model), **config)
            stacks.append(ExitStack())
            started[key] = stacks[-1].enter_context(
                strategy_ranks(path, instances=instances, tp=tp, data_group=data_group)
            )
        return started[key]

    try:
        yield gang
    finally:
        with ThreadPoolExecutor() as threads:  # each waits for gloo most of the time
            list(threads.map(ExitStack.close, stacks))


def check_scattered_history(
    gang: StrategyRanks,
    make: MakeStrategy,
    part: Callable[[int, int], None] | None = None,
    **fields: object,
) -> None:
    """Check a chunk whose earlier KV is on both of two instances, between two whole prompts."""
    slices = [
        KvSlice(1, 0, 7),
        KvSlice(0, 7, 19),
        KvSlice(1, 19, 20),
    ]
    step = step_of([0, 12, 25], [4, 15, 6], starts=[0, 20, 0], history=[[], slices, []], **fields)
    forwards = gang.forwards(step)
    gang.hold_history(step, forwards)
    try:
        gang.check(step, gang.run(step, make, part), forwards)
    finally:
        for engine in gang.engines:
            engine.pool.slots.free_sequence(1)

"""On a device no layer waits for the host, and a layer's kernels do not grow with the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from weakref import ref

import msgspec
import pytest
import torch
from device_budget import DEVICE, Device, DeviceBudget, device
from gang_driver import bounds_of_rows, laid_out
from strategy_ranks import step_of
from test_launch_logs import STRATEGIES as STRATEGIES_OF_GANGS
from tiny_checkpoints import make_checkpoint
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.choice import ANY_ROWS
from csps.actors.attention.ulysses import Ulysses
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import BegunExchange, Expected, Mesh, Tag
from csps.actors.comm.process_group import Pending
from csps.actors.engine.decode_batch import DecodeBatch
from csps.actors.engine.iteration import forward
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.sampling.batch_sampler import sample_batch
from csps.actors.sampling.token_sampler import TokenSampler
from csps.actors.timing.timeline import StepClock
from csps.models.checkpoints.loading import load_network
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.messages import ReserveKv, SamplerInputs, Sampling
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.schema import encode
from csps.protocols.sequencer.log_entries import Change

__all__ = ["device"]
LAYERS, MORE_LAYERS, PROMPT, VOCAB = 3, 2, 40, 512


class NobodysMesh:
    """Messages go nowhere, and what is received holds anything."""

    rank, in_order, device = 0, True, DEVICE

    def __init__(self) -> None:
        self._buffers: list[ref[Tensor]] = []
        self.most_buffers = 0
        """Largest number of receive buffers at a time."""

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag) -> Pending:
        return Pending([], [])

    def expect(self, recvs: Sequence[Any], tag: Tag) -> Expected:
        self._buffers += (ref(tensor) for _, tensor in recvs)
        self.most_buffers = max(
            self.most_buffers, sum(buffer() is not None for buffer in self._buffers)
        )
        return Expected(cast(Mesh, self), recvs, tag)

    def start_exchange(self, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag) -> BegunExchange:
        for _, tensor in (*sends, *recvs):
            assert tensor.device == DEVICE
            assert tensor.is_contiguous()
        return BegunExchange(Pending([], []), Pending([], []))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deeper")
    return make_checkpoint(path, num_hidden_layers=LAYERS + MORE_LAYERS)


def engine_of(model: Path) -> Engine:
    network = load_network(model, device=DEVICE, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        # The pool looks positions up on the host.
        patch.setattr(Tensor, "cpu", lambda x: torch.zeros_like(x, device="cpu"))
        pool = KvPool(
            layers=network.spec.layers,
            slots=32_768,
            kv_heads=network.spec.kv_heads,
            head_dim=network.spec.head_dim,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
    return Engine(
        network=network,
        pool=pool,
        mesh=cast(Mesh, NobodysMesh()),
        layout=GangLayout(world_size=2, tp=1),
        device=DEVICE,
    )


def decode_batch_of(
    engine: Engine, own: int, foreign: int, piggybacked_prompts: int
) -> DecodeBatch:
    """Return a decode batch with `own` rows mastered here, half of whose prompts a peer holds,
    `foreign` rows of that peer, half of whose prompts are held here, and `piggybacked_prompts` of
    which the peer computes every second one."""
    batch = DecodeBatch(engine, lambda *told: None, lambda: None)
    joined: list[tuple[int, int | None]] = []
    for sequence_id in range(own + foreign + piggybacked_prompts):
        piggybacked, length = sequence_id >= own + foreign, PROMPT + sequence_id
        halves = Span(start=0, stop=length // 2), Span(start=length // 2, stop=length)
        request = ReserveKv(
            sequence_id=sequence_id,
            epoch="",
            slices=tuple(KvSlice.of(at, half) for at, half in enumerate(halves)),
            master=int(own <= sequence_id < own + foreign + piggybacked_prompts // 2),
            prompt_tokens=length,
            output_tokens=9,
            sampler=encode(SamplerInputs(sampling=Sampling(temperature=0, max_tokens=9))),
            prompt=bytes(4 * length) if piggybacked else b"",
        )
        batch.reservations.reserve(request, owner=1)
        shape = halves[0].length, engine.pool.kv_heads, engine.pool.head_dim
        k_thd = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        for layer in range(0 if piggybacked else engine.spec.layers):
            engine.pool.write(layer, sequence_id, halves[0], k_thd, k_thd)
        joined.append((sequence_id, None if piggybacked else 7))
    batch.change(Change(batch=0, version=1, joined=tuple(joined), budget=1000))
    return batch


def iteration(device: Device, model: Path, *rows: int) -> DeviceBudget:
    """Run the layers of one iteration, without sampling."""
    engine = engine_of(model)
    batch = decode_batch_of(engine, *rows)
    with torch.inference_mode(), device.counting() as budget:
        forward(engine, batch._next_batch(()))
    return budget


def decode_layer(device: Device, models: Sequence[Path], *rows: int) -> DeviceBudget:
    """Return what each further layer adds to an iteration."""
    few, many = (iteration(device, model, *rows) for model in models)
    layer = DeviceBudget()
    for name, count in (many.kernels - few.kernels).items():
        assert count % MORE_LAYERS == 0, name
        layer.kernels[name] = count // MORE_LAYERS
    layer.copies = many.copies - few.copies
    return layer


@pytest.mark.parametrize("foreign", [0, 3, 40])
def test_a_layer_of_decode_costs_the_same_whatever_the_batch(
    device: Device, model: Path, deeper: Path, foreign: int
) -> None:
    few, many = (decode_layer(device, (model, deeper), own, foreign, 0) for own in (3, 64))
    assert few.kernels == many.kernels
    assert not few.copies + many.copies
    assert few.kernels["_decode_kernel"] == 1 + bool(foreign)
    assert few.kernels.total() <= 45


def test_a_layer_of_an_iteration_with_piggybacked_prefill_waits_for_nothing(
    device: Device, model: Path, deeper: Path
) -> None:
    few, many = (decode_layer(device, (model, deeper), own, 3, 2) for own in (3, 64))
    assert few.kernels == many.kernels
    assert not few.copies + many.copies


def test_further_chunks_of_prompts_cost_no_launches(device: Device, model: Path) -> None:
    """Own chunks and those of a peer, behind KV that lies here and there."""
    kernels = []
    for prompts in (2, 8):
        engine = engine_of(model)
        batch = decode_batch_of(engine, 3, 3, prompts)
        for sequence in batch._sequences:
            if not sequence.decodes:
                sequence.next = PROMPT * 3 // 4
        with torch.inference_mode(), device.counting() as budget:
            forward(engine, batch._next_batch(()))
        kernels.append(budget.kernels)
        # Own chunks attend to KV here and to themselves, the peer's to KV here.
        assert budget.kernels["_attention_kernel"] == 3 * LAYERS
    assert kernels[0] == kernels[1]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rows", [(0, 3, 0), (3, 3, 2)])
def test_more_layers_need_no_more_buffers(
    model: Path, deeper: Path, rows: tuple[int, int, int]
) -> None:
    """Members that only help with others' rows need no more either."""
    most = []
    for deep_model in (model, deeper):
        engine = engine_of(deep_model)
        with torch.inference_mode():
            forward(engine, decode_batch_of(engine, *rows)._next_batch(()))
        most.append(cast(NobodysMesh, engine.mesh).most_buffers)
    assert 0 < most[0] == most[1]


def prefill_layer(device: Device, model: Path, lengths: Sequence[int]) -> DeviceBudget:
    engine = engine_of(model)
    step = step_of([0, sum(lengths)], lengths)
    group = SpGroup(engine.mesh, engine.layout, step, 0, StepClock())
    strategy = Ulysses(
        group,
        engine.pool,
        heads=engine.heads,
        kv_heads=len(engine.kv_heads),
        scale=engine.spec.scale,
    )
    rotary = engine.network.rotary(torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE))
    x_td = torch.empty(sum(lengths), engine.spec.hidden, dtype=torch.bfloat16, device=DEVICE)

    spans = {
        chunk.sequence_id: Span(start=chunk.start, stop=chunk.start + chunk.length)
        for chunk in step.chunks
    }
    for sequence_id, span in spans.items():
        engine.pool.slots.allocate(sequence_id, [span])

    def keep(
        index: int,
        k_thd: Tensor,
        v_thd: Tensor,
        kept_ht: Tensor | None = None,
        /,
        *,
        member: int | None = None,
    ) -> None:
        for sequence_id, span in spans.items():
            engine.pool.write(index, sequence_id, span, k_thd[: span.length], v_thd[: span.length])

    layer = engine.network.layers[0]
    with device.counting() as budget:
        layer.mlp(strategy.attend_layer(0, layer, x_td, rotary, keep))
    return budget


def test_a_layer_of_prefill_waits_for_nothing_and_costs_the_same_at_any_length(
    device: Device, model: Path
) -> None:
    with torch.inference_mode():
        short, long = (prefill_layer(device, model, [tokens]) for tokens in (30, 900))
        several = prefill_layer(device, model, [30, 20, 40])
    # With many keys they are cut into parts, and these merged.
    assert long.kernels - short.kernels <= Counter(_merge_stacked_kernel=1)
    assert short.kernels <= long.kernels
    assert not short.copies + long.copies + several.copies
    assert short.kernels.total() <= 35
    # A piece is an attention call of its own, and is written for itself.
    assert several.kernels.total() - short.kernels.total() <= 2 * 12


STRATEGIES = {name: make(4) for name, make in STRATEGIES_OF_GANGS.items()}


@pytest.mark.parametrize(
    ("strategy", "striped"),
    [
        *((name, False) for name in STRATEGIES),
        *((name, True) for name in sorted(ANY_ROWS & STRATEGIES.keys())),
    ],
)
def test_a_layer_of_no_strategy_waits_for_the_host(
    device: Device, model: Path, strategy: str, striped: bool
) -> None:
    """No member waits; tables that the first layers look up for all may be copied."""
    for member in range(4):
        engine = engine_of(model)
        cast(NobodysMesh, engine.mesh).rank = member
        step = step_of([0, 9, 14, 30, 48], [5, 40, 3])
        if striped:
            step = striped_step(step)
        layout = GangLayout(world_size=4, tp=1)
        engine = replace(engine, layout=layout)
        group = SpGroup(engine.mesh, layout, step, member, StepClock())
        with torch.inference_mode(), STRATEGIES[strategy](group, engine) as entered:
            rows = step.bounds[member + 1] - step.bounds[member]
            rotary = engine.network.rotary(torch.zeros(rows, dtype=torch.int64, device=DEVICE))
            x_td = torch.empty(rows, engine.spec.hidden, dtype=torch.bfloat16, device=DEVICE)
            copies = []
            for index, layer in enumerate(engine.network.layers[:-1]):
                with device.counting() as budget:
                    x_td = layer.mlp(entered.attend_layer(index, layer, x_td, rotary, _ignore_kv))
                copies.append(budget.copies)
        assert not copies[-1]
        assert budget.kernels.total() <= 250


def striped_step(step: PrefillStep) -> PrefillStep:
    chunks = [
        msgspec.structs.replace(
            chunk, rows=laid_out("striped", chunk.start, chunk.start + chunk.length, step.group)
        )
        for chunk in step.chunks
    ]
    bounds = tuple(bounds_of_rows(chunks, step.group))
    return msgspec.structs.replace(step, chunks=tuple(chunks), bounds=bounds)


def _ignore_kv(
    index: int,
    k_thd: Tensor,
    v_thd: Tensor,
    kept_ht: Tensor | None = None,
    /,
    *,
    member: int | None = None,
) -> None:
    """Ignore KV, because no gang decodes."""


def sampling_cost(device: Device, patch: pytest.MonkeyPatch, rows: int) -> tuple[DeviceBudget, int]:
    """Return the cost of sampling this many tokens in many ways, and how often the host waits."""
    ways = [
        Sampling(temperature=0, max_tokens=9),
        Sampling(temperature=0.7, top_k=20, max_tokens=9),
        Sampling(temperature=1, top_p=0.9, min_p=0.01, max_tokens=9),
        Sampling(temperature=1, top_k=200, repetition_penalty=1.1, max_tokens=9, logprobs=2),
        Sampling(temperature=0, logit_bias={3: 1.0}, max_tokens=9),
    ]
    samplers = [TokenSampler(ways[row % len(ways)], VOCAB, [1, 2]) for row in range(rows)]
    waits = 0
    tolist = Tensor.tolist

    def known(tensor: Tensor) -> Any:
        nonlocal waits
        waits += 1
        return tolist(torch.zeros(tensor.shape, dtype=tensor.dtype))

    patch.setattr(Tensor, "tolist", known)
    logits_bv = torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    # Penalties count tokens, and are moved once.
    patch.setattr(TokenSampler, "observe", lambda sampler, token: None)
    with torch.inference_mode(), device.counting() as budget:
        sample_batch(samplers, logits_bv, [3] * rows)
    return budget, waits


def test_sampling_waits_as_often_for_one_of_each_as_for_many(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (few, waits), (many, as_many) = (sampling_cost(device, monkeypatch, rows) for rows in (5, 50))
    assert waits == as_many == 6  # the second of a pair finds the device done
    assert few.kernels == many.kernels


def test_the_budget_counts_waits_launches_and_buffers(device: Device) -> None:
    with torch.inference_mode(), device.counting() as budget:
        x = torch.empty(3, 4, device=DEVICE)
        y = (x.view(4, 3)[1:] + 1).to(torch.bfloat16)
        y.to(torch.bfloat16)
        x[[0, 2]].sum()
        x.index_select(0, torch.tensor([1]).to(DEVICE))
    assert budget.kernels == Counter(add=1, to=1, index=1, sum=1, index_select=1)
    assert budget.copies == Counter(to=1, __getitem__=1)
    with torch.inference_mode(), pytest.raises((NotImplementedError, RuntimeError)):
        x[x > 0]

"""On a device no layer waits for the host, and a layer's kernels do not grow with the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from device_budget import DEVICE, Device, DeviceBudget, device
from strategy_ranks import job_of
from test_launch_logs import STRATEGIES as STRATEGIES_OF_GANGS
from tiny_checkpoints import make_checkpoint
from torch import Tensor

from csps.actors.engine.engine import Engine
from csps.actors.held_rows import HeldRows, RequestSlots
from csps.actors.job_clock import JobClock
from csps.actors.kv_pool import KvPool
from csps.actors.layout import GangLayout
from csps.actors.mesh import BegunExchange, Mesh, Pending, Tag
from csps.actors.sampling import TokenSampler, draw_batch
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.query_exchange import QueryRoutes, exchange_queries
from csps.actors.strategies.ulysses import Ulysses
from csps.models.loading import load_network
from csps.protocols.messages import Sampling, Span

__all__ = ["device"]
LAYERS, PROMPT, VOCAB = 4, 40, 512


class NobodysMesh:
    """Messages go nowhere, and what is received holds anything."""

    rank, in_order, device = 0, True, DEVICE

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag) -> Pending:
        return Pending([], [])

    def start_exchange(self, sends: Sequence[Any], recvs: Sequence[Any], tag: Tag) -> BegunExchange:
        for _, tensor in (*sends, *recvs):
            assert tensor.device == DEVICE
            assert tensor.is_contiguous()
        return BegunExchange(Pending([], []), Pending([], []))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def engine_of(model: Path) -> Engine:
    network = load_network(model, device=DEVICE, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        # The pool looks positions up on the host.
        patch.setattr(Tensor, "cpu", lambda x: torch.zeros_like(x, device="cpu"))
        pool = KvPool(
            layers=LAYERS,
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


def held_rows(engine: Engine, rids: Sequence[int]) -> HeldRows:
    """Prompts of different lengths, written in all layers, and room for an answer."""
    slots = []
    for rid in rids:
        prompt = Span(start=0, stop=PROMPT + rid)
        answer = Span(start=prompt.stop, stop=prompt.stop + 8)
        engine.pool.allocate(rid, [prompt, answer])
        shape = prompt.length, engine.pool.kv_heads, engine.pool.head_dim
        k_thd = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        for layer in range(LAYERS):
            engine.pool.write(layer, rid, prompt, k_thd, k_thd)
        slots.append(RequestSlots(engine.pool, rid, range(LAYERS), answer))
    return HeldRows(slots)


def decode_layers(device: Device, model: Path, own: int, foreign: int) -> list[DeviceBudget]:
    """The layers of one iteration on a rank that masters `own` rows, of which a peer holds half,
    and holds `foreign` rows of that peer's."""
    engine = engine_of(model)
    held = {None: held_rows(engine, range(own)), 1: held_rows(engine, range(own, own + foreign))}
    routes = QueryRoutes(
        rows=own,
        held_here=range(own),
        outgoing={1: range(0, own, 2)} if own else {},
        incoming={1: foreign} if foreign else {},
    )
    tokens_t = torch.zeros(own, dtype=torch.int64, device=DEVICE)
    slots = [it.append() for it in held[None].requests]
    slots_t = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    rotary, x_td = engine.network.rotary(tokens_t), engine.network.embed(tokens_t)
    layers = []
    for index, layer in enumerate(engine.network.layers):
        with device.counting() as budget:
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            engine.pool.write_slots(index, slots_t, k_thd, v_thd)
            out_thd = exchange_queries(
                q_thd,
                mesh=engine.mesh,
                routes=routes,
                partial=lambda peer, q_rhd, at=index: engine.attend_rows(at, q_rhd, held[peer]),
                tags=(Tag.DECODE_QUERY, Tag.DECODE_PARTIAL),
            )
            x_td = layer.finish(x_td, out_thd.to(q_thd.dtype))
        layers.append(budget)
    return layers


@pytest.mark.parametrize("foreign", [0, 3, 40])
def test_a_layer_of_decode_costs_the_same_whatever_the_batch(
    device: Device, model: Path, foreign: int
) -> None:
    with torch.inference_mode():
        few, many = (decode_layers(device, model, own, foreign) for own in (3, 64))
    for one, other in zip(few[1:], many[1:], strict=True):
        assert one.kernels == other.kernels
        assert one.kernels == few[1].kernels
        assert not one.copies
        assert not other.copies
    # What is looked up once for all layers is copied when the first one wants it.
    assert sum(few[0].copies.values()) == sum(many[0].copies.values()) <= 5
    assert few[1].kernels["_decode_kernel"] == 1 + bool(foreign)
    assert few[1].kernels.total() <= 45


def prefill_layer(device: Device, model: Path, lengths: Sequence[int]) -> DeviceBudget:
    engine = engine_of(model)
    job = job_of([0, sum(lengths)], lengths)
    group = SpGroup(engine.mesh, engine.layout, job, 0, JobClock())
    strategy = Ulysses(
        group,
        engine.pool,
        heads=engine.heads,
        kv_heads=len(engine.kv_heads),
        scale=engine.spec.scale,
    )
    rotary = engine.network.rotary(torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE))
    x_td = torch.empty(sum(lengths), engine.spec.hidden, dtype=torch.bfloat16, device=DEVICE)

    spans = {it.rid: Span(start=it.start, stop=it.start + it.length) for it in job.pieces}
    for rid, span in spans.items():
        engine.pool.allocate(rid, [span])

    def keep(index: int, k_thd: Tensor, v_thd: Tensor, kept_ht: Tensor | None = None) -> None:
        for rid, span in spans.items():
            engine.pool.write(index, rid, span, k_thd[: span.length], v_thd[: span.length])

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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_of_no_strategy_waits_for_the_host(
    device: Device, model: Path, strategy: str
) -> None:
    """Any member's; what the first layers look up for all may be copied."""
    for member in range(4):
        engine = engine_of(model)
        cast(NobodysMesh, engine.mesh).rank = member
        bounds = [0, 9, 14, 30, 48]
        job = job_of(bounds, [5, 40, 3])
        layout = GangLayout(world_size=4, tp=1)
        engine = replace(engine, layout=layout)
        group = SpGroup(engine.mesh, layout, job, member, JobClock())
        with torch.inference_mode(), STRATEGIES[strategy](group, engine) as it:
            rows = bounds[member + 1] - bounds[member]
            rotary = engine.network.rotary(torch.zeros(rows, dtype=torch.int64, device=DEVICE))
            x_td = torch.empty(rows, engine.spec.hidden, dtype=torch.bfloat16, device=DEVICE)
            copies = []
            for index, layer in enumerate(engine.network.layers[:-1]):
                with device.counting() as budget:
                    x_td = layer.mlp(it.attend_layer(index, layer, x_td, rotary, _keep))
                copies.append(budget.copies)
        assert not copies[-1]
        assert budget.kernels.total() <= 250


def _keep(index: int, k_thd: Tensor, v_thd: Tensor, kept_ht: Tensor | None = None) -> None:
    """Nobody decodes."""


def draws(device: Device, patch: pytest.MonkeyPatch, rows: int) -> tuple[DeviceBudget, int]:
    """What drawing so many tokens in many ways costs, and how often the host waits."""
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
        draw_batch(samplers, logits_bv, [3] * rows)
    return budget, waits


def test_drawing_waits_as_often_for_one_of_each_as_for_many(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (few, waits), (many, as_many) = (draws(device, monkeypatch, rows) for rows in (5, 50))
    assert waits == as_many == 6  # the second of a pair finds the device done
    assert few.kernels == many.kernels


def test_the_budget_counts(device: Device) -> None:
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

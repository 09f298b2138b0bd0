"""CSPS' sparse attention by itself: one prompt over the ranks that torchrun starts, without Ray.

    torchrun --nproc-per-node 4 examples/csa_torchrun.py --tokens 4096 --drop-ratio 0.5

Each rank computes a part of the prompt through all layers. The last one has the prompt's end: it
prints the next token, beside that of exact attention, and the bytes that the ranks have sent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.levels import DropSchedule
from csps.actors.attention.csa.strategy import Csa
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.timeline import StepClock
from csps.models.checkpoints.loading import load_network
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.attention.csa import CsaPlan, LayerGroup, halving
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.settings.settings import shipped_models

LEVELS = 2


def main() -> None:
    """Compute the prompt with and without dropping; print what the last rank finds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=shipped_models() / "needle")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--drop-ratio", type=float, default=0.5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, ranks = next(dist.rendezvous("env://"))
    mesh = Mesh(store, name="csa", rank=rank, world_size=ranks, device="cpu", host="127.0.0.1")
    try:
        engine = engine_of(arguments.model, mesh, arguments.tokens)
        tokenizer = Tokenizer(arguments.model)
        prompt = tokenizer.encode("All work and no play makes Jack a dull boy. " * arguments.tokens)
        for drop_ratio in (0.0, arguments.drop_ratio):
            before = sum(mesh.bytes_sent)
            with torch.inference_mode():
                token = next_token(engine, prompt[: arguments.tokens], drop_ratio)
            if rank == ranks - 1:
                sent = (sum(mesh.bytes_sent) - before) / 2**20
                print(
                    f"drop ratio {drop_ratio}: {tokenizer.decode([token])!r}, {sent:.2f} MiB sent"
                )
    finally:
        mesh.close()


def engine_of(model: Path, mesh: Mesh, tokens: int) -> Engine:
    """Return what a rank computes with: weights, room for its KV, its connections."""
    network = load_network(model)
    spec = network.spec
    pool = KvPool(
        layers=spec.layers,
        slots=tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    layout = GangLayout(world_size=mesh.world_size, tp=1)
    return Engine(network=network, pool=pool, mesh=mesh, layout=layout, device=mesh.device)


def next_token(engine: Engine, prompt: list[int], drop_ratio: float) -> int:
    """Compute this rank's part of the prompt; return the likeliest token after its last row."""
    ranks, spec, network = engine.mesh.world_size, engine.spec, engine.network
    bounds = tuple(len(prompt) * rank // ranks for rank in range(ranks + 1))
    plan = CsaPlan(
        locations=tuple(f"0-0-{rank}" for rank in range(ranks)),
        levels=LEVELS,
        layer_groups=(
            LayerGroup(
                first=0,
                stop=spec.layers,
                drop_ratios=halving(drop_ratio, LEVELS),
                micro_partitions=(2,) * LEVELS,
            ),
        ),
    )
    step = PrefillStep(
        step_id=0,
        group=tuple(range(ranks)),
        bounds=bounds,
        chunks=(PrefillChunk(sequence_id=0, start=0, length=len(prompt)),),
        strategy="csa",
        csa=plan,
    )
    group = SpGroup(engine.mesh, engine.layout, step, engine.mesh.rank, StepClock())
    schedule = DropSchedule(
        plan=plan, layers=spec.layers, kv_heads=engine.kv_heads, total_kv_heads=spec.kv_heads
    )
    own = torch.tensor(prompt[bounds[group.member] : bounds[group.member + 1]])
    rotary, x_td = network.rotary(group.positions), network.embed(own)
    with Csa(group, schedule, engine.pool, heads=engine.heads, scale=spec.scale) as csa:
        for index, layer in enumerate(network.layers):
            group.points.begin_layer(index)
            # A server stores each layer's keys and values; here nobody reads them again.
            attended_td = csa.attend_layer(index, layer, x_td, rotary, lambda *_, **__: None)
            x_td = layer.mlp(attended_td)
    return int(network.logits(x_td[-1:]).argmax())


if __name__ == "__main__":
    main()

"""An engine with the weights of one rank's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from csps.actors.engine.engine import Engine
from csps.actors.instance_group import InstanceGroup
from csps.actors.kv_pool import KvPool
from csps.actors.layout import GangLayout
from csps.actors.mesh import Mesh
from csps.actors.model_fingerprint import model_fingerprint
from csps.actors.rank_config import RankConfig
from csps.models.checkpoint import open_checkpoint
from csps.models.loading import read_network


def load_engine(config: RankConfig, mesh: Mesh, instance: InstanceGroup) -> tuple[Engine, str]:
    """The engine of a rank, and the fingerprint of its weights (`model_fingerprint`)."""
    dtype = getattr(torch, config.dtype)
    with open_checkpoint(Path(config.model_dir)) as checkpoint:
        network = read_network(
            checkpoint,
            tp_rank=instance.rank,
            tp_size=config.tp,
            dtype=dtype,
            device=config.device,
            all_reduce=instance.all_reduce if config.tp > 1 else None,
        )
        fingerprint = model_fingerprint(
            checkpoint,
            instance,
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
        )
    spec = network.spec
    pool = KvPool(
        layers=spec.layers,
        slots=config.kv_slots,
        kv_heads=len(network.layers[0].share.kv_heads),
        head_dim=spec.head_dim,
        dtype=dtype,
        device=config.device,
    )
    engine = Engine(
        network=network,
        pool=pool,
        mesh=mesh,
        layout=GangLayout(world_size=config.world_size, tp=config.tp),
        device=torch.device(config.device),
    )
    return engine, fingerprint

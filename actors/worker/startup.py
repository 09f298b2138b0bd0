"""The start of a rank: its engine is loaded, and its end of the gang's log opened."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import query_groups
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.process_group import InstanceGroup
from csps.actors.comm.rendezvous import JOIN_DEADLINE
from csps.actors.engine.log_end import MemberEnd, SequencerEnd
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.device_pace import wait_for_device
from csps.actors.worker.rank_config import RankConfig
from csps.kernels import cpu_product
from csps.kernels.attention import prepare_attention
from csps.models.checkpoints.checkpoint import Checkpoint, config_bytes, open_checkpoint
from csps.models.checkpoints.loading import read_network, weights_checksum
from csps.models.tokenizers.grammar import Grammars
from csps.protocols.sequencer.log_connection import LogListener, join_log
from csps.protocols.sequencer.sequencer import Sequencer

_log = logging.getLogger(__name__)

DECODE_BATCH = 0
"""Id of the one decode batch of a gang that may decode."""
_WORD_BITS = 16
"""Bits of a word, few enough that no sum over an instance's ranks overflows int64."""


def load_engine(config: RankConfig, mesh: Mesh, instance: InstanceGroup) -> tuple[Engine, str]:
    """Return the engine of a rank and the fingerprint of its weights (`model_fingerprint`)."""
    dtype = getattr(torch, config.dtype)
    if mesh.device.type == "cpu":
        cpu_product.prepare(dtype)  # before matrices are read: those without such code are packed
    with open_checkpoint(Path(config.model_dir), config.model_overrides) as checkpoint:
        network = read_network(
            checkpoint,
            tp_rank=instance.rank,
            tp_size=config.tp,
            dtype=dtype,
            device=mesh.device,
            all_reduce=instance.all_reduce if config.tp > 1 else None,
            # Steps cut matrices by heads, and have so many rows that packing gains nothing.
            packed=not config.may_prefill,
            rounds_kv=config.eight_bit_kv,
            fp8=config.weight_dtype == "fp8",
        )
        fingerprint = model_fingerprint(
            checkpoint,
            instance,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            weight_dtype=config.weight_dtype,
            device=mesh.device,
            threads=config.threads,
        )
    spec = network.spec
    pool = KvPool(
        layers=spec.layers,
        slots=config.kv_slots,
        kv_heads=len(network.layers[0].shard.kv_heads),
        head_dim=spec.head_dim,
        dtype=dtype,
        device=mesh.device,
        windowed=spec.near_layers if config.window_slots else frozenset(),
        window_slots=config.window_slots,
        eight_bits=config.eight_bit_kv,
    )
    engine = Engine(
        network=network,
        pool=pool,
        mesh=mesh,
        layout=GangLayout(world_size=config.world_size, tp=config.tp),
        device=mesh.device,
        grammars=None if instance.rank else Grammars(Path(config.model_dir), spec.vocab),
    )
    prepare_attention(
        heads=engine.heads,
        kv_heads=pool.kv_heads,
        dim=spec.head_dim,
        dtypes={dtype, pool.k.dtype},
        device=engine.device,
    )
    return engine, fingerprint


def warm_up(engine: Engine) -> None:
    """Compile all kernels that the rank can need; a CPU has none to compile."""
    if engine.device.type != "cuda":
        return
    began = time.monotonic()
    with torch.inference_mode():
        compile_kernels(engine)
    wait_for_device(engine.device)
    _log.info("rank %d: kernels are compiled, %.1f s", engine.rank, time.monotonic() - began)


def compile_kernels(engine: Engine) -> None:
    """Launch every variant of the kernels that steps and iterations on a GPU can need."""
    # Imported on use: a machine without a GPU needs no Triton.
    from csps.kernels.warm_up import launch_variants

    spec, layout, kv_heads = engine.spec, engine.layout, len(engine.kv_heads)
    # Heads are split over the instances of a group, or over all of its ranks.
    groups = query_groups(engine.heads, kv_heads, layout.instances)
    groups |= query_groups(spec.heads, spec.kv_heads, layout.world_size)
    launch_variants(
        engine.device,
        engine.pool.dtype,
        heads=engine.heads,
        kv_heads=kv_heads,
        head_dim=spec.head_dim,
        groups=groups,
        window=spec.window if spec.near_layers else None,
    )


def model_fingerprint(
    checkpoint: Checkpoint,
    instance: InstanceGroup,
    *,
    dtype: str,
    kv_dtype: str,
    weight_dtype: str,
    device: torch.device | str,
    threads: int,
) -> str:
    """Return a hexadecimal digest of the configuration, the dtype to compute in, the forms of KV
    and weights, and the weights as they were read. Two gangs need equal ones to use each other's
    KV.

    It does not depend on the number of ranks in an instance. All of them have to call this.
    """
    own = weights_checksum(checkpoint, part=instance.rank, parts=instance.size, threads=threads)
    weights = _sum_over(instance, own, device)
    config = config_bytes(checkpoint.model_dir, checkpoint.overrides)
    digest = hashlib.blake2b(config, digest_size=8)
    numbers = dtype if kv_dtype == "auto" else f"{dtype} {kv_dtype}"
    if weight_dtype != "auto":
        numbers += f" weights {weight_dtype}"
    digest.update(f"{numbers} {weights}".encode())
    return digest.hexdigest()


def _sum_over(instance: InstanceGroup, checksum: int, device: torch.device | str) -> int:
    """Return the sum of 63-bit numbers, modulo 2**63."""
    words = [checksum >> shift & (1 << _WORD_BITS) - 1 for shift in range(0, 64, _WORD_BITS)]
    sums: list[int] = instance.all_reduce(torch.tensor(words, device=device)).tolist()
    return sum(word << index * _WORD_BITS for index, word in enumerate(sums)) % 2**63


def open_log(
    config: RankConfig, store: Store, store_host: str, secret: bytes
) -> SequencerEnd | MemberEnd:
    """Open this rank's end of the log. Rank 0 hosts the sequencer; the others find it in the gang's
    store.

    Args:
        store_host: host of rank 0, which serves the store as well.
    """
    key, deadline_s = f"{config.gang_id}/log", JOIN_DEADLINE.total_seconds()
    if config.rank:
        port = int(store.get(key))
        return MemberEnd(
            join_log(store_host, port, rank=config.rank, secret=secret, deadline_s=deadline_s)
        )
    sequencer = Sequencer(config.world_size, int(config.quantum_ms * 1e6))
    if config.may_decode:
        ranks = range(config.world_size)
        sequencer.open_batch(DECODE_BATCH, tuple(ranks), masters=tuple(ranks[:: config.tp]))
    listener = LogListener(config.host)
    try:
        store.set(key, str(listener.port))
        others = range(1, config.world_size)
        members = listener.accept(others, secret=secret, deadline_s=deadline_s)
    finally:
        listener.close()
    return SequencerEnd(sequencer, members)

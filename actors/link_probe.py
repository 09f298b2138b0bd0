"""Measure links between ranks: `python -m csps.actors.link_probe RANK RANKS HOST STORE SIZES
ROUNDS [DEVICE]`.

Messages go through the engine's own `Mesh`. Rank 0 hosts the rendezvous store and prints its
address, HOST:PORT; STORE is that address for the others and `-` for rank 0. SIZES are bytes,
separated by commas. Pairs are measured one after another, in the order of `itertools.combinations`,
so that none shares a wire. A pair's lower rank sends a block. Its higher rank prints the seconds of
each round trip, a list for each size. CSPS_CLUSTER_SECRET is the same for all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations

import torch
from torch._C._distributed_c10d import Store

from csps.actors.comm.mesh import Mesh, Tag
from csps.actors.comm.rendezvous import StoreAddress, host_store, join_store

PAIR_TIMEOUT = timedelta(minutes=10)
"""Deadline for the measurement of another pair."""


def main(arguments: Sequence[str]) -> None:
    """Measure as one rank."""
    rank, ranks, host, store_at, sizes, rounds, *device = arguments
    store = _store(host, store_at)
    place = (device or ["cpu"])[0]
    mesh = Mesh(store, name="probe", rank=int(rank), world_size=int(ranks), device=place, host=host)
    for pair in combinations(range(mesh.world_size), 2):
        if mesh.rank in pair:
            seconds = [_rounds(mesh, pair, int(size), int(rounds)) for size in sizes.split(",")]
            if mesh.rank == max(pair):
                print(json.dumps(seconds), flush=True)
                store.set(_measured(pair), "")
        store.wait([_measured(pair)], PAIR_TIMEOUT)
    _leave(store, mesh)


def _store(host: str, store_at: str) -> Store:
    secret = os.environ["CSPS_CLUSTER_SECRET"].encode()
    if store_at != "-":
        address, port = store_at.rsplit(":", 1)
        return join_store(StoreAddress(address, int(port)), secret)
    hosted = host_store(host, secret)
    print(json.dumps(f"{hosted.address.host}:{hosted.address.port}"), flush=True)
    return hosted.store


def _leave(store: Store, mesh: Mesh) -> None:
    """Close the mesh; rank 0, which hosts the store, closes last."""
    if mesh.rank:
        store.set(f"left {mesh.rank}", "")
    else:
        store.wait([f"left {rank}" for rank in range(1, mesh.world_size)], PAIR_TIMEOUT)
    mesh.close()


def _measured(pair: tuple[int, int]) -> str:
    return "measured {}-{}".format(*pair)


def _rounds(mesh: Mesh, pair: tuple[int, int], size: int, rounds: int) -> list[float]:
    """Return the seconds of each round, without the first one, which connects."""
    block = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    return [_round(mesh, pair, block) for _ in range(rounds + 1)][1:]


def _round(mesh: Mesh, pair: tuple[int, int], block: torch.Tensor) -> float:
    """Send a block from the lower rank; return the seconds until the other acknowledged it."""
    begin, word = time.perf_counter(), torch.zeros(1, device=block.device)
    sender, receiver = pair
    if mesh.rank == sender:
        mesh.exchange([(receiver, block)], [], Tag.KV_MOVE).wait()
        mesh.exchange([], [(receiver, word)], Tag.KV_MOVE).wait()
    else:
        mesh.exchange([], [(sender, block)], Tag.KV_MOVE).wait()
        mesh.exchange([(sender, word)], [], Tag.KV_MOVE).wait()
    if block.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1:])

"""How long one rank takes to send to another: `python -m csps.actors.link_probe RANK HOST STORE
SIZES ROUNDS [DEVICE]`.

Goes through the engine's own `Mesh`, so it measures what ranks get. Rank 0 hosts the rendezvous
store and prints its address, HOST:PORT; STORE is that address for rank 1 and `-` for rank 0. SIZES
are bytes, separated by commas. Rank 1 prints a list of the rounds' seconds for each size: of
sending a block there and having a word's answer back.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

from csps.actors.mesh import Mesh, Tag
from csps.actors.rendezvous import StoreAddress, host_store, join_store


def main(arguments: Sequence[str]) -> None:
    """Be one end."""
    rank, host, store_at, sizes, rounds, *device = arguments
    if rank == "0":
        hosted = host_store(host)
        print(json.dumps(f"{hosted.address.host}:{hosted.address.port}"), flush=True)
        store = hosted.store
    else:
        address, port = store_at.rsplit(":", 1)
        store = join_store(StoreAddress(address, int(port)))
    place = (device or ["cpu"])[0]
    mesh = Mesh(store, name="probe", rank=int(rank), world_size=2, device=place, host=host)
    seconds = [_rounds(mesh, int(size), int(rounds), place) for size in sizes.split(",")]
    if rank == "1":
        print(json.dumps(seconds), flush=True)
    mesh.close()


def _rounds(mesh: Mesh, size: int, rounds: int, device: str) -> list[float]:
    """Seconds of each round with blocks of a size; the first one, which connects, is left out."""
    block = torch.zeros(size, dtype=torch.uint8, device=device)
    return [_round(mesh, block) for _ in range(rounds + 1)][1:]


def _round(mesh: Mesh, block: torch.Tensor) -> float:
    """Rank 0 sends the block, rank 1 acknowledges it: seconds of the round trip."""
    begin, word = time.perf_counter(), torch.zeros(1, device=block.device)
    if mesh.rank == 0:
        mesh.exchange([(1, block)], [], Tag.KV_MOVE).wait()
        mesh.exchange([], [(1, word)], Tag.KV_MOVE).wait()
    else:
        mesh.exchange([], [(0, block)], Tag.KV_MOVE).wait()
        mesh.exchange([(0, word)], [], Tag.KV_MOVE).wait()
    if block.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1:])

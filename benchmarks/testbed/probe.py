"""How fast one rank sends to another: `python probe.py RANK HOST PORT MEGABYTES ROUNDS`.

Goes through the engine's own `Mesh`, so it measures what ranks get. Rank 0 is given port 0, hosts
the rendezvous store and prints its port; rank 1 is given that host and port as STORE_HOST:PORT and
prints the seconds of each round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

from csps.actors.mesh import Mesh, StoreAddress, Tag, host_store, join_store


def main(arguments: Sequence[str]) -> None:
    """Be one end."""
    rank, host, store_at = int(arguments[0]), arguments[1], arguments[2]
    megabytes, rounds = float(arguments[3]), int(arguments[4])
    if rank == 0:
        hosted = host_store(host)
        print(json.dumps(f"{hosted.address.host}:{hosted.address.port}"), flush=True)
        store = hosted.store
    else:
        address, port = store_at.rsplit(":", 1)
        store = join_store(StoreAddress(address, int(port)))
    mesh = Mesh(store, name="probe", rank=rank, world_size=2, device="cpu", host=host)
    block = torch.zeros(int(megabytes * 1e6), dtype=torch.uint8)
    seconds = [_round(mesh, block) for _ in range(rounds + 1)]
    if rank == 1:
        print(json.dumps(seconds[1:]), flush=True)  # the first one connects
    mesh.close()


def _round(mesh: Mesh, block: torch.Tensor) -> float:
    """Rank 0 sends the block, rank 1 acknowledges it: seconds of the round trip."""
    begin, word = time.perf_counter(), torch.zeros(1)
    if mesh.rank == 0:
        mesh.send(block, 1, Tag.KV_MOVE).wait()
        mesh.recv(word, 1, Tag.KV_MOVE).wait()
    else:
        mesh.recv(block, 0, Tag.KV_MOVE).wait()
        mesh.send(word, 0, Tag.KV_MOVE).wait()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1:])

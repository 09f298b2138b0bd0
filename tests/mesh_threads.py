"""The ranks of a mesh as threads of the test: real gloo, no processes, up in milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from csps.actors.comm.mesh import Mesh
from csps.actors.comm.process_group import GroupMaker

T = TypeVar("T")
FINISH_S = 60.0
_names = itertools.count()


def on_ranks(
    world_size: int,
    body: Callable[[Mesh], T],
    data_group: GroupMaker | None = None,
    device: str = "cpu",
) -> list[T]:
    """Return the results of `body` on each rank of a mesh, in rank order; a failure ends all
    ranks.
    """
    store, name = HashStore(), f"mesh{next(_names)}"
    meshes: list[Mesh] = []

    def run(rank: int) -> T:
        mesh = Mesh(
            store,
            name=name,
            rank=rank,
            world_size=world_size,
            device=device,
            host="127.0.0.1",
            data_group=data_group,
        )
        meshes.append(mesh)
        return body(mesh)

    with ThreadPoolExecutor(world_size) as threads:
        running = [threads.submit(run, rank) for rank in range(world_size)]
        done, _ = wait(running, FINISH_S, FIRST_EXCEPTION)
        with ThreadPoolExecutor(world_size) as closing:  # gloo takes 60 ms for each to time out
            list(closing.map(Mesh.close, meshes))
    for future in done:
        if (error := future.exception()) is not None:
            raise error
    return [future.result() for future in running]

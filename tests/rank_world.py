"""Ranks that live as threads of the test's process through many steps, each with its own mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from strict_group import strict
from torch.distributed import HashStore

from csps.actors.attention.base.group import SpGroup
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.process_group import GroupMaker
from csps.actors.timing.timeline import StepClock
from csps.protocols.gang.step_messages import PrefillStep

T = TypeVar("T")
STRICT = strict()
DEADLINE_S = 60.0


class RankWorld:
    """A number of ranks that are ready to run steps."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self.meshes = tuple(meshes)

    def each(self, ranks: int, task: Callable[[int], T]) -> list[T]:
        """Return the results of `task(rank)`, run at once on the first ranks."""
        with ThreadPoolExecutor(ranks) as threads:
            running = [threads.submit(_inference, task, rank) for rank in range(ranks)]
            return [future.result(DEADLINE_S) for future in running]

    def group(self, step: PrefillStep, member: int, clock: StepClock | None = None) -> SpGroup:
        """Return the step's group as its member sees it; instance i is rank i."""
        layout = GangLayout(world_size=len(self.meshes), tp=1)
        mesh = self.meshes[step.group[member]]
        return SpGroup(mesh, layout, step, member, clock or StepClock())


def _inference(task: Callable[[int], T], rank: int) -> T:
    with torch.inference_mode():
        return task(rank)


@contextmanager
def rank_world(ranks: int, data_group: GroupMaker | None = STRICT) -> Iterator[RankWorld]:
    """Yield a world of ranks under NCCL's rules, or with plain gloo (None), and close it."""
    store = HashStore()

    def join(rank: int) -> Mesh:
        return Mesh(
            store,
            name="world",
            rank=rank,
            world_size=ranks,
            device="cpu",
            host="127.0.0.1",
            data_group=data_group,
        )

    with ThreadPoolExecutor(ranks) as threads:
        meshes = list(threads.map(join, range(ranks), timeout=DEADLINE_S))
    world = RankWorld(meshes)
    try:
        yield world
    finally:
        # At once: gloo takes 60 ms for each to time out.
        world.each(ranks, lambda rank: meshes[rank].close())

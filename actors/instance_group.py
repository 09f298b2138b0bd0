"""Sums inside of an instance."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from csps.actors.launch_order import LaunchOrder
from csps.actors.process_group import DataGroup, GroupMaker, Pending, with_peer


class InstanceGroup:
    """The tensor-parallel ranks of one instance, which sum partial results."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        size: int,
        device: str,
        host: str,
        data_group: GroupMaker | None = None,
        launches: LaunchOrder | None = None,
    ) -> None:
        """
        Args:
            data_group, launches: as a mesh's.
        """
        self._launches = launches or LaunchOrder()
        self.rank, self.size = rank, size
        self._closed = threading.Event()
        self._data: DataGroup | None = None
        if size > 1:
            self._data = DataGroup(
                PrefixStore(name, store),
                rank=rank,
                size=size,
                device=torch.device(device),
                host=host,
                maker=data_group,
            )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the instance, in place."""
        self._launches.check()
        if self._data is not None and tensor.numel():
            with with_peer():
                work = self._data.group.allreduce([tensor])
            Pending([work], [tensor], self._closed, in_order=self._data.in_order).wait()
        return tensor

    def close(self) -> None:
        """Leave the group: pending sums fail, here and at the other ranks."""
        if self._data is not None:
            self._closed.set()
            self._data.close()

"""What the leader of a prefill job tells its group between two layers.

The router's word reaches every rank at a time of its own, but members that exchange rows have to
agree on what they compute: what the leader knows counts, for all of them from the same layer on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csps.protocols.messages import PrefillJob

MAX_URGENT = 6
"""Urgent jobs that one order names; the next ones run at the next layer."""


@dataclass(frozen=True, kw_only=True)
class PrefillOrders:
    """How the group goes on."""

    withdrawn: frozenset[int] = frozenset()
    """The job's requests that nobody wants any more. When it is all of them, the job stops."""
    urgent: tuple[int, ...] = ()
    """Ids of up to `MAX_URGENT` urgent jobs to run before the next layer."""

    def pack(self, job: PrefillJob) -> Tensor:
        """As int64 words: a flag for each piece, the number of urgent jobs and their ids."""
        words = self.room(job).zero_()
        for index, piece in enumerate(job.pieces):
            words[index] = piece.rid in self.withdrawn
        numbers = torch.tensor((len(self.urgent), *self.urgent))
        words[len(job.pieces) :][: len(numbers)] = numbers
        return words

    @staticmethod
    def room(job: PrefillJob) -> Tensor:
        """For the words, of which there are equally many between any two layers of a job."""
        return torch.empty(len(job.pieces) + 1 + MAX_URGENT, dtype=torch.int64)

    @classmethod
    def unpack(cls, words: Tensor, job: PrefillJob) -> PrefillOrders:
        """The orders that `pack` has put into words."""
        flags, (count, *urgent) = words[: len(job.pieces)], words[len(job.pieces) :].tolist()
        rids = (piece.rid for piece, flag in zip(job.pieces, flags.tolist(), strict=True) if flag)
        return cls(withdrawn=frozenset(rids), urgent=tuple(urgent[:count]))

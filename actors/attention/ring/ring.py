"""The common part of ring pass-KV and ring pass-Q: rotating shards, and attention to them.

The members form a ring in the order of the group. Each sends its current shard to the next member
and receives one from the previous member, N - 1 times. Attention to a shard overlaps the transfer
of the next one. A member begins an exchange when the previous round is over, and all members at
the same yield point (`step_points`), so a step can pause inside a ring. Messages are padded to the
longest shard, as ring collectives need equal lengths (CP §3.5.2).

Shape suffixes: t rows, k keys, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.attention.ring.ring_plan import RingBlock, RingPlan
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into

BlockKeys = Callable[[int, RingBlock], tuple[Tensor, Tensor]]
"""(chunk, block) -> k and v of the block's `keys`, (k, g, d)."""


class Rounds:
    """The rounds of one layer; the first exchange begins at once.

    Iteration yields (member, its shard), own shard first, and closes a phase after each.

    Args:
        shard: data of this member, contiguous, of one length at all members.
    """

    def __init__(self, group: SpGroup, transfers: Transfers, layer: int, shard: Tensor) -> None:
        self._group, self._transfers, self._layer = group, transfers, layer
        self._shard = shard
        self._sent = 0
        self._incoming: tuple[PendingTransfer, Tensor] | None = None
        self._pass_on()

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        size = self._group.size
        for hop in range(size):
            if hop:
                assert self._incoming is not None, f"round {hop} has no exchange"
                transfer, self._shard = self._incoming
                self._transfers.wait(transfer)
                self._pass_on()
            yield (self._group.member - hop) % size, self._shard
            self._group.points.close()

    def _pass_on(self) -> None:
        """Begin to send the current shard, and to receive the next."""
        group = self._group
        if self._sent == group.size - 1:
            return
        self._sent += 1
        next_shard = self._shard.new_empty(self._shard.shape)
        to = group.peers[(group.member + 1) % group.size]
        source = group.peers[(group.member - 1) % group.size]
        label = Label(phase="ring", layer=self._layer)
        transfer = self._transfers.start(
            [(to, self._shard)], [(source, next_shard)], Tag.RING, label
        )
        self._incoming = transfer, next_shard


class RingAttention:
    """Attention of one member's queries to one member's keys, block by block."""

    def __init__(self, group: SpGroup, plan: RingPlan, scale: float) -> None:
        self._group, self._plan, self._scale = group, plan, scale

    def attend(
        self,
        layer: int,
        asker: int,
        holder: int,
        q_thd: Tensor,
        keys: BlockKeys,
        out_thd: Tensor,
        lse_ht: Tensor,
    ) -> None:
        """Merge attention of the asker's queries to the holder's keys into a running result.

        Args:
            q_thd: queries of the asker's rows, possibly with padding behind them.
            out_thd, lse_ht: fp32, or fp64 for fp64 inputs; overwritten.
        """
        for chunk, block in self._active_blocks(asker, holder):
            k_kgd, v_kgd = keys(chunk, block)
            q_bhd = q_thd[block.queries]
            for rows in query_blocks(q_bhd, block.key_count):
                with self._group.clock.timeline.phase("attention", layer=layer):
                    part = attention(
                        q_bhd[rows],
                        k_kgd,
                        v_kgd,
                        q_positions=None if block.q_positions is None else block.q_positions[rows],
                        k_positions=block.k_positions,
                        scale=self._scale,
                    )
                    at = slice(block.queries.start + rows.start, block.queries.start + rows.stop)
                    merge_into(out_thd[at], lse_ht[:, at], *part)
                self._group.points.point()

    def _active_blocks(self, asker: int, holder: int) -> Iterable[tuple[int, RingBlock]]:
        chunks = self._group.step.chunks
        return chain.from_iterable(
            ((index, block) for block in blocks)
            for index, blocks in self._plan.blocks(asker, holder).items()
            if self._group.is_active(chunks[index])
        )


def padded(x_tnd: Tensor, tokens: int) -> Tensor:
    """Return the rows padded to `tokens`, contiguous; the values of the padding are undefined."""
    if len(x_tnd) == tokens:
        return x_tnd.contiguous()
    padded_tnd = x_tnd.new_empty(tokens, *x_tnd.shape[1:])
    padded_tnd[: len(x_tnd)] = x_tnd
    return padded_tnd

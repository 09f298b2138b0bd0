"""What ring pass-KV and ring pass-Q have in common: shares that go round, and attention to them.

Members stand in a ring in the order of the group. Everyone sends what it has to the next and
receives from the one before, N - 1 times; while a share is on its way, the one before is computed.
Nothing is begun ahead: an exchange is begun when the round before it is over, at all members after
the same part (`parts`), so that a step can stand still inside a ring. Messages are equally long,
padded to the longest share, as collectives over rings want them (CP §3.5.2).

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
from csps.kernels.arguments import Positions
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into

BlockKeys = Callable[[int, RingBlock], tuple[Tensor, Tensor]]
"""(piece, block) -> k and v that the block's `keys` number, (k, g, d)."""


class Rounds:
    """One layer's way round; the first exchange is begun at once. Iterated over it gives (the
    member whose share it is, the share), own one first, and closes a phase after each.

    Args:
        share: of this member, contiguous, as long as everyone's.
    """

    def __init__(self, group: SpGroup, transfers: Transfers, layer: int, share: Tensor) -> None:
        self._group, self._transfers, self._layer = group, transfers, layer
        self._share = share
        self._sent = 0
        self._coming: tuple[PendingTransfer, Tensor] | None = None
        self._pass_on()

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        size = self._group.size
        for hop in range(size):
            if hop:
                assert self._coming is not None, "begun when the round before began"
                transfer, self._share = self._coming
                self._transfers.wait(transfer)
                self._pass_on()
            yield (self._group.member - hop) % size, self._share
            self._group.points.close()

    def _pass_on(self) -> None:
        """Begin to send the present share, and to receive the next."""
        group = self._group
        if self._sent == group.size - 1:
            return
        self._sent += 1
        room = self._share.new_empty(self._share.shape)
        to = group.peers[(group.member + 1) % group.size]
        source = group.peers[(group.member - 1) % group.size]
        label = Label(phase="ring", layer=self._layer)
        transfer = self._transfers.start([(to, self._share)], [(source, room)], Tag.RING, label)
        self._coming = transfer, room


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
        """Merge what the asker's queries see of the holder's keys into a running result.

        Args:
            q_thd: of the asker's rows; there may be more behind them.
            out_thd, lse_ht: fp32, or fp64 for fp64 inputs; overwritten.
        """
        for chunk, block in self._wanted(asker, holder):
            k_kgd, v_kgd = keys(chunk, block)
            q_bhd = q_thd[block.queries]
            for rows in query_blocks(q_bhd, block.key_count):
                with self._group.clock.timeline.phase("attention", layer=layer):
                    part = attention(
                        q_bhd[rows],
                        k_kgd,
                        v_kgd,
                        q_positions=_some(block.q_positions, rows),
                        k_positions=block.k_positions,
                        scale=self._scale,
                    )
                    at = slice(block.queries.start + rows.start, block.queries.start + rows.stop)
                    merge_into(out_thd[at], lse_ht[:, at], *part)
                self._group.points.point()

    def _wanted(self, asker: int, holder: int) -> Iterable[tuple[int, RingBlock]]:
        chunks = self._group.step.chunks
        return chain.from_iterable(
            ((index, block) for block in blocks)
            for index, blocks in self._plan.blocks(asker, holder).items()
            if self._group.wanted(chunks[index])
        )


def padded(x_tnd: Tensor, tokens: int) -> Tensor:
    """So many rows, contiguous, whatever those behind the given ones hold: nobody reads them."""
    if len(x_tnd) == tokens:
        return x_tnd.contiguous()
    room = x_tnd.new_empty(tokens, *x_tnd.shape[1:])
    room[: len(x_tnd)] = x_tnd
    return room


def _some(positions: Positions | None, rows: slice) -> Positions | None:
    return None if positions is None else positions[rows]

"""Context parallelism's rings as this engine runs them (CP Algs. 2-3): a share goes to the next
member while the one before is computed, N - 1 times.

Rows lie in zigzag, so that a member's queries see as many keys of every other's, and it has one
call of attention a round. With `ring_kv` keys and values go round, history with them where that is
less than asking for it; with `ring_q` queries do, meet all that a member holds, and outputs return
by an all-to-all in the end. A ring is exact and cut in one way, so there is one configuration.

Shape suffixes: c configurations, p parts (one per member), s senders, r receivers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csps.configurator.pipeline.cases import LSE_BYTES, SimulatedGroup
from csps.configurator.pipeline.history import AskedHistory
from csps.configurator.pipeline.program import Mask, Op, Outcome, Seconds
from csps.configurator.pipeline.script import Script
from csps.protocols.plans import Ring


def simulate_ring(group: SimulatedGroup, ring: Ring, spts: Sequence[int], history: int) -> Outcome:
    """One layer.

    Args:
        spts: tokens of each member.
        history: tokens before them, evenly over the members.
    """
    return _RingLayer(group, spts, history).run(ring)


class _RingLayer:
    def __init__(self, group: SimulatedGroup, spts: Sequence[int], history: int) -> None:
        assert len(spts) == group.members, f"{len(spts)} parts for {group.members} members"
        self._group, self._spts_p = group, np.array(spts, float)
        self._held = history / group.members
        members = group.members
        filler_crf = np.zeros((1, members, 0))
        self._script = Script(group.wiring, filler_crf, group.times.exchange)
        self._next_sr = np.roll(np.eye(members, dtype=bool), 1, axis=1)
        goes_round = history and self._kv_bytes(self._held) * members * (members - 1) < (
            (members - 1) * self._row_bytes().sum()
        )
        self._asked = AskedHistory(group, self._script, spts, 0 if goes_round else history)
        self._round_held = self._held if goes_round else 0.0
        """Of each member's history, what goes round as keys and values."""

    def run(self, ring: Ring) -> Outcome:
        """The layer."""
        script, times = self._script, self._group.times
        script.compute(times.qkv.seconds(self._spts_p)[None])
        if ring == "ring_kv":
            self._pass_kv()
        else:
            self._pass_q()
        script.compute(times.linear.seconds(self._spts_p)[None])
        return script.run(*self._group.machine())

    def _pass_kv(self) -> None:
        self._asked.ask()
        share = self._kv_bytes(self._spts_p.max() + self._round_held)
        coming = self._pass_on(share)
        self._asked.answer()
        for turn in range(self._group.members):
            if turn:
                self._script.do(Op.WAIT, coming)
                if turn < self._group.members - 1:
                    coming = self._pass_on(share)
            self._attend(turn, self._round_held)
        self._asked.merge()

    def _pass_q(self) -> None:
        members, heads = self._group.members, self._group.heads
        dim, size = self._group.shape.head_dim, self._group.itemsize
        share = self._spts_p.max() * heads * dim * size
        coming = self._pass_on(share)
        for turn in range(members):
            if turn:
                self._script.do(Op.WAIT, coming)
                if turn < members - 1:
                    coming = self._pass_on(share)
            self._attend(turn, self._held)
        # Of a member before it in the ring both chunks see keys, of one behind it the second alone.
        seen_sr = np.where(np.tri(members, k=-1, dtype=bool).T | bool(self._held), 1.0, 0.5)
        rows_sr = self._spts_p[None, :] * heads * seen_sr * ~np.eye(members, dtype=bool)
        answers = self._post(rows_sr * (dim * size + LSE_BYTES))
        self._script.do(Op.WAIT, answers)
        self._script.compute(self._group.times.merge.seconds(rows_sr.sum(axis=0))[None])

    def _pass_on(self, share: float) -> int:
        """A share of bytes to the next, from everyone at once."""
        return self._post(share * self._next_sr)

    def _post(self, bytes_sr: Seconds) -> int:
        pairs_sr: Mask = bytes_sr > 0
        return self._script.post(bytes_sr[None].astype(float), pairs_sr)

    def _attend(self, turn: int, held: float) -> None:
        """One round: rows among themselves, and all of them to so much history, merged."""
        rows_p = self._spts_p * self._group.heads
        chunk_p = self._spts_p / 2
        pairs_p = 2 * chunk_p**2  # of another member; of its own both chunks' triangles beside one
        if not turn:
            pairs_p = self._spts_p * (self._spts_p + 1) / 2
        pairs_p = pairs_p * self._group.heads + rows_p * held
        calls_p = np.full(len(rows_p), 1.0 + bool(held))
        times = self._group.times
        self._script.compute(times.attention.seconds(calls_p, rows_p, pairs_p)[None])
        self._script.compute(times.merge.seconds(rows_p)[None])

    def _kv_bytes(self, tokens: float) -> float:
        """Keys and values of so many tokens."""
        group = self._group
        return float(2 * tokens * group.kv_heads * group.shape.head_dim * group.itemsize)

    def _row_bytes(self) -> Seconds:
        """(p,) queries, and outputs and LSEs in return, of a member's rows."""
        group = self._group
        row = 2 * group.shape.head_dim * group.itemsize + LSE_BYTES
        bytes_p: Seconds = self._spts_p * group.heads * row
        return bytes_p

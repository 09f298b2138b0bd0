"""Simulation of SP-NTP's three-phase pipeline, as this engine runs it (CSPS §3.2.5, Fig. 9a).

The five time series of Eq. 7, for micro-partitions m and levels v:

==============  ===================================================================================
T_qkv           own rows at once: the engine cuts what it sends, not what it projects
T_1st_a2a       bytes of micro-partition m of level v over each wire; Q 0 and KV 0 travel together,
                then KV 1 .. KV M-1, then Q 1 .. Q M-1. Rows of a nearer level are not sent again
T_attn          the heads owned at level v; Q 0 meets each KV as it arrives, later Q all of them
T_2nd_a2a       outputs and LSEs of a finished Q, begun at once and in order per level
T_linear        own rows, when all outputs are merged
==============  ===================================================================================

The whole first all-to-all is begun before any attention, near levels first, so several
micro-partitions may arrive ahead of computing. Where each member has level 1 to itself, level 1 is
the ranks' filler. Without pipelining the first all-to-all is one exchange, and each exchange
blocks. Scoring importance costs two rounds of small messages.

Shape suffixes: c configurations, o owners, p and i parts, j parts that are attended to, g KV heads,
s senders, r receivers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from csps.configurator.model.traffic import LevelMasks, level_masks
from csps.configurator.pipeline.cases import LSE_BYTES, LayerCases, SimulatedGroup, even_lengths
from csps.configurator.pipeline.program import Mask, Numbers, Op, PipelineOutcome, Seconds
from csps.configurator.pipeline.script import Script, SimulatedHistory


def simulate_ntp(
    group: SimulatedGroup, cases: LayerCases, spts: Sequence[int], history: int = 0
) -> PipelineOutcome:
    """Simulate one layer of each configuration.

    Args:
        spts: tokens of each member.
        history: tokens before them, evenly over the members.
    """
    return _NtpLayer(group, cases, spts, history).run()


@dataclass(frozen=True)
class Sent:
    """One micro-partition of a level's first all-to-all, and the attention that follows its
    arrival."""

    level: int
    micro: int
    bytes_csr: Seconds
    pairs_sr: Mask
    attention_cr: Seconds
    finishes: bool
    """True if it completes a micro-partition of queries."""
    output_micro: int = 0
    """Index of the completed micro-partition."""


class LevelSeries:
    """Time series of one level that is exchanged."""

    def __init__(
        self,
        group: SimulatedGroup,
        masks: LevelMasks,
        resident: tuple[Mask, Mask],
        counts: tuple[Numbers, Numbers],
        micro_c: Numbers,
    ) -> None:
        """Prepare the series of a level.

        Args:
            resident: (o, p, h) and (o, p, g), rows that nearer levels have brought.
            counts: (c, p, g) queries and keys that take part.
        """
        self._group, self._masks = group, masks
        self._queries_cpg, self._keys_cpg = counts
        self._micro_c = micro_c
        self.micros = int(micro_c.max())
        heads_of_g = group.heads // group.kv_heads
        resident_oph, resident_opg = resident
        sent_oph = masks.queries_oph & ~resident_oph
        self._sent_heads_opg = _by_kv_head(sent_oph, heads_of_g)
        self._sent_keys_opg = (masks.keys_opg & ~resident_opg).astype(np.int64)
        self._back_heads_opg = _by_kv_head(masks.queries_oph, heads_of_g)
        owned_og = masks.owned_oh.reshape(len(masks.owned_oh), -1, heads_of_g).sum(axis=2)
        here_op = masks.together_op & masks.seeing_p
        self._own_heads_opg = here_op[:, :, None] * owned_og[:, None, :]
        """Query heads that an owner computes of each part."""

    # --- first all-to-all and attention ---------------------------------------------------------

    def sent(self) -> Iterator[Sent]:
        """Yield micro-partitions in the engine's order.

        A configuration with fewer micro-partitions has empty ones in place of the later ones.
        """
        for micro in range(self.micros):
            queries_cpg = self._q(0) if micro == 0 else np.zeros_like(self._queries_cpg)
            yield self._sent(queries_cpg, self._k(micro), micro, self._against_new(micro), 0)
        for micro in range(1, self.micros):
            none_cpg = np.zeros_like(self._keys_cpg)
            yield self._sent(
                self._q(micro), none_cpg, micro, self._against_all(micro), micro, later=True
            )

    def _sent(
        self,
        queries_cpg: Numbers,
        keys_cpg: Numbers,
        micro: int,
        attention_cr: Seconds,
        output_micro: int,
        *,
        later: bool = False,
    ) -> Sent:
        dim = self._group.shape.head_dim
        rows_cop = np.einsum("opg,cpg->cop", self._sent_heads_opg, queries_cpg)
        rows_cop = rows_cop + 2 * np.einsum("opg,cpg->cop", self._sent_keys_opg, keys_cpg)
        pairs_op = self._sent_heads_opg.any(axis=2) | self._sent_keys_opg.any(axis=2)
        return Sent(
            level=self._masks.level,
            micro=micro,
            bytes_csr=(rows_cop * (dim * self._group.itemsize)).transpose(0, 2, 1).astype(float),
            pairs_sr=np.asarray(pairs_op).T,
            attention_cr=attention_cr,
            finishes=later or micro == self.micros - 1,
            output_micro=output_micro,
        )

    def _against_new(self, micro: int) -> Seconds:
        """Return the attention of Q 0 to the keys of one micro-partition."""
        queries_cig = self._q(0)
        seen_cig = np.einsum("ij,cjg->cig", self._masks.sees_ij.astype(np.int64), self._k(micro))
        pairs_cig = queries_cig * seen_cig
        if self._masks.level == 1 and micro == 0:
            pairs_cig = pairs_cig + queries_cig * (queries_cig + 1) // 2
        here_c = micro < self._micro_c
        calls_co = np.where(self._micro_c[:, None] > 1, self._calls_new(), self._calls_all())
        return self._attention(queries_cig, pairs_cig, calls_co) * here_c[:, None]

    def _against_all(self, micro: int) -> Seconds:
        """Return the attention of a later micro-partition of queries to all keys."""
        queries_cig = self._q(micro)
        seen_cig = np.einsum("ij,cjg->cig", self._masks.sees_ij.astype(np.int64), self._keys_cpg)
        pairs_cig = queries_cig * seen_cig
        if self._masks.level == 1:
            parts_c11 = self._micro_c[:, None, None]
            begin_cig = micro * self._queries_cpg // parts_c11
            end_cig = begin_cig + queries_cig
            pairs_cig = pairs_cig + (end_cig * (end_cig + 1) - begin_cig * (begin_cig + 1)) // 2
        here_c = micro < self._micro_c
        return self._attention(queries_cig, pairs_cig, self._calls_all()) * here_c[:, None]

    def _attention(self, rows_cig: Numbers, pairs_cig: Numbers, calls: Numbers) -> Seconds:
        """Return the (c, r) seconds of each owner."""
        rows_co = np.einsum("oig,cig->co", self._own_heads_opg, rows_cig)
        pairs_co = np.einsum("oig,cig->co", self._own_heads_opg, pairs_cig)
        calls_co = np.where(rows_co > 0, calls, 0)
        return self._group.times.attention.seconds(
            calls_co.astype(float), rows_co.astype(float), pairs_co.astype(float)
        )

    def _calls_all(self) -> Numbers:
        """Return (o,) calls: one for each run of parts that attend to the same keys."""
        return self._per_owner(len)

    def _calls_new(self) -> Numbers:
        """Return (o,) calls: one for each part that each run attends to."""
        return self._per_owner(lambda runs: sum(map(sum, runs)))

    def _per_owner(self, count: Callable[[set[tuple[bool, ...]]], int]) -> Numbers:
        """Return (o,) counts.

        Args:
            count: function of the distinct rows of `sees_ij` that an owner computes.
        """
        masks = self._masks
        itself_ij = np.eye(len(masks.sees_ij), dtype=np.bool_) & (masks.level == 1)
        calls = []
        for together_p, owned_h in zip(masks.together_op, masks.owned_oh, strict=True):
            rows = (masks.sees_ij | itself_ij)[together_p & masks.seeing_p & owned_h.any()]
            calls.append(count({tuple(row) for row in rows.tolist()}))
        return np.array(calls)

    # --- second all-to-all ----------------------------------------------------------------------

    def back(self, micro: int) -> tuple[Seconds, Mask]:
        """Return (c, s, r) bytes of a micro-partition's outputs and LSEs, and who sends to whom."""
        row = self._group.shape.head_dim * self._group.itemsize + LSE_BYTES
        rows_cop = np.einsum("opg,cpg->cop", self._back_heads_opg, self._q(micro))
        pairs_sr: Mask = np.asarray(self._back_heads_opg.any(axis=2))
        return (rows_cop * row).astype(float), pairs_sr

    def merged(self, micro: int, *, own: bool) -> Seconds:
        """Return (c, p) rows times heads that a part merges: its own results, or those that
        arrive."""
        heads_opg = self._back_heads_opg
        if own:
            diagonal_op = np.eye(len(heads_opg), dtype=np.int64)
            heads_opg = self._own_heads_opg * diagonal_op[:, :, None]
        rows_cp: Seconds = np.einsum("opg,cpg->cp", heads_opg, self._q(micro)).astype(float)
        return rows_cp

    def _q(self, micro: int) -> Numbers:
        return even_lengths(self._queries_cpg, self._micro_c[:, None, None], micro)

    def _k(self, micro: int) -> Numbers:
        return even_lengths(self._keys_cpg, self._micro_c[:, None, None], micro)


class _NtpLayer:
    def __init__(
        self, group: SimulatedGroup, cases: LayerCases, spts: Sequence[int], history: int = 0
    ) -> None:
        assert len(spts) == group.members, f"{len(spts)} SPTs for {group.members} members"
        assert (cases.window_c > 0).all(), "scoring by all queries cannot be simulated"
        self._group, self._cases, self._spts = group, cases, np.array(spts)
        self._segments = group.segments(cases.levels)
        self._local = all(len(members) == 1 for members in self._segments[0])
        self._micro_cv = cases.micro_cv if cases.pipelined else np.ones_like(cases.micro_cv)
        self._levels = list(self._series())
        costs = group.times.exchange
        if cases.pipelined:
            costs = replace(costs, byte=costs.byte + costs.overlapped)
        self._script = Script(group.wiring, self._own_rows(), costs)
        wait = Op.WAIT if cases.pipelined else Op.BLOCK
        self._asked = SimulatedHistory(group, self._script, spts, history, wait=wait)

    def run(self) -> PipelineOutcome:
        group, cases, script = self._group, self._cases, self._script
        script.compute(self._per_rank(group.times.qkv.seconds(self._spts.astype(float))))
        if cases.same_c.any():
            self._begin_scoring(cases.same_c)
            self._continue_scoring(cases.same_c)
            if cases.pipelined:
                script.do(Op.WAIT, self._lses)
        script.compute(self._choosing())
        if cases.scores_c.any():
            self._begin_scoring(cases.scores_c)
        if cases.pipelined:
            self._overlapped()
        else:
            self._one_after_another()
        script.compute(self._per_rank(group.times.linear.seconds(self._spts.astype(float))))
        return script.run(*group.machine())

    # --- schedules ------------------------------------------------------------------------------

    def _overlapped(self) -> None:
        script, sent = self._script, [list(level.sent()) for level in self._levels]
        exchanges = [
            [self._post(part.bytes_csr, part.pairs_sr) for part in level] for level in sent
        ]
        self._asked.ask()
        if self._cases.scores_c.any():
            self._continue_scoring(self._cases.scores_c)
        self._asked.answer()
        backs: list[tuple[int, Seconds]] = []
        for series, level, numbers in zip(self._levels, sent, exchanges, strict=True):
            for part, exchange in zip(level, numbers, strict=True):
                script.do(Op.WAIT, exchange)
                script.compute(part.attention_cr)
                if part.finishes:
                    number = self._post(*series.back(part.output_micro))
                    backs.append((number, series.merged(part.output_micro, own=False)))
        script.do(Op.FILL)
        self._merge_own()
        for number, rows_cp in backs:
            script.do(Op.WAIT, number)
            script.compute(self._group.times.merge.seconds(rows_cp))
        self._asked.merge()

    def _one_after_another(self) -> None:
        script, sent = self._script, [list(level.sent()) for level in self._levels]
        flat = [part for level in sent for part in level]
        if flat:
            together_csr = sum((part.bytes_csr for part in flat[1:]), flat[0].bytes_csr)
            pairs_sr = np.any([part.pairs_sr for part in flat], axis=0)
            script.do(Op.BLOCK, self._post(together_csr, pairs_sr))
        self._asked.ask()
        if self._cases.scores_c.any():
            self._continue_scoring(self._cases.scores_c)
        self._asked.answer()
        script.do(Op.FILL)
        for series, level in zip(self._levels, sent, strict=True):
            for part in level:
                script.compute(part.attention_cr)
            script.do(Op.BLOCK, self._post(*series.back(0)))
        self._merge_own()
        for series in self._levels:
            script.compute(self._group.times.merge.seconds(series.merged(0, own=False)))
        self._asked.merge()

    def _post(self, bytes_csr: Seconds, pairs_sr: Mask) -> int:
        """Gather what this rank sends, and begin the exchange."""
        self._script.compute(self._group.times.copy.seconds(bytes_csr.sum(axis=2)))
        return self._script.post(bytes_csr, pairs_sr)

    def _merge_own(self) -> None:
        rows_cp = sum(
            (
                level.merged(micro, own=True)
                for level in self._levels
                for micro in range(level.micros)
            ),
            np.zeros((len(self._cases), self._group.members)),
        )
        self._script.compute(self._group.times.merge.seconds(rows_cp))

    # --- levels ---------------------------------------------------------------------------------

    def _series(self) -> Iterator[LevelSeries]:
        group, cases = self._group, self._cases
        kept_cpgv = cases.kept(self._spts.tolist())
        all_cpg = np.broadcast_to(self._spts[None, :, None], kept_cpgv.shape[:3])
        resident_oph: Mask | None = None
        resident_opg: Mask | None = None
        for masks in level_masks(self._segments, group.heads, group.kv_heads):
            if masks.level == 1 and self._local:
                continue
            keys_cpg = kept_cpgv[..., masks.level - 1]
            if resident_oph is None or resident_opg is None:
                resident_oph = np.zeros_like(masks.queries_oph)
                resident_opg = np.zeros_like(masks.keys_opg)
            yield LevelSeries(
                group,
                masks,
                (resident_oph, resident_opg),
                (keys_cpg if cases.drop_queries else all_cpg, keys_cpg),
                self._micro_cv[:, masks.level - 1],
            )
            resident_oph = resident_oph | masks.queries_oph
            resident_opg = resident_opg | masks.keys_opg

    def _own_rows(self) -> Seconds:
        """Return (c, r, f) seconds of level 1, where it stays inside each member."""
        shape = len(self._cases), self._group.members
        if not self._local:
            return np.zeros((*shape, 0))
        micro_c1 = self._micro_cv[:, :1]
        filler = []
        for micro in range(int(micro_c1.max())):
            rows_cr = even_lengths(self._spts[None, :], micro_c1, micro)
            begin_cr = micro * self._spts[None, :] // micro_c1
            end_cr = begin_cr + rows_cr
            pairs_cr = (end_cr * (end_cr + 1) - begin_cr * (begin_cr + 1)) // 2
            heads = self._group.heads
            filler.append(
                self._group.times.attention.seconds(
                    (rows_cr > 0).astype(float),
                    (rows_cr * heads).astype(float),
                    (pairs_cr * heads).astype(float),
                )
            )
        return np.stack(filler, axis=2)

    # --- importance -----------------------------------------------------------------------------

    def _begin_scoring(self, who_c: Mask) -> None:
        """Send window queries to all members with keys to which they attend."""
        rows_cs = self._windows(who_c)
        members = self._group.members
        width = self._group.heads * self._group.shape.head_dim * self._group.itemsize
        earlier_sr = np.tri(members, k=-1, dtype=bool)
        bytes_csr = rows_cs[:, :, None] * earlier_sr * width
        self._windows_sent = self._script.post(bytes_csr.astype(float), earlier_sr)
        if not self._cases.pipelined:
            self._script.do(Op.BLOCK, self._windows_sent)

    def _continue_scoring(self, who_c: Mask) -> None:
        """Send LSEs over own keys to all other members with such keys."""
        script, pipelined = self._script, self._cases.pipelined
        if pipelined:
            script.do(Op.WAIT, self._windows_sent)
        script.compute(self._importance(who_c))
        rows_cp, members = self._windows(who_c), self._group.members
        # Of a window in part p, members up to p tell each other.
        upto_pm = np.tri(members, dtype=bool)
        others_sr = ~np.eye(members, dtype=bool)
        both_psr = upto_pm[:, :, None] & upto_pm[:, None, :] & others_sr
        bytes_csr = np.einsum("cp,psr->csr", rows_cp, both_psr.astype(np.int64))
        self._lses = script.post(
            (bytes_csr * self._group.heads * LSE_BYTES).astype(float), others_sr
        )
        if not pipelined:
            script.do(Op.BLOCK, self._lses)

    def _choosing(self) -> Seconds:
        """Return (c, r) seconds of column sums and selection, in layers that drop."""
        drops_c1, times = self._cases.drops_c[:, None], self._group.times
        tokens_cr = drops_c1 * (self._spts * self._group.kv_heads)
        selecting_cr = times.select.seconds(tokens_cr.astype(float))
        return self._importance(self._cases.drops_c) + selecting_cr + times.step.dropping * drops_c1

    def _importance(self, who_c: Mask) -> Seconds:
        """Return (c, r) seconds for all windows that attend to a member's keys."""
        rows_cp = self._windows(who_c)
        later_cr = np.cumsum(rows_cp[:, ::-1], axis=1)[:, ::-1]
        pairs_cr = later_cr * self._spts * self._group.heads
        return self._group.times.importance.seconds(pairs_cr.astype(float))

    def _windows(self, who_c: Mask) -> Numbers:
        windows: Numbers = self._cases.windows(self._spts.tolist()) * who_c[:, None]
        return windows

    def _per_rank(self, seconds_r: Seconds) -> Seconds:
        return np.broadcast_to(seconds_r, (len(self._cases), len(seconds_r)))


def _by_kv_head(needed_oph: Mask, heads_of_g: int) -> Numbers:
    """Return (o, p, g) counts of each KV head's query heads."""
    owners, parts, _ = needed_oph.shape
    counts: Numbers = needed_oph.reshape(owners, parts, -1, heads_of_g).sum(axis=3)
    return counts

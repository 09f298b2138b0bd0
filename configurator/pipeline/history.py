"""History in a layer: queries to whoever holds it, outputs and LSEs back, as the engine has it
(`actors.strategies.history`).

Every member has as much of it, and its queries see all of it, whatever its strategy does with the
rows among themselves. Own queries meet own history while the others' are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csps.configurator.pipeline.cases import LSE_BYTES, SimulatedGroup
from csps.configurator.pipeline.program import Op, Seconds
from csps.configurator.pipeline.script import Script


class AskedHistory:
    """One layer's questions, for all configurations alike."""

    def __init__(
        self,
        group: SimulatedGroup,
        script: Script,
        spts: Sequence[int],
        history: int,
        *,
        wait: Op = Op.WAIT,
    ) -> None:
        """
        Args:
            spts: tokens of each member.
            history: tokens, evenly over the members; 0 asks for nothing.
            wait: how exchanges are waited for.
        """
        self._group, self._script, self._wait = group, script, wait
        self._rows_p = np.array(spts, float) * group.heads
        """Times query heads."""
        self._held = history / group.members
        self._any = bool(history)

    def ask(self) -> None:
        """All members at once."""
        if self._any:
            row = self._group.shape.head_dim * self._group.itemsize
            self._questions = self._post(self._rows_p[:, None] * row)

    def answer(self) -> None:
        """Own queries, and those of others when they are here."""
        if not self._any:
            return
        self._attend(self._rows_p, 1)
        self._script.do(self._wait, self._questions)
        self._attend(self._rows_p.sum() - self._rows_p, self._group.members - 1)
        row = self._group.shape.head_dim * self._group.itemsize + LSE_BYTES
        self._answers = self._post(self._rows_p[None, :] * row)

    def merge(self) -> None:
        """All answers, into what the strategy has computed."""
        if self._any:
            self._script.do(self._wait, self._answers)
            self._script.compute(
                self._each(self._group.times.merge.seconds(self._rows_p * self._group.members))
            )

    def _attend(self, rows_p: Seconds, calls: int) -> None:
        calls_p = np.full(len(rows_p), float(calls))
        attention = self._group.times.attention
        self._script.compute(self._each(attention.seconds(calls_p, rows_p, rows_p * self._held)))

    def _post(self, bytes_sr: Seconds) -> int:
        others_sr = ~np.eye(self._group.members, dtype=bool)
        bytes_csr = np.broadcast_to(
            bytes_sr * others_sr, (self._script.configurations, *others_sr.shape)
        )
        return self._script.post(bytes_csr, others_sr)

    def _each(self, seconds_p: Seconds) -> Seconds:
        """(c, r) of all configurations."""
        return np.broadcast_to(seconds_p, (self._script.configurations, len(seconds_p)))

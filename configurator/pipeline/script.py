"""Writer of programs: what each rank does in a layer, operation by operation, with durations.

`SimulatedHistory` adds a layer's attention to history: queries go to its holders, and outputs and
LSEs return. Every member holds an equal part of it, and its queries attend to all of it, whatever
the strategy does with the rows themselves. Own queries attend to own history while the others'
travel.

Shape suffixes as in `program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from csps.configurator.model.phase_times import ExchangeTimes
from csps.configurator.pipeline.cases import LSE_BYTES, SimulatedGroup
from csps.configurator.pipeline.program import (
    Durations,
    Machine,
    Mask,
    Op,
    PipelineOutcome,
    Program,
    Seconds,
    Wiring,
)
from csps.configurator.pipeline.simulate import simulate


class Script:
    """Program of one layer of some configurations."""

    def __init__(
        self, wiring: Wiring, filler_crf: Seconds, costs: ExchangeTimes | None = None
    ) -> None:
        """Begin an empty program.

        Args:
            costs: core seconds of exchanges.
        """
        self._costs = costs or ExchangeTimes()
        self._wiring, self._filler_crf = wiring.carried(self._costs.beside), filler_crf
        self.configurations = len(filler_crf)
        self._ops: list[list[tuple[Op, int]]] = [[] for _ in range(wiring.ranks)]
        self._columns: list[list[Seconds]] = [[] for _ in range(wiring.ranks)]
        self._wire_seconds: list[Seconds] = []
        self._senders: list[Mask] = []
        self._receivers: list[Mask] = []
        self._after: list[int] = []
        self._begins: list[Seconds] = []
        """(c, r) core seconds to begin each exchange."""
        self._ends: list[Seconds] = []
        """(c, r) core seconds to receive each exchange, spent once."""
        self._ended: set[tuple[int, int]] = set()

    def compute(self, seconds_cr: Seconds) -> None:
        """Compute on all ranks."""
        for rank in range(self._wiring.ranks):
            self.compute_on(rank, seconds_cr[:, rank])

    def compute_on(self, rank: int, seconds_c: Seconds) -> None:
        """Compute on one rank."""
        if seconds_c.any():
            self._ops[rank].append((Op.COMPUTE, len(self._columns[rank])))
            self._columns[rank].append(seconds_c)

    def exchange(self, bytes_csr: Seconds, pairs_sr: Mask, *, after: int = -1) -> int:
        """Add an exchange, which each rank begins by an operation of its own; return its number.

        Args:
            pairs_sr: pairs that may exchange in some configuration.
            after: exchange that this one relays.
        """
        senders_ws, receivers_wr = self._wiring.members(pairs_sr)
        self._wire_seconds.append(self._wiring.seconds(bytes_csr))
        self._senders.append(senders_ws)
        self._receivers.append(receivers_wr)
        self._after.append(after)
        messages_csr = (bytes_csr > 0).astype(float)
        sent_cr = self._costs.seconds(messages_csr.sum(axis=2), bytes_csr.sum(axis=2))
        takes_part_cr = messages_csr.any(axis=2) | messages_csr.any(axis=1)
        self._begins.append(sent_cr + self._costs.call * takes_part_cr)
        self._ends.append(self._costs.seconds(messages_csr.sum(axis=1), bytes_csr.sum(axis=1)))
        return len(self._after) - 1

    def do(self, op: Op, exchange: int = 0) -> None:
        """Add an operation on all ranks."""
        for rank in range(self._wiring.ranks):
            self.do_on(rank, op, exchange)

    def do_on(self, rank: int, op: Op, exchange: int = 0) -> None:
        """Add an operation on one rank; exchanges take core seconds there."""
        if op is Op.POST:
            self.compute_on(rank, self._begins[exchange][:, rank])
        self._ops[rank].append((op, exchange))
        if op in (Op.WAIT, Op.BLOCK) and (rank, exchange) not in self._ended:
            self._ended.add((rank, exchange))
            self.compute_on(rank, self._ends[exchange][:, rank])

    def post(self, bytes_csr: Seconds, pairs_sr: Mask) -> int:
        """Add an exchange that all ranks begin here; return its number."""
        exchange = self.exchange(bytes_csr, pairs_sr)
        self.do(Op.POST, exchange)
        return exchange

    def run(
        self, cores_of: Iterable[int], cores: Iterable[float], crowding: float
    ) -> PipelineOutcome:
        """Simulate the program.

        Args:
            cores_of: set of cores of each rank.
            cores: number of cores of each set.
            crowding: as in `Machine`.
        """
        machine = Machine(
            latency_w=self._wiring.latency_w,
            cores_of_r=np.array(list(cores_of), np.int64),
            cores_d=np.array(list(cores), float),
            loads_wr=self._wiring.loads(self._costs.beside),
            crowding=crowding,
        )
        return simulate(self._program(), self._durations(), machine)

    def _program(self) -> Program:
        ranks, wires = self._wiring.ranks, self._wiring.wires
        places = max(map(len, self._ops))
        # A shorter program is padded with FILL, which takes no time when no filler is left.
        ops_rp = np.full((ranks, places), int(Op.FILL))
        arguments_rp = np.zeros((ranks, places), np.int64)
        for rank, ops in enumerate(self._ops):
            for place, (op, argument) in enumerate(ops):
                ops_rp[rank, place], arguments_rp[rank, place] = op, argument
        none = np.zeros((0, wires, ranks), np.bool_)
        return Program(
            ops_rp=ops_rp,
            arguments_rp=arguments_rp,
            senders_ewr=np.stack(self._senders) if self._senders else none,
            receivers_ewr=np.stack(self._receivers) if self._receivers else none,
            after_e=np.array(self._after, np.int64),
        )

    def _durations(self) -> Durations:
        configurations, wires = self.configurations, self._wiring.wires
        compute_crk = np.zeros((configurations, self._wiring.ranks, max(map(len, self._columns))))
        for rank, columns in enumerate(self._columns):
            for column, seconds_c in enumerate(columns):
                compute_crk[:, rank, column] = seconds_c
        none = np.zeros((configurations, wires, 0))
        seconds = self._wire_seconds
        return Durations(
            compute_crk=compute_crk,
            filler_crf=self._filler_crf,
            wires_cwe=np.stack(seconds, axis=2) if seconds else none,
        )


class SimulatedHistory:
    """Queries of history in one layer, equal for all configurations."""

    def __init__(
        self,
        group: SimulatedGroup,
        script: Script,
        spts: Sequence[int],
        history: int,
        *,
        wait: Op = Op.WAIT,
    ) -> None:
        """Prepare the queries.

        Args:
            spts: tokens of each member.
            history: tokens, evenly over the members; 0 sends no queries.
            wait: operation that waits for exchanges.
        """
        self._group, self._script, self._wait = group, script, wait
        self._rows_p = np.array(spts, float) * group.heads
        """Rows times query heads."""
        self._history = history / group.members
        self._any = bool(history)

    def ask(self) -> None:
        """Send the queries of all members at once."""
        if self._any:
            row = self._group.shape.head_dim * self._group.itemsize
            self._questions = self._post(self._rows_p[:, None] * row)

    def answer(self) -> None:
        """Attend with own queries, then with those of others once they have arrived; send
        outputs back."""
        if not self._any:
            return
        self._attend(self._rows_p, 1)
        self._script.do(self._wait, self._questions)
        self._attend(self._rows_p.sum() - self._rows_p, self._group.members - 1)
        row = self._group.shape.head_dim * self._group.itemsize + LSE_BYTES
        self._answers = self._post(self._rows_p[None, :] * row)

    def merge(self) -> None:
        """Merge all outputs into what the strategy has computed."""
        if self._any:
            self._script.do(self._wait, self._answers)
            self._script.compute(
                self._each(self._group.times.merge.seconds(self._rows_p * self._group.members))
            )

    def _attend(self, rows_p: Seconds, calls: int) -> None:
        calls_p = np.full(len(rows_p), float(calls))
        attention = self._group.times.attention
        pairs_p = rows_p * self._history
        self._script.compute(self._each(attention.seconds(calls_p, rows_p, pairs_p)))

    def _post(self, bytes_sr: Seconds) -> int:
        others_sr = ~np.eye(self._group.members, dtype=bool)
        bytes_csr = np.broadcast_to(
            bytes_sr * others_sr, (self._script.configurations, *others_sr.shape)
        )
        return self._script.post(bytes_csr, others_sr)

    def _each(self, seconds_p: Seconds) -> Seconds:
        """Return (c, r) seconds, equal for all configurations."""
        return np.broadcast_to(seconds_p, (self._script.configurations, len(seconds_p)))

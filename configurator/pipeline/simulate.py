"""Engine of the pipeline simulator: one program, many configurations at once (CSPS §3.2.6).

Every configuration has its own clock. In each round every clock advances to its configuration's
next event: the end of a computation, of a wire's work or of a latency. All configurations share the
numpy calls of a round.

Nothing is random: wires carry exchanges in the order of their numbers, and ranks follow their
programs. Where no cores are shared, more bandwidth is never slower: a rank whose exchange arrives
earlier has done no more filler by then.

Shape suffixes as in `program`; x the elements of an event, whose configurations are `lanes_x`.
"""

from __future__ import annotations

import numpy as np

from csps.configurator.pipeline.program import (
    Durations,
    Machine,
    Mask,
    Numbers,
    Op,
    PipelineOutcome,
    Program,
    Seconds,
)

CELLS = 2**22
"""Configurations times wires times exchanges that are simulated at a time."""
NEVER = np.inf
LEAST_LEFT = 0.1
"""Fraction of cores left to computing while wires keep cores busy, so that neither starves the
other."""
_COMPUTE, _POST, _WAIT, _BLOCK, _FILL = map(int, Op)


def simulate(program: Program, durations: Durations, machine: Machine) -> PipelineOutcome:
    """Execute a program with the durations of every configuration.

    Raises:
        AssertionError: the program cannot end, such as one that waits for an exchange never begun.
    """
    configurations = len(durations.compute_crk)
    exchanges, wires, _ = program.senders_ewr.shape
    at_once = max(1, CELLS // max(1, exchanges * wires))
    ends = [
        _Run(
            program,
            Durations(
                compute_crk=durations.compute_crk[begin : begin + at_once],
                filler_crf=durations.filler_crf[begin : begin + at_once],
                wires_cwe=durations.wires_cwe[begin : begin + at_once],
            ),
            machine,
        ).to_the_end()
        for begin in range(0, configurations, at_once)
    ]
    return PipelineOutcome(
        ranks_cr=np.concatenate([ranks_cr for ranks_cr, _ in ends]),
        wires_cwe=np.concatenate([wires_cwe for _, wires_cwe in ends]),
        work_c=durations.compute_crk.sum(axis=(1, 2)) + durations.filler_crf.sum(axis=(1, 2)),
    )


class _Run:
    """State of all configurations of one call."""

    def __init__(self, program: Program, durations: Durations, machine: Machine) -> None:
        self._now_c = np.zeros(len(durations.compute_crk))
        self._ranks = _Ranks(program, durations, machine)
        self._wires = _Wires(program, durations, machine)

    def to_the_end(self) -> tuple[Seconds, Seconds]:
        """Run all rounds; return when ranks ended, and when wires had carried exchanges."""
        ranks, wires = self._ranks, self._wires
        while True:
            ranks.advance(self._now_c, wires)
            wires.start(self._now_c)
            ranks.share_cores(self._now_c, wires.carrying)
            next_c = np.minimum(ranks.next_event(wires), wires.next_event(self._now_c))
            going_c = next_c < NEVER
            if not going_c.any():
                break
            self._now_c = np.where(going_c, next_c, self._now_c)
            wires.end(self._now_c)
            ranks.end(self._now_c, wires)
        assert ranks.through.all(), "program cannot end: a rank waits for an exchange never begun"
        return ranks.ended_cr, wires.ended_cwe


class _Ranks:
    """Position and activity of each rank in its program."""

    def __init__(self, program: Program, durations: Durations, machine: Machine) -> None:
        self._program, self._durations, self._machine = program, durations, machine
        shape = durations.compute_crk.shape[:2]
        self._place_cr = np.zeros(shape, np.int64)
        self._filled_cr = np.zeros(shape, np.int64)
        self._end_cr = np.full(shape, NEVER)
        """End of the present computation; NEVER if there is none."""
        self._rate_cr = np.ones(shape)
        self._waits_cr = np.full(shape, -1)
        """Exchange that a rank waits for; -1 for none."""
        self._stands_cr = np.zeros(shape, np.bool_)
        """True if the rank also waits until it has sent its part."""
        self._awake_cr = np.ones(shape, np.bool_)
        self.ended_cr = np.zeros(shape)
        domains = len(machine.cores_d)
        self._of_domain_rd = np.equal.outer(machine.cores_of_r, np.arange(domains)).astype(float)
        self._loads_wd = machine.loads_wr @ self._of_domain_rd
        crowded = (self._of_domain_rd.sum(axis=0) > machine.cores_d).any()
        self._shared = bool(crowded or self._loads_wd.any())

    @property
    def through(self) -> Mask:
        """(c, r) mask of ranks at the end of their programs."""
        done: Mask = self._place_cr >= self._program.ops_rp.shape[1]
        return done

    def advance(self, now_c: Seconds, wires: _Wires) -> None:
        """Execute operations until every rank computes, waits or is at its end."""
        lanes_x, ranks_x = np.nonzero(self._awake_cr)
        self._awake_cr[:] = False
        while lanes_x.size:
            through_x = self._place_cr[lanes_x, ranks_x] >= self._program.ops_rp.shape[1]
            self.ended_cr[lanes_x[through_x], ranks_x[through_x]] = now_c[lanes_x[through_x]]
            lanes_x, ranks_x = lanes_x[~through_x], ranks_x[~through_x]
            passed_x = self._one_op(lanes_x, ranks_x, now_c, wires)
            lanes_x, ranks_x = lanes_x[passed_x], ranks_x[passed_x]

    def _one_op(self, lanes_x: Numbers, ranks_x: Numbers, now_c: Seconds, wires: _Wires) -> Mask:
        """Execute one operation of each rank; return a mask of those that are done at once."""
        places_x = self._place_cr[lanes_x, ranks_x]
        ops_x = self._program.ops_rp[ranks_x, places_x]
        arguments_x = self._program.arguments_rp[ranks_x, places_x]
        passed_x = np.zeros(len(lanes_x), np.bool_)

        posts_x = ops_x == _POST
        wires.post(lanes_x[posts_x], ranks_x[posts_x], arguments_x[posts_x])
        passed_x |= posts_x

        waits_x = (ops_x == _WAIT) | (ops_x == _BLOCK)
        stands_x = ops_x == _BLOCK
        due_x = np.full(len(lanes_x), -NEVER)
        due_x[waits_x] = wires.due(
            lanes_x[waits_x], ranks_x[waits_x], arguments_x[waits_x], stands_x[waits_x]
        )
        over_x = due_x <= now_c[lanes_x]
        passed_x |= waits_x & over_x
        pending_x = waits_x & ~over_x

        computes_x = ops_x == _COMPUTE
        work_x = np.zeros(len(lanes_x))
        work_x[computes_x] = self._durations.compute_crk[
            lanes_x[computes_x], ranks_x[computes_x], arguments_x[computes_x]
        ]
        fills_x = (ops_x == _FILL) | (pending_x & ~stands_x)
        work_x[fills_x] = self._next_filler(lanes_x[fills_x], ranks_x[fills_x])
        busy_x = work_x > 0
        self._end_cr[lanes_x[busy_x], ranks_x[busy_x]] = now_c[lanes_x[busy_x]] + work_x[busy_x]
        self._rate_cr[lanes_x[busy_x], ranks_x[busy_x]] = 1.0
        passed_x |= computes_x & ~busy_x
        passed_x |= (ops_x == _FILL) & ~busy_x

        idle_x = pending_x & ~busy_x
        self._waits_cr[lanes_x[idle_x], ranks_x[idle_x]] = arguments_x[idle_x]
        self._stands_cr[lanes_x[idle_x], ranks_x[idle_x]] = stands_x[idle_x]
        # Waiting and filling are examined again at the next event; computing is not.
        ahead_x = passed_x | (computes_x & busy_x)
        self._place_cr[lanes_x[ahead_x], ranks_x[ahead_x]] += 1
        return passed_x

    def _next_filler(self, lanes_x: Numbers, ranks_x: Numbers) -> Seconds:
        """Return the seconds of the next part of filler that takes any; 0 where none is left."""
        filler_crf = self._durations.filler_crf
        parts = filler_crf.shape[2]
        work_x = np.zeros(len(lanes_x))
        searching_x = np.ones(len(lanes_x), np.bool_)
        while True:
            filled_x = self._filled_cr[lanes_x, ranks_x]
            searching_x &= filled_x < parts
            if not searching_x.any():
                return work_x
            at = lanes_x[searching_x], ranks_x[searching_x]
            work_x[searching_x] = filler_crf[(*at, filled_x[searching_x])]
            self._filled_cr[at] += 1
            searching_x &= work_x == 0

    def share_cores(self, now_c: Seconds, carrying_cw: Mask) -> None:
        """Slow down ranks that share too few cores, from now on."""
        if not self._shared:
            return
        busy_cr = self._end_cr < NEVER
        active_cd = busy_cr.astype(float) @ self._of_domain_rd
        cores_d, loads_cd = self._machine.cores_d, carrying_cw.astype(float) @ self._loads_wd
        left_cd = np.maximum(cores_d / self._machine.crowding - loads_cd, LEAST_LEFT * cores_d)
        slower_cd = np.minimum(1.0, left_cd / np.maximum(active_cd, 1.0))
        rates_cd = np.where(active_cd + loads_cd > cores_d, slower_cd, 1.0)
        rates_cr = rates_cd[:, self._machine.cores_of_r]
        changed_cr = busy_cr & (rates_cr != self._rate_cr)
        left_cr = (self._end_cr - now_c[:, None]) * self._rate_cr
        self._end_cr = np.where(changed_cr, now_c[:, None] + left_cr / rates_cr, self._end_cr)
        self._rate_cr = np.where(changed_cr, rates_cr, self._rate_cr)

    def next_event(self, wires: _Wires) -> Seconds:
        """Return (c,) times of the ranks' next known events."""
        next_c: Seconds = self._end_cr.min(axis=1)
        lanes_x, ranks_x = np.nonzero(self._waits_cr >= 0)
        due_x = self._due(lanes_x, ranks_x, wires)
        np.minimum.at(next_c, lanes_x, due_x)
        return next_c

    def end(self, now_c: Seconds, wires: _Wires) -> None:
        """Wake ranks whose computation or wait has ended."""
        done_cr = self._end_cr <= now_c[:, None]
        self._end_cr[done_cr] = NEVER
        self._awake_cr |= done_cr
        lanes_x, ranks_x = np.nonzero(self._waits_cr >= 0)
        here_x = self._due(lanes_x, ranks_x, wires) <= now_c[lanes_x]
        lanes_x, ranks_x = lanes_x[here_x], ranks_x[here_x]
        self._waits_cr[lanes_x, ranks_x] = -1
        self._awake_cr[lanes_x, ranks_x] = True

    def _due(self, lanes_x: Numbers, ranks_x: Numbers, wires: _Wires) -> Seconds:
        return wires.due(
            lanes_x,
            ranks_x,
            self._waits_cr[lanes_x, ranks_x],
            self._stands_cr[lanes_x, ranks_x],
        )


class _Wires:
    """Exchanges on each wire, and what has arrived at which rank."""

    def __init__(self, program: Program, durations: Durations, machine: Machine) -> None:
        self._program, self._seconds_cwe = program, durations.wires_cwe
        self._latency_w = machine.latency_w
        configurations, wires, exchanges = self._seconds_cwe.shape
        carried_cwe = self._seconds_cwe > 0
        self._members_ewr = program.senders_ewr | program.receivers_ewr
        self._next_cwe = _next_carried(carried_cwe)
        self._head_cw = self._next_cwe[:, :, 0].copy()
        self._end_cw = np.full((configurations, wires), NEVER)
        self._ready_cwe = np.zeros((configurations, wires, exchanges))
        """Time at which a relayed exchange has arrived at its relay."""
        self.ended_cwe = np.full((configurations, wires, exchanges), np.nan)
        # Wires on which each rank still receives, and still sends, each exchange.
        self._coming_cre = _by_rank(carried_cwe, program.receivers_ewr)
        self._leaving_cre = _by_rank(carried_cwe, program.senders_ewr)
        self._arrival_cre = np.where(self._coming_cre == 0, -NEVER, NEVER)
        self._left_cre = np.where(self._leaving_cre == 0, -NEVER, NEVER)
        self._latest_cre = np.full(self._arrival_cre.shape, -NEVER)
        self._missing_cwe = self._missing(carried_cwe)
        """Number of members that have not begun an exchange, plus arrivals at relays that are
        outstanding."""
        self._passed_on_e = [
            np.flatnonzero(program.after_e == exchange) for exchange in range(exchanges)
        ]

    def _missing(self, carried_cwe: Mask) -> Numbers:
        members_we = self._members_ewr.sum(axis=2).T
        missing_cwe = np.broadcast_to(members_we, carried_cwe.shape).copy()
        for exchange, before in enumerate(self._program.after_e):
            if before >= 0:
                waits_cr = (self._coming_cre[:, :, before] > 0).astype(np.int64)
                missing_cwe[:, :, exchange] += waits_cr @ self._program.senders_ewr[
                    exchange
                ].T.astype(np.int64)
        return missing_cwe

    @property
    def carrying(self) -> Mask:
        """(c, w) mask of busy wires."""
        busy: Mask = self._end_cw < NEVER
        return busy

    def post(self, lanes_x: Numbers, ranks_x: Numbers, exchanges_x: Numbers) -> None:
        """Record that members have begun exchanges."""
        parts_x, wires_x = np.nonzero(self._members_ewr[exchanges_x, :, ranks_x])
        at = lanes_x[parts_x], wires_x, exchanges_x[parts_x]
        np.subtract.at(self._missing_cwe, at, 1)

    def due(
        self, lanes_x: Numbers, ranks_x: Numbers, exchanges_x: Numbers, sent_x: Mask
    ) -> Seconds:
        """Return when exchanges have arrived and, where asked for, been sent; NEVER if that is
        unknown."""
        at = lanes_x, ranks_x, exchanges_x
        arrival_x = self._arrival_cre[at]
        both_x: Seconds = np.where(sent_x, np.maximum(arrival_x, self._left_cre[at]), arrival_x)
        return both_x

    def start(self, now_c: Seconds) -> None:
        """Start the next exchange on idle wires, if it can leave."""
        lanes_x, wires_x, ready_x = self._next_up()
        can_x = ready_x <= now_c[lanes_x]
        lanes_x, wires_x = lanes_x[can_x], wires_x[can_x]
        heads_x = self._head_cw[lanes_x, wires_x]
        seconds_x = self._seconds_cwe[lanes_x, wires_x, heads_x]
        self._end_cw[lanes_x, wires_x] = now_c[lanes_x] + seconds_x

    def next_event(self, now_c: Seconds) -> Seconds:
        """Return (c,) times at which a wire is next done, or can start an exchange."""
        next_c: Seconds = self._end_cw.min(axis=1)
        lanes_x, _, ready_x = self._next_up()
        later_x = ready_x > now_c[lanes_x]
        np.minimum.at(next_c, lanes_x[later_x], ready_x[later_x])
        return next_c

    def _next_up(self) -> tuple[Numbers, Numbers, Seconds]:
        """Return (configuration, wire, ready time) of idle wires whose next exchange is
        complete."""
        exchanges = self._seconds_cwe.shape[2]
        idle_cw = (self._end_cw == NEVER) & (self._head_cw < exchanges)
        lanes_x, wires_x = np.nonzero(idle_cw)
        heads_x = self._head_cw[lanes_x, wires_x]
        complete_x = self._missing_cwe[lanes_x, wires_x, heads_x] == 0
        lanes_x, wires_x, heads_x = lanes_x[complete_x], wires_x[complete_x], heads_x[complete_x]
        return lanes_x, wires_x, self._ready_cwe[lanes_x, wires_x, heads_x]

    def end(self, now_c: Seconds) -> None:
        """Finish exchanges that have left their wires; they arrive after the latency."""
        lanes_x, wires_x = np.nonzero(self._end_cw <= now_c[:, None])
        if not lanes_x.size:
            return
        exchanges_x = self._head_cw[lanes_x, wires_x]
        ends_x = self._end_cw[lanes_x, wires_x]
        self.ended_cwe[lanes_x, wires_x, exchanges_x] = ends_x
        self._end_cw[lanes_x, wires_x] = NEVER
        self._head_cw[lanes_x, wires_x] = self._next_cwe[lanes_x, wires_x, exchanges_x + 1]
        self._sent(lanes_x, wires_x, exchanges_x, ends_x)
        self._arrive(lanes_x, wires_x, exchanges_x, ends_x + self._latency_w[wires_x])

    def _sent(
        self, lanes_x: Numbers, wires_x: Numbers, exchanges_x: Numbers, ends_x: Seconds
    ) -> None:
        parts_x, ranks_x = np.nonzero(self._program.senders_ewr[exchanges_x, wires_x])
        at = lanes_x[parts_x], ranks_x, exchanges_x[parts_x]
        np.subtract.at(self._leaving_cre, at, 1)
        done_x = self._leaving_cre[at] == 0
        self._left_cre[tuple(axis[done_x] for axis in at)] = ends_x[parts_x][done_x]

    def _arrive(
        self, lanes_x: Numbers, wires_x: Numbers, exchanges_x: Numbers, times_x: Seconds
    ) -> None:
        parts_x, ranks_x = np.nonzero(self._program.receivers_ewr[exchanges_x, wires_x])
        at = lanes_x[parts_x], ranks_x, exchanges_x[parts_x]
        np.subtract.at(self._coming_cre, at, 1)
        np.maximum.at(self._latest_cre, at, times_x[parts_x])
        complete_x = self._coming_cre[at] == 0
        # Several wires may finish an exchange at once, but each rank's arrival counts once.
        shape = self._coming_cre.shape
        done_x = np.unique(np.ravel_multi_index([axis[complete_x] for axis in at], shape))
        lanes_x, ranks_x, exchanges_x = np.unravel_index(done_x, shape)
        arrival_x = self._latest_cre[lanes_x, ranks_x, exchanges_x]
        self._arrival_cre[lanes_x, ranks_x, exchanges_x] = arrival_x
        for exchange in np.unique(exchanges_x):
            of_it_x = exchanges_x == exchange
            for follower in self._passed_on_e[exchange]:
                self._may_pass_on(follower, lanes_x[of_it_x], ranks_x[of_it_x], arrival_x[of_it_x])

    def _may_pass_on(
        self, exchange: int, lanes_x: Numbers, ranks_x: Numbers, arrival_x: Seconds
    ) -> None:
        parts_x, wires_x = np.nonzero(self._program.senders_ewr[exchange][:, ranks_x].T)
        at = lanes_x[parts_x], wires_x, np.full(len(parts_x), exchange)
        np.subtract.at(self._missing_cwe, at, 1)
        np.maximum.at(self._ready_cwe, at, arrival_x[parts_x])


def _next_carried(carried_cwe: Mask) -> Numbers:
    """Return (c, w, e + 1): the first exchange from number e on that a wire carries; e if none."""
    configurations, wires, exchanges = carried_cwe.shape
    numbers = np.full((configurations, wires, exchanges + 1), exchanges)
    numbers[:, :, :exchanges] = np.where(carried_cwe, np.arange(exchanges), exchanges)
    backwards = np.minimum.accumulate(numbers[:, :, ::-1], axis=2)
    following: Numbers = backwards[:, :, ::-1]
    return following


def _by_rank(carried_cwe: Mask, members_ewr: Mask) -> Numbers:
    """Return (c, r, e): number of wires on which a member takes part in an exchange."""
    counts: Numbers = np.einsum(
        "cwe,ewr->cre", carried_cwe.astype(np.int64), members_ewr.astype(np.int64)
    )
    return counts

"""Continuous batching on modeled time: each decode group jumps to its next end of a request.

Members that share no instance are iterated independently, in groups that merge and split as on
real ranks (`protocols/sequencer/decode_batches.py`).

Between two changes of a group, iteration n of a jump takes `a + b * (C + n * B) + c * B` (batch B,
context C at the start of the jump). The end of any iteration is therefore a polynomial in n. All
values are integers in 2^-48 ns, so a jump ends exactly where single iterations would. With
piggybacked prefill, chunks differ from iteration to iteration, so each iteration is a jump.

The busiest master, and the queries that travel to other holders, are the same in all iterations of
a jump, so they only change its constants (`IterationCost`).
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from csps.configurator.costs.latency import FRACTION_BITS, DecodeCost, HybridCost
from csps.loadgen.simulator.timeline import EventTimeline
from csps.protocols.sequencer.decode_batches import SequenceCursor, chunk_lengths


def cursors(batch_members: Iterable[SimulatedMember]) -> list[SequenceCursor]:
    """Return the cursors of batch members for `chunk_lengths`."""
    return [
        SequenceCursor(
            next=member.computed,
            prompt=member.prompt,
            stop=member.prompt + 1,
            master=member.master,
        )
        for member in batch_members
    ]


@dataclass(eq=False, slots=True)
class SimulatedMember:
    """A sequence of the batch."""

    sequence: int
    context: int
    """Tokens that its first iteration attends to."""
    tokens: int
    """Tokens left to generate when it joins."""
    joined: int = -1
    """Iterations of the batch before its first one; -1 until it has joined."""
    prompt: int = 0
    """Prompt tokens that iterations compute before its first token (piggybacked prefill). The first
    token is not part of `tokens`.
    """
    computed: int = 0
    """Prompt tokens computed so far."""
    first: int = 0
    """Prompt tokens that were computed when it joined."""
    master: int = 0
    """Index of its master."""
    ranks: tuple[int, ...] = ()
    """Instances that take part in its iterations, ascending. Empty, on an elastic gang: all."""
    ends: list[int] = field(default_factory=list)
    """Ends of the iterations that it decoded in, on an elastic gang."""
    earlier: list[tuple[IterationLog, int, int]] = field(default_factory=list)
    """Iterations [start, stop) that it decoded in with groups that have merged or split since."""
    before: int = 0
    """Number of these iterations."""
    group: SimulatedGrantGroup | None = None
    """The group that decodes it, on a gang that only decodes."""

    def ends_ns(self, start: int, stop: int) -> list[int]:
        """Return the ends of its own iterations [start, stop)."""
        return self.ends[start:stop]

    @property
    def prefills(self) -> bool:
        """Return whether its prompt is still being computed."""
        return self.computed < self.prompt

    @property
    def further_holders(self) -> int:
        """Return how many instances besides one take part in its iterations."""
        return max(0, len(self.ranks) - 1)

    @property
    def begins(self) -> bool:
        """Return whether no chunk of its prompt has been computed since it joined."""
        return self.computed == self.first


@dataclass(frozen=True, slots=True)
class Jump:
    """Consecutive iterations of an unchanged batch."""

    start_ns: int
    batch: int
    first: int
    """Time of the first iteration, in 2^-48 ns."""
    growth: int
    """Growth of the time from one iteration to the next, in 2^-48 ns."""

    def end_ns(self, iterations: int) -> int:
        """Return the end of the n-th iteration."""
        total = iterations * self.first + self.growth * (iterations * (iterations - 1) // 2)
        return self.start_ns + (total >> FRACTION_BITS)

    def iterations_until(self, t_ns: int, at_most: int) -> int:
        """Return the fewest iterations, at least one, that end at `t_ns` or later."""
        low, high = 1, at_most
        while low < high:
            middle = (low + high) // 2
            if self.end_ns(middle) >= t_ns:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True, slots=True)
class IterationCost:
    """Cost of iterations on one group of instances."""

    decode: DecodeCost
    """Cost if all masters sample as many tokens."""
    hybrid: HybridCost | None = None
    """Cost with prompt chunks as well. None: no step was measured on such instances."""
    instances: int = 1
    exchange: int = 0
    """Time of a layer's exchanges of queries and outputs in all layers, in 2^-48 ns. It passes if
    the KV of any sequence is on several instances."""
    far_row: int = 0
    """Time of a sequence's queries and outputs for each further holder, in 2^-48 ns."""

    def busiest(self, rows_by_master: Mapping[int, int]) -> int:
        """Return the batch that would take as long if all masters sampled as many tokens."""
        return max(rows_by_master.values(), default=0) * self.instances

    def exchanges(self, far: int) -> int:
        """Return the time of exchanges, in 2^-48 ns.

        Args:
            far: holders besides one, summed over the sequences.
        """
        return self.exchange + far * self.far_row if far else 0

    def with_chunks(
        self,
        start_ns: int,
        chunks: Iterable[tuple[SimulatedMember, int]],
        decoding: Iterable[SimulatedMember],
        context: int,
        gap_ns: int,
    ) -> Jump:
        """Return a jump that begins with an iteration which may also compute prompt chunks.

        Without chunks the iterations after it grow with the context.

        Args:
            start_ns: begin of the iteration.
            chunks: (member, tokens) of each chunk.
            decoding: members that decode.
            context: tokens that these attend to together.
            gap_ns: gap after the iteration.
        """
        by_master: dict[int, list[tuple[int, int]]] = {}
        rows: dict[int, int] = {}
        far = batch = 0
        for member, length in chunks:
            by_master.setdefault(member.master, []).append((length, member.computed))
            far += member.further_holders
        for member in decoding:
            rows[member.master] = rows.get(member.master, 0) + 1
            far += len(member.ranks) - 1 if member.ranks else 0
            batch += 1
        busiest, growth = self.busiest(rows), 0
        if by_master:
            assert self.hybrid is not None, "piggybacked prefill without a hybrid cost"
            took = self.hybrid.predict_fixed(by_master.values(), busiest, context)
        else:
            took = self.decode.predict_fixed(busiest, context)
            growth = self.decode.regime(busiest).b * batch
        first = took + self.exchanges(far) + (gap_ns << FRACTION_BITS)
        return Jump(start_ns=start_ns, batch=batch, first=first, growth=growth)


CostOf = Callable[[tuple[int, ...]], IterationCost]
"""Function that returns the cost of iterations on a group of instances."""


class IterationLog:
    """Finished iterations of a batch, stored as jumps."""

    def __init__(self) -> None:
        self._jumps: list[Jump] = []
        self._before: list[int] = [0]
        """Iterations before each jump; the last entry is the total."""

    @property
    def iterations(self) -> int:
        """Return the number of iterations."""
        return self._before[-1]

    def add(self, jump: Jump, iterations: int) -> None:
        """Add a finished jump of so many iterations."""
        self._jumps.append(jump)
        self._before.append(self.iterations + iterations)

    def tokens(self) -> int:
        """Return the tokens generated in all iterations."""
        counts = zip(self._jumps, pairwise(self._before), strict=True)
        return sum(jump.batch * (stop - start) for jump, (start, stop) in counts)

    def ends_ns(self, start: int, stop: int) -> list[int]:
        """Return the ends of the iterations [start, stop)."""
        ends: list[int] = []
        index = bisect.bisect_right(self._before, start) - 1
        while start < stop:
            before, after = self._before[index : index + 2]
            last = min(stop, after)
            jump = self._jumps[index]
            ends.extend(jump.end_ns(iteration - before + 1) for iteration in range(start, last))
            start, index = last, index + 1
        return ends


@dataclass(frozen=True, slots=True)
class IterationEnds:
    """Times of tokens: the ends of iterations [start, stop) of a group or of one member."""

    log: IterationLog | SimulatedMember
    start: int
    stop: int


class SimulatedGrantGroup:
    """Members that are iterated together on some instances of a decode gang.

    Args:
        gang: the batches of the gang.
        instances: ascending indices.
    """

    def __init__(self, gang: SimulatedBatches, instances: tuple[int, ...]) -> None:
        self._gang, self.instances = gang, instances
        self.log = IterationLog()
        self._members: dict[int, SimulatedMember] = {}
        """Members that decode."""
        self._prefilling: dict[int, SimulatedMember] = {}
        """Members that prefill, in order of joining."""
        self._chunks: list[tuple[SimulatedMember, int]] = []
        """Prompt chunks of the jump under way."""
        self._ends: list[tuple[int, int, SimulatedMember]] = []
        """Heap of (last iteration, order of joining, member)."""
        self._joining: list[SimulatedMember] = []
        self._leaving: list[tuple[int, Callable[[], None]]] = []
        self._joined = 0
        self._context = 0
        self._rows = Counter[int]()
        """Members that decode, by master."""
        self._far = 0
        """Holders besides one, summed over the members that decode."""
        self._jump: Jump | None = None
        self._length = 0
        """Iterations of the jump under way."""
        self._version = 0
        self._awaited: dict[SimulatedGrantGroup, None] = {}
        """Groups that end with their present iteration and become part of this one."""
        self._successor: SimulatedGrantGroup | None = None
        """The group that this one becomes part of."""

    def __len__(self) -> int:
        return len(self._members) + len(self._prefilling)

    def join(self, member: SimulatedMember) -> None:
        """Iterate a sequence from the next iteration on."""
        self._joining.append(member)
        self._stop_soon()

    def leave(self, sequence: int, left: Callable[[], None]) -> None:
        """Remove a sequence, if present, after the iteration under way; then call `left`."""
        self._leaving.append((sequence, left))
        self._stop_soon()

    def merge_into(self, successor: SimulatedGrantGroup) -> None:
        """Become part of another group after the iteration under way."""
        if self._awaited:  # it has not begun
            for group in self._awaited:
                group._successor = successor
            successor._awaited |= self._awaited
            successor._joining += self._joining
            successor._leaving += self._leaving
            return
        successor._awaited[self] = None
        self._successor = successor
        self._stop_soon()

    def generated_by(self, member: SimulatedMember) -> int:
        """Return the tokens that a member has generated by now."""
        if member.joined < 0:
            return member.before
        here = self.log.iterations + self._under_way() - member.joined
        return min(member.tokens, member.before + here)

    def _under_way(self) -> int:
        """Return the finished iterations of the present jump."""
        if self._jump is None:
            return 0
        now_ns = self._gang.timeline.now_ns
        over = self._jump.iterations_until(now_ns, self._length)
        return over if self._jump.end_ns(over) <= now_ns else over - 1

    def _stop_soon(self) -> None:
        """End the jump under way with the present iteration."""
        if self._awaited:
            return
        now_ns = self._gang.timeline.now_ns
        if self._jump is None:
            self._schedule(now_ns)
            return
        length = self._jump.iterations_until(now_ns, self._length)
        if length < self._length:
            self._length = length
            self._schedule(self._jump.end_ns(length))

    def _schedule(self, t_ns: int) -> None:
        self._version += 1
        version = self._version
        self._gang.timeline.at(
            t_ns, lambda: self._between_iterations() if version == self._version else None
        )

    def _between_iterations(self) -> None:
        if self._jump is not None:
            self._close_jump(self._jump)
        for sequence, left in self._leaving:
            self._drop(self._members.get(sequence))
            self._prefilling.pop(sequence, None)
            self._joining = [member for member in self._joining if member.sequence != sequence]
            self._gang.gone(sequence)
            left()
        self._leaving.clear()
        if self._successor is not None:
            self._end_into(self._successor)
            return
        for member in self._joining:
            if member.prefills:
                self._prefilling[member.sequence] = member
            else:
                self._add(member)
        self._joining.clear()
        members = (*self._members.values(), *self._prefilling.values())
        if (len(self.instances) > 1 or not members) and self._gang.regroup(self, members):
            return
        if self._prefilling:
            self._begin_hybrid()
        elif self._members:
            self._begin_jump()

    def _end_into(self, successor: SimulatedGrantGroup) -> None:
        joining = [*self.handed_over(), *self._joining]
        successor._joining[:0] = joining
        del successor._awaited[self]
        successor._stop_soon()

    def handed_over(self) -> list[SimulatedMember]:
        """Take all members out, which go on in another group."""
        for member in self._members.values():
            here = self.log.iterations - member.joined
            if here:
                member.earlier.append((self.log, member.joined, member.joined + here))
            member.before += here
            member.joined = -1
        members = [*self._members.values(), *self._prefilling.values()]
        self._members, self._prefilling, self._ends = {}, {}, []
        return members

    def _close_jump(self, jump: Jump) -> None:
        self._jump = None
        self._context += self._length * jump.batch
        self.log.add(jump, self._length)
        self._gang.decoded_tokens += jump.batch * self._length
        self._close_chunks()
        while self._ends and self._ends[0][0] <= self.log.iterations:
            member = heapq.heappop(self._ends)[2]
            if self._members.get(member.sequence) is member:
                self._drop(member)
                self._gang.gone(member.sequence)
                self._gang.finished(member)

    def _close_chunks(self) -> None:
        for member, length in self._chunks:
            member.computed += length
            if not member.prefills:
                del self._prefilling[member.sequence]
                self._gang.prefilled(member)
                if member.tokens:
                    self._add(member)
                else:
                    self._gang.gone(member.sequence)
        self._chunks = []

    def _add(self, member: SimulatedMember) -> None:
        left = member.tokens - member.before
        assert left > 0, f"sequence {member.sequence} joins without tokens to generate"
        member.joined, member.group = self.log.iterations, self
        self._members[member.sequence] = member
        self._context += member.context + member.before
        self._rows[member.master] += 1
        self._far += member.further_holders
        heapq.heappush(self._ends, (self.log.iterations + left, self._joined, member))
        self._joined += 1

    def _drop(self, member: SimulatedMember | None) -> None:
        if member is not None:
            del self._members[member.sequence]
            self._context -= member.context + member.before + self.log.iterations - member.joined
            self._rows[member.master] -= 1
            self._far -= member.further_holders

    def _begin_hybrid(self) -> None:
        """Begin one iteration that also computes prompt chunks."""
        batch = len(self._members)
        prefilling = list(self._prefilling.values())
        lengths = chunk_lengths(cursors((*self._members.values(), *prefilling)), self._gang.budget)[
            batch:
        ]
        self._chunks = [chunk for chunk in zip(prefilling, lengths, strict=True) if chunk[1]]
        for member, _ in self._chunks:
            if member.begins:
                self._gang.started(member)
        self._jump = self._gang.cost(self.instances).with_chunks(
            self._gang.timeline.now_ns,
            self._chunks,
            self._members.values(),
            self._context,
            self._gang.gap_ns,
        )
        self._length = 1
        self._schedule(self._jump.end_ns(1))

    def _begin_jump(self) -> None:
        while self._members.get((member := self._ends[0][2]).sequence) is not member:
            heapq.heappop(self._ends)
        batch, cost = len(self._members), self._gang.cost(self.instances)
        busiest = cost.busiest(self._rows)
        regime = cost.decode.regime(busiest)
        first = regime.a + regime.b * self._context + regime.c * busiest
        self._jump = Jump(
            start_ns=self._gang.timeline.now_ns,
            batch=batch,
            first=first + cost.exchanges(self._far) + (self._gang.gap_ns << FRACTION_BITS),
            growth=regime.b * batch,
        )
        self._length = self._ends[0][0] - self.log.iterations
        self._schedule(self._jump.end_ns(self._length))


class SimulatedBatches:
    """The groups of one decode gang.

    Args:
        timeline: the simulated time.
        cost: returns the cost of iterations on some instances.
        gap_ns: gap between two iterations.
        finished: called with each member at the end of the iteration of its last token.
        started: called with each piggybacked member when its first chunk begins.
        prefilled: called with each piggybacked member after its first token.
    """

    def __init__(
        self,
        timeline: EventTimeline,
        *,
        cost: CostOf,
        gap_ns: int = 0,
        finished: Callable[[SimulatedMember], None],
        started: Callable[[SimulatedMember], None] = lambda _: None,
        prefilled: Callable[[SimulatedMember], None] = lambda _: None,
    ) -> None:
        self.timeline, self.cost, self.gap_ns = timeline, cost, gap_ns
        self.finished, self.started, self.prefilled = finished, started, prefilled
        self.budget = 0
        """Prompt tokens that an iteration may compute."""
        self.decoded_tokens = 0
        """Tokens generated in all iterations, without first tokens of prompts."""
        self._group_of: dict[int, SimulatedGrantGroup] = {}
        """Group by instance."""
        self._ranks: dict[int, tuple[int, ...]] = {}
        """Instances of each member, by sequence."""

    def __len__(self) -> int:
        return len(self._ranks)

    def join(self, member: SimulatedMember) -> None:
        """Decode a sequence from the next iteration of its group on."""
        touched = list(
            dict.fromkeys(self._group_of[rank] for rank in member.ranks if rank in self._group_of)
        )
        if len(touched) == 1 and set(member.ranks) <= set(touched[0].instances):
            group = touched[0]
        else:
            merged = {*member.ranks, *(rank for group in touched for rank in group.instances)}
            group = SimulatedGrantGroup(self, tuple(sorted(merged)))
            for other in touched:
                other.merge_into(group)
            self._group_of |= dict.fromkeys(group.instances, group)
        self._ranks[member.sequence] = member.ranks
        group.join(member)

    def piggyback(self, member: SimulatedMember, budget: int) -> None:
        """Prefill a sequence from the next iteration on, then decode it.

        Args:
            member: the sequence.
            budget: prompt tokens that an iteration may compute from now on.
        """
        self.budget = budget
        self.join(member)

    def leave(self, sequence: int, left: Callable[[], None]) -> None:
        """Remove a sequence, if present, after the iteration under way; then call `left`."""
        ranks = self._ranks.get(sequence)
        if ranks is None:
            self.timeline.at(self.timeline.now_ns, left)
        else:
            self._group_of[ranks[0]].leave(sequence, left)

    def gone(self, sequence: int) -> None:
        """Forget a member that has finished or left."""
        self._ranks.pop(sequence, None)

    def generated_by(self, member: SimulatedMember) -> int:
        """Return the tokens that a member has generated by now."""
        return 0 if member.group is None else member.group.generated_by(member)

    def ends_of(self, member: SimulatedMember, tokens: int) -> list[IterationEnds]:
        """Return the times of a member's first tokens."""
        ends = [IterationEnds(*earlier) for earlier in member.earlier]
        if member.group is not None and tokens > member.before:
            stop = member.joined + tokens - member.before
            ends.append(IterationEnds(member.group.log, member.joined, stop))
        return ends

    def regroup(self, group: SimulatedGrantGroup, members: Iterable[SimulatedMember]) -> bool:
        """Split a group whose members no longer share instances; return whether it has ended."""
        parts: list[set[int]] = []
        for needed in {member.ranks: None for member in members}:
            apart = [part for part in parts if part.isdisjoint(needed)]
            sharing = (part for part in parts if not part.isdisjoint(needed))
            parts = [*apart, set(needed).union(*sharing)]
        if len(parts) == 1 and len(parts[0]) == len(group.instances):
            return False
        for instance in group.instances:
            del self._group_of[instance]
        handed_over = group.handed_over()
        for part in parts:
            successor = SimulatedGrantGroup(self, tuple(sorted(part)))
            self._group_of |= dict.fromkeys(successor.instances, successor)
            for member in handed_over:
                if member.ranks[0] in part:
                    successor.join(member)
        return True

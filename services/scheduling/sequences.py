"""Attempts at requests: from the reservation of slots until the last of them is free again."""

from __future__ import annotations

from csps.services.scheduling.commands import Cancel, MoveKv, SetGroup, Share
from csps.services.scheduling.decisions import DecodePlacement
from csps.services.scheduling.decode_slots import coming_slots, decode_slots
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import GangId, InstanceId, SequenceId
from csps.services.scheduling.ledger import Ledger
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.shares import own, tokens_on
from csps.services.scheduling.state import Gang, Pair, Request, Sequence, Use
from csps.services.scheduling.timers import Timers
from csps.services.scheduling.turn import Turn


class Sequences:
    """All that still hold slots, or may."""

    def __init__(self, turn: Turn, timers: Timers, gangs: Gangs, prefix: PrefixIndex) -> None:
        self._turn, self._timers, self._gangs = turn, timers, gangs
        self._prefix = prefix
        self._joining: dict[GangId, list[Sequence]] = {}
        self.ledger = Ledger()
        self.by_id: dict[SequenceId, Sequence] = {}
        self.closed_now: dict[SequenceId, Sequence] = {}
        """Those that ended in this turn: the executor has delivered tokens without knowing it."""

    def serving(self, sequence: SequenceId) -> Sequence | None:
        """The sequence, if it works for its request."""
        found = self.by_id.get(sequence)
        return None if found is None or found.over else found

    # --- the way to decoding ---

    def start(
        self,
        request: Request,
        pair: Pair,
        placement: DecodePlacement,
        slots: dict[InstanceId, int],
        use: Use | None,
        cached: int,
        held: Use | None,
    ) -> Sequence:
        """Take the slots for a prompt's KV and for all tokens that may be drawn.

        Args:
            placement: without shares if the step draws all that there is to draw.
            slots: that it needs (`decode_slots`).
            use: of the KV of the prompt's first tokens, so many as are cached.
            held: of the KV that the placement names, on a gang that decodes only.
        """
        unlanded = tokens_on(own(placement.shares))
        sequence = self._new(request, pair, placement, slots, unlanded)
        sequence.held = held
        return self._reusing(sequence, use, cached)

    def ride(
        self,
        request: Request,
        placement: DecodePlacement,
        slots: dict[InstanceId, int],
        use: Use | None,
        cached: int,
    ) -> Sequence:
        """The same for a sequence that joins at once; its gang owes tokens from now on."""
        gang = self._gangs.instances[placement.master].gang
        pair = Pair(prefill=gang, decode=gang)
        sequence = self._new(request, pair, placement, slots, {}, rides=True)
        sequence.joined_ns = self._turn.now_ns
        gang.owing[sequence.id] = self._turn.now_ns
        return self._reusing(sequence, use, cached)

    def _reusing(self, sequence: Sequence, use: Use | None, cached: int) -> Sequence:
        sequence.use, sequence.cached = use, cached
        reused = sum(it.tokens for it in sequence.shares if it.origin)
        stays = self._prefix.may_stay(sequence.request, reused)
        sequence.stays = bool(sequence.shares) and stays
        return sequence

    def _new(
        self,
        request: Request,
        pair: Pair,
        placement: DecodePlacement,
        slots: dict[InstanceId, int],
        unlanded: dict[InstanceId, int],
        *,
        rides: bool = False,
    ) -> Sequence:
        master = self._gangs.instances[placement.master]
        sequence = Sequence(
            id=self._gangs.next_id("sequence"),
            request=request,
            prefill=pair.prefill,
            decode=pair.decode,
            shares=placement.shares,
            master=master,
            answer=placement.answer,
            drawn_before=request.drawn,
            slots_stop=request.prompt_tokens + request.output_tokens,
            rides=rides,
            unlanded=unlanded,
            unfreed=dict.fromkeys(slots),
        )
        self.by_id[sequence.id] = sequence
        if slots:
            self.ledger.reserve(sequence.id, slots)
            pair.decode.decoding[sequence.id] = sequence
            self._count_master(sequence, 1)
        return sequence

    def first_token(self, sequence: Sequence) -> None:
        """Its prompt is computed and has drawn a token, which was delivered."""
        sequence.first_token_ns = self._turn.now_ns
        sequence.request.draw(sequence.drawn_before + 1)
        self._join(sequence)

    def landed(self, sequence: Sequence, instance: InstanceId, tokens: int) -> str | None:
        """A share has arrived. Returns what is wrong with it, if anything."""
        expected = sequence.unlanded.get(instance)
        if tokens != expected:
            wanted = "none" if expected is None else expected
            return f"KV of {tokens} tokens landed on a decode instance, not {wanted}"
        del sequence.unlanded[instance]
        self._join(sequence)
        return None

    def _join(self, sequence: Sequence) -> None:
        if sequence.landed and not sequence.rides:
            self._timers.call_off(sequence.landing_timer)
            self._joining.setdefault(sequence.decode.id, []).append(sequence)

    def join(self) -> None:
        """Let decode take over what has landed whole in this turn, with one command a gang."""
        joining, self._joining = self._joining, {}
        for gang, sequences in joining.items():
            ready = [it for it in sequences if not it.over]
            for sequence in ready:
                sequence.joined_ns = self._turn.now_ns
                sequence.decode.owing.setdefault(sequence.id, self._turn.now_ns)
            if ready:
                self._turn.emit(SetGroup(gang=gang, joined=tuple(it.id for it in ready)))
                self._turn.stale = True

    # --- what is kept ---

    def computed(self, sequence: Sequence) -> None:
        """Nothing more of it is computed by steps."""
        if not (sequence.in_place and sequence.unfreed):
            self._leave_prefix(sequence)

    def left(self, sequence: Sequence) -> None:
        """All of its KV that is decoded elsewhere lies where it is to stay."""
        good = sequence.first_token_ns is not None and not sequence.withdrawn
        hashes = sequence.request.hashes if good else ()
        self._prefix.prefilled(sequence.prefill, sequence.id, hashes, sequence.left)
        self._leave_prefix(sequence)

    def _leave_prefix(self, sequence: Sequence) -> None:
        use, sequence.use = sequence.use, None
        if use is not None:
            self._prefix.leave(use)

    def _leave_held(self, sequence: Sequence) -> None:
        held, sequence.held = sequence.held, None
        if held is not None:
            self._prefix.leave(held)

    def _keep(self, sequence: Sequence, drawn: int, hashes: tuple[bytes, ...]) -> None:
        """A sequence is over whose KV stays where it was decoded.

        Args:
            drawn: tokens that it has drawn, the last of which has no KV.
            hashes: of blocks that have KV.
        """
        gang, prompt = sequence.decode, sum(it.tokens for it in sequence.shares)
        to_come = sequence.answer or (Share(sequence.master.id, prompt, prompt + drawn),)
        slots = self.ledger.held(sequence.id)
        # What it has read stays until what follows upon it is kept as well.
        if sequence.in_place:
            use, sequence.use = sequence.use, None
        else:
            use, sequence.held = sequence.held, None
        self._over(sequence)
        for instance in list(sequence.unfreed):
            self.freed(sequence, instance)
        shares = (*own(sequence.shares), *to_come)
        whole = (prompt + drawn - 1) // self._prefix.settings.block_tokens
        self._prefix.decoded(gang, sequence.id, hashes[:whole], shares, slots)
        if use is not None:
            self._prefix.leave(use)

    # --- moving ---

    def move(self, sequence: Sequence, placement: DecodePlacement) -> None:
        """Have its KV moved; until it is there, it has slots in both places."""
        slots = self.ledger.held(sequence.id)
        for instance in decode_slots(placement, 0):
            slots.setdefault(instance, 0)
        for instance, count in coming_slots(sequence, placement).items():
            slots[instance] += count
        self.ledger.resize(sequence.id, slots)
        sequence.moving = MoveKv(
            gang=sequence.decode.id,
            step=self._gangs.next_id("step"),
            sequence=sequence.id,
            shares=placement.shares,
            master=placement.master,
            answer=placement.answer,
        )
        sequence.unfreed.update(dict.fromkeys(slots))
        self._turn.emit(sequence.moving)

    def moved(self, sequence: Sequence) -> None:
        """It goes on where it was moved to. It may have ended since, and been freed by some of
        those that it concerns from now on."""
        placement = sequence.moving
        assert placement is not None, "moved without being asked"
        slots = decode_slots(placement, 0)
        self._count_master(sequence, -1)
        for instance in [it for it in sequence.unfreed if it not in slots]:
            del sequence.unfreed[instance]
            self.ledger.give_back(sequence.id, instance)
        if sequence.unfreed:
            self.ledger.resize(sequence.id, {it: slots[it] for it in sequence.unfreed})
        sequence.shares, sequence.answer = placement.shares, placement.answer
        sequence.master = self._gangs.instances[placement.master]
        self._count_master(sequence, 1)
        sequence.moving = None
        self._turn.stale = True
        self._settle(sequence)

    # --- ends ---

    def finish(self, sequence: Sequence, drawn: int, hashes: tuple[bytes, ...] = ()) -> None:
        """The last token was drawn. Decode frees what it decoded, not what never joined, unless it
        is kept.

        Args:
            hashes: of the answer's blocks.
        """
        self._measure(sequence, drawn)
        sequence.first_token_ns = sequence.first_token_ns or self._turn.now_ns
        if sequence.stays and self._lies(sequence):
            # Where KV lies that is being moved is known only when it is there.
            known = () if sequence.moving else (*sequence.request.hashes, *hashes)
            self._keep(sequence, drawn - sequence.drawn_before, known)
            return
        self._end(sequence, [sequence.decode] if sequence.joined_ns is None else [])

    def leave(self, sequence: Sequence) -> None:
        """Nobody waits for the rest of the answer; what there is may be of use to others."""
        good = self._lies(sequence) and not sequence.moving and not sequence.over
        if good and sequence.stays:
            self._keep(sequence, 1, sequence.request.hashes)
        else:
            self.close(sequence)

    @staticmethod
    def _lies(sequence: Sequence) -> bool:
        """All of its prompt's KV is where it is decoded, or will be when a step ends that nothing
        can keep from it any more."""
        return sequence.landed or (sequence.in_place and sequence.first_token_ns is not None)

    def close(self, sequence: Sequence) -> None:
        """Stop all work for the sequence."""
        if not sequence.over:
            prefill = [sequence.prefill] if sequence.joined_ns is None else []
            self._end(sequence, [*prefill, sequence.decode])

    def _end(self, sequence: Sequence, gangs: list[Gang]) -> None:
        self._over(sequence)
        if sequence.unfreed:
            sequence.decode.owing.setdefault(sequence.id, self._turn.now_ns)
        holders = dict.fromkeys(it.id for it in gangs if self._may_hold(sequence, it))
        sequence.withdrawn = sequence.withdrawn or sequence.prefill.id in holders
        if holders:
            self._turn.emit(Cancel(sequence=sequence.id, gangs=tuple(holders)))
        self._settle(sequence)

    def _over(self, sequence: Sequence) -> None:
        sequence.over = True
        sequence.decode.decoding.pop(sequence.id, None)
        self._timers.call_off(sequence.landing_timer)
        self.closed_now[sequence.id] = sequence

    def _may_hold(self, sequence: Sequence, gang: Gang) -> bool:
        """An un-joined sequence may have KV on its way from the gang that prefills it; if it was to
        stay there and is not on its way any more, it stays."""
        if not self._gangs.lives(gang):
            return False
        if gang is sequence.prefill and sequence.left:
            return sequence.computing > 0
        on_its_way = gang is sequence.prefill and not sequence.rides
        return on_its_way or bool(sequence.unfreed)

    def _measure(self, sequence: Sequence, drawn: int) -> None:
        """How long an iteration takes, smoothed over answers."""
        tokens = drawn - sequence.drawn_before - 1
        if tokens < 1 or sequence.joined_ns is None or sequence.first_token_ns is None:
            return
        since_ns = max(sequence.joined_ns, sequence.first_token_ns)
        measured_ns = (self._turn.now_ns - since_ns) // tokens
        gang = sequence.decode
        before_ns = gang.iteration_ns or measured_ns
        gang.iteration_ns = (7 * before_ns + measured_ns) // 8
        took_ns = self._turn.now_ns - since_ns
        gang.decode_ns = (7 * (gang.decode_ns or took_ns) + took_ns) // 8

    def freed(self, sequence: Sequence, instance: InstanceId) -> None:
        """An instance holds nothing of the sequence any more. So its last token was drawn, of which
        we may hear later from another instance: nothing of it is moved."""
        if instance not in sequence.unfreed:
            return
        sequence.decode.decoding.pop(sequence.id, None)
        if instance == sequence.master.id:
            self._count_master(sequence, -1)
        del sequence.unfreed[instance]
        self.ledger.give_back(sequence.id, instance)
        self._turn.stale = True
        self._settle(sequence)

    def _count_master(self, sequence: Sequence, change: int) -> None:
        """As long as it has not freed the sequence."""
        if sequence.master.id in sequence.unfreed:
            sequence.master.mastered += change
            sequence.decode.mastered += change

    def _settle(self, sequence: Sequence) -> None:
        if not sequence.unfreed:
            sequence.decode.owing.pop(sequence.id, None)
            self._leave_held(sequence)
            if sequence.in_place and not sequence.computing:
                self._leave_prefix(sequence)
            if sequence.over:
                self.by_id.pop(sequence.id, None)

    def inside(self, gang: Gang) -> list[Sequence]:
        """Those that the gang computes, or holds KV slots for."""
        return [it for it in self.by_id.values() if _is_inside(it, gang)]

    def drop(self, gang: Gang) -> list[Sequence]:
        """A gang is gone. Returns the sequences that cannot go on without it."""
        self.ledger.drop(gang)
        gang.owing.clear()
        needing = []
        for sequence in list(self.by_id.values()):
            if sequence.decode is gang:
                sequence.unfreed.clear()
            if sequence.use is not None and sequence.use.gang is gang:
                sequence.use = None
            if sequence.held is not None and sequence.held.gang is gang:
                sequence.held = None
            if not sequence.over and _needs(sequence, gang):
                needing.append(sequence)
            self._settle(sequence)
        return needing

    def between(self, prefill: GangId, decode: GangId) -> list[Sequence]:
        """Sequences whose KV is still to come from one gang to the other."""
        return [
            it
            for it in self.by_id.values()
            if not it.over and it.unlanded and (it.prefill.id, it.decode.id) == (prefill, decode)
        ]


def _is_inside(sequence: Sequence, gang: Gang) -> bool:
    if sequence.decode is gang:
        return bool(sequence.unfreed)
    return sequence.prefill is gang and not sequence.landed and not sequence.over


def _needs(sequence: Sequence, gang: Gang) -> bool:
    return sequence.decode is gang or (sequence.prefill is gang and not sequence.landed)

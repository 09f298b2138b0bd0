"""Sequences: attempts at requests, from the reservation of slots until all of them are free."""

from __future__ import annotations

import logging

from csps.protocols.core.placement import KvSlice, own, tokens_on
from csps.protocols.gang.step_messages import MoveSequence, SequencePlacement
from csps.services.scheduling.deciding.decisions import DecodePlacement
from csps.services.scheduling.events.commands import Cancel, SetGroup, ToGang
from csps.services.scheduling.events.events import GangId, InstanceId, SequenceId
from csps.services.scheduling.events.limits import Timers
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.ledger import (
    Ledger,
    coming_slots,
    decode_slots,
    window_slots,
)
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.state import (
    Gang,
    GangPair,
    Instance,
    PrefixRef,
    Request,
    Round,
    Sequence,
)

_log = logging.getLogger(__name__)


class Sequences:
    """All sequences that hold slots, or may."""

    def __init__(
        self, this_round: Round, timers: Timers, gangs: Gangs, prefix: PrefixCache
    ) -> None:
        self._round, self._timers, self._gangs = this_round, timers, gangs
        self._prefix = prefix
        self._joining: dict[GangId, list[Sequence]] = {}
        self.ledger = Ledger()
        self.by_id: dict[SequenceId, Sequence] = {}
        self.window_slots: dict[SequenceId, tuple[Instance, int]] = {}
        """Slots of sequences in layers with a window, with the master that has them. They are freed
        with the sequence, while its other KV may be retained."""
        self.closed_now: dict[SequenceId, Sequence] = {}
        """Sequences that ended in this round: the executor delivered tokens without knowing it."""

    def serving(self, sequence: SequenceId) -> Sequence | None:
        """Return the sequence if it still serves its request."""
        found = self.by_id.get(sequence)
        return None if found is None or found.over else found

    # --- the way to decoding ---

    def start(
        self,
        request: Request,
        pair: GangPair,
        placement: DecodePlacement,
        slots: dict[InstanceId, int],
        prefill_ref: PrefixRef | None,
        cached: int,
        decode_ref: PrefixRef | None,
    ) -> Sequence:
        """Start a sequence: reserve the slots for the prompt's KV and for all tokens to come.

        Args:
            placement: without slices if a step samples the only token.
            slots: that it needs (`decode_slots`).
            prefill_ref: reference to the KV of the first `cached` tokens.
            decode_ref: reference to the KV that the placement reuses on a gang that only decodes.
        """
        unreceived = tokens_on(own(placement.slices))
        if pair.decode.window > 1 and placement.slices:
            # It gets the KV in the last window even if it has, or will have, no other.
            unreceived.setdefault(placement.master, 0)
        sequence = self._new(request, pair, placement, slots, unreceived)
        sequence.decode_ref = decode_ref
        return self._reuse(sequence, prefill_ref, cached)

    def start_piggybacked(
        self,
        request: Request,
        placement: DecodePlacement,
        slots: dict[InstanceId, int],
        prefill_ref: PrefixRef | None,
        cached: int,
    ) -> Sequence:
        """Start a sequence that joins decode at once; its gang owes tokens from now on."""
        gang = self._gangs.instances[placement.master].gang
        pair = GangPair(prefill=gang, decode=gang)
        sequence = self._new(request, pair, placement, slots, {}, piggybacked=True)
        sequence.joined_ns = self._round.now_ns
        self._owe(sequence)
        return self._reuse(sequence, prefill_ref, cached)

    def _reuse(self, sequence: Sequence, prefill_ref: PrefixRef | None, cached: int) -> Sequence:
        sequence.prefill_ref, sequence.cached = prefill_ref, cached
        reused = sum(kv_slice.tokens for kv_slice in sequence.slices if kv_slice.source)
        retain = self._prefix.may_retain_answer(sequence.request, reused)
        sequence.retain = bool(sequence.slices) and retain
        return sequence

    def _new(
        self,
        request: Request,
        pair: GangPair,
        placement: DecodePlacement,
        slots: dict[InstanceId, int],
        unreceived: dict[InstanceId, int],
        *,
        piggybacked: bool = False,
    ) -> Sequence:
        master = self._gangs.instances[placement.master]
        sequence = Sequence(
            id=self._gangs.next_id("sequence"),
            request=request,
            prefill=pair.prefill,
            decode=pair.decode,
            slices=placement.slices,
            master=master,
            answer=placement.answer,
            generated_before=request.generated_tokens,
            slots_stop=request.prompt_tokens + request.output_tokens,
            piggybacked=piggybacked,
            unreceived=unreceived,
            unfreed=dict.fromkeys(slots),
        )
        self.by_id[sequence.id] = sequence
        if slots:
            self.ledger.reserve(sequence.id, slots)
            near = window_slots(
                pair.decode, placement, request.prompt_tokens, request.output_tokens
            )
            if near:
                master.window_used += near
                self.window_slots[sequence.id] = master, near
            pair.decode.decoding[sequence.id] = sequence
            self._count_master(sequence, 1)
        return sequence

    def first_token(self, sequence: Sequence) -> None:
        """Note that the prompt is computed and its first token was delivered."""
        sequence.first_token_ns = self._round.now_ns
        sequence.request.note_generated(sequence.generated_before + 1)
        self._join(sequence)

    def received(self, sequence: Sequence, instance: InstanceId, tokens: int) -> str | None:
        """Note a received slice; return what is wrong with it, or None."""
        expected = sequence.unreceived.get(instance)
        if tokens != expected:
            wanted = "none" if expected is None else expected
            return f"decode instance {instance} received KV of {tokens} tokens, expected {wanted}"
        del sequence.unreceived[instance]
        self._join(sequence)
        return None

    def _join(self, sequence: Sequence) -> None:
        if sequence.received and not sequence.piggybacked:
            self._timers.cancel(sequence.transfer_timer)
            self._joining.setdefault(sequence.decode.id, []).append(sequence)

    def join(self) -> None:
        """Let decode take over the sequences whose KV was received, with one command a gang."""
        joining, self._joining = self._joining, {}
        for gang, sequences in joining.items():
            ready = [sequence for sequence in sequences if not sequence.over]
            for sequence in ready:
                sequence.joined_ns = self._round.now_ns
                self._owe(sequence)
            if ready:
                self._round.emit(
                    SetGroup(gang=gang, joined=tuple(sequence.id for sequence in ready))
                )
                self._round.stale = True

    def _owe(self, sequence: Sequence) -> None:
        """Note that other instances of its gang than before owe something from now on."""
        owing = sequence.decode.owing
        owing.pop(sequence.id, None)  # they are kept in order of time
        owing[sequence.id] = self._round.now_ns

    # --- prefix cache ---

    def computed(self, sequence: Sequence) -> None:
        """Release the prefix of a sequence that no step computes any more."""
        if not (sequence.in_place and sequence.unfreed):
            self._unref_prefill(sequence)

    def retain_prefilled(self, sequence: Sequence) -> None:
        """Retain KV where it was computed, now that all of it lies there."""
        whole = sequence.first_token_ns is not None or sequence.request.front
        good = whole and not sequence.prefill_cancelled
        hashes = sequence.request.hashes if good else ()
        self._prefix.prefilled(
            sequence.prefill,
            sequence.id,
            sequence.request,
            hashes,
            sequence.retained_slices,
            sequence.prefill_ref,
        )
        self._unref_prefill(sequence)
        if sequence.request.front:
            self.close(sequence)

    def _unref_prefill(self, sequence: Sequence) -> None:
        ref, sequence.prefill_ref = sequence.prefill_ref, None
        if ref is not None:
            self._prefix.unref(ref)

    def _unref_decode(self, sequence: Sequence) -> None:
        ref, sequence.decode_ref = sequence.decode_ref, None
        if ref is not None:
            self._prefix.unref(ref)

    def _retain(self, sequence: Sequence, generated_tokens: int, hashes: tuple[bytes, ...]) -> None:
        """End a sequence and retain its KV where it was decoded.

        Args:
            generated_tokens: of this sequence; the last one has no KV.
            hashes: of blocks that have KV.
        """
        gang, prompt = sequence.decode, sum(kv_slice.tokens for kv_slice in sequence.slices)
        to_come = sequence.answer or (
            KvSlice(sequence.master.id, prompt, prompt + generated_tokens),
        )
        slots = self.ledger.slots_of(sequence.id)
        # The prefix is released last: evicted before, it would take the new segments with it.
        if sequence.in_place:
            ref, sequence.prefill_ref = sequence.prefill_ref, None
        else:
            ref, sequence.decode_ref = sequence.decode_ref, None
        self._mark_over(sequence)
        for instance in list(sequence.unfreed):
            self.freed(sequence, instance)
        slices = (*own(sequence.slices), *to_come)
        whole = (prompt + generated_tokens - 1) // self._prefix.settings.block_tokens
        self._prefix.decoded(
            gang, sequence.id, sequence.request, hashes[:whole], slices, slots, ref
        )
        if ref is not None:
            self._prefix.unref(ref)

    # --- moving ---

    def move(self, sequence: Sequence, placement: DecodePlacement) -> None:
        """Move a sequence's KV; until it is received, it has slots in both places."""
        slots = self.ledger.slots_of(sequence.id)
        for instance in decode_slots(placement, 0):
            slots.setdefault(instance, 0)
        for instance, count in coming_slots(sequence, placement).items():
            slots[instance] += count
        self.ledger.resize(sequence.id, slots)
        sequence.moving = MoveSequence(
            step_id=self._gangs.next_id("step"),
            sequence_id=sequence.id,
            prompt_tokens=sequence.answer_span[0],
            stop=sequence.slots_stop - 1,
            before=SequencePlacement(
                slices=sequence.slices, master=sequence.master_id, answer=sequence.answer
            ),
            after=SequencePlacement(
                slices=placement.slices, master=placement.master, answer=placement.answer
            ),
        )
        sequence.unfreed.update(dict.fromkeys(slots))
        _log.debug(
            "sequence %d moves to master %d in step %d",
            sequence.id,
            placement.master,
            sequence.moving.step_id,
        )
        self._round.emit(ToGang(gang=sequence.decode.id, message=sequence.moving))

    def moved(self, sequence: Sequence) -> None:
        """Let a sequence go on where it was moved to. It may have ended since, and some instances
        may have freed it."""
        assert sequence.moving is not None, (
            f"sequence {sequence.id} reports a move that was not commanded"
        )
        placement = sequence.moving.after
        slots = decode_slots(placement, 0)
        self._count_master(sequence, -1)
        for instance in [instance for instance in sequence.unfreed if instance not in slots]:
            del sequence.unfreed[instance]
            self.ledger.free(sequence.id, instance)
        if sequence.unfreed:
            self.ledger.resize(
                sequence.id, {instance: slots[instance] for instance in sequence.unfreed}
            )
        sequence.slices, sequence.answer = placement.slices, placement.answer
        sequence.master = self._gangs.instances[placement.master]
        self._count_master(sequence, 1)
        sequence.moving = None
        if sequence.id in sequence.decode.owing:
            self._owe(sequence)
        self._round.stale = True
        self._finalize(sequence)

    # --- ends ---

    def finish(
        self, sequence: Sequence, generated_tokens: int, hashes: tuple[bytes, ...] = ()
    ) -> None:
        """Note the last token. Decode instances free sequences that joined, unless KV is retained.

        Args:
            hashes: of the answer's blocks.
        """
        self._measure(sequence, generated_tokens)
        sequence.first_token_ns = sequence.first_token_ns or self._round.now_ns
        if sequence.retain and self._is_resident(sequence):
            # Where KV lies that is being moved is known only when it is there.
            known = () if sequence.moving else (*sequence.request.hashes, *hashes)
            self._retain(sequence, generated_tokens - sequence.generated_before, known)
            return
        self._end(sequence, [sequence.decode] if sequence.joined_ns is None else [])

    def abandon(
        self, sequence: Sequence, generated_tokens: int = 0, hashes: tuple[bytes, ...] = ()
    ) -> None:
        """End a sequence before its last token, and retain its KV if it can be reused.

        Args:
            generated_tokens: that were delivered, over all sequences of the request.
            hashes: of the answer's blocks.
        """
        good = self._is_resident(sequence) and not sequence.moving and not sequence.over
        if good and sequence.retain:
            # Delivered tokens but the last have KV, even where ranks have sampled more since.
            known = max(1, generated_tokens - sequence.generated_before)
            self._retain(sequence, known, (*sequence.request.hashes, *hashes))
        else:
            self.close(sequence)

    @staticmethod
    def _is_resident(sequence: Sequence) -> bool:
        """Return whether all of its prompt's KV is where it is decoded, or will certainly be when a
        running step ends."""
        return sequence.received or (sequence.in_place and sequence.first_token_ns is not None)

    def close(self, sequence: Sequence) -> None:
        """Stop all work for the sequence."""
        if not sequence.over:
            prefill = [sequence.prefill] if sequence.joined_ns is None else []
            self._end(sequence, [*prefill, sequence.decode])

    def _end(self, sequence: Sequence, gangs: list[Gang]) -> None:
        self._mark_over(sequence)
        if sequence.unfreed:
            self._owe(sequence)
        holders = dict.fromkeys(gang.id for gang in gangs if self._may_hold(sequence, gang))
        sequence.prefill_cancelled = sequence.prefill_cancelled or sequence.prefill.id in holders
        if holders or sequence.request.front:  # no token tells the executor of a front's end
            _log.debug("cancelling sequence %d on gangs %s", sequence.id, list(holders))
            self._round.emit(Cancel(sequence_id=sequence.id, gangs=tuple(holders)))
        self._finalize(sequence)

    def _mark_over(self, sequence: Sequence) -> None:
        sequence.over = True
        sequence.decode.decoding.pop(sequence.id, None)
        self._timers.cancel(sequence.transfer_timer)
        self.closed_now[sequence.id] = sequence

    def _may_hold(self, sequence: Sequence, gang: Gang) -> bool:
        """Return whether a gang may hold KV of a sequence that is over."""
        if not self._gangs.lives(gang):
            return False
        if gang is sequence.prefill and sequence.retained_slices:
            # Retained KV stays on the prefill gang once its transfer is complete.
            return sequence.computing > 0
        in_transfer = gang is sequence.prefill and not sequence.piggybacked
        return in_transfer or bool(sequence.unfreed)

    def _measure(self, sequence: Sequence, generated_tokens: int) -> None:
        """Average the time of an iteration and of an answer over answers."""
        tokens = generated_tokens - sequence.generated_before - 1
        if tokens < 1 or sequence.joined_ns is None or sequence.first_token_ns is None:
            return
        since_ns = max(sequence.joined_ns, sequence.first_token_ns)
        measured_ns = (self._round.now_ns - since_ns) // tokens
        gang = sequence.decode
        before_ns = gang.iteration_ns or measured_ns
        gang.iteration_ns = (7 * before_ns + measured_ns) // 8
        took_ns = self._round.now_ns - since_ns
        gang.decode_ns = (7 * (gang.decode_ns or took_ns) + took_ns) // 8

    def free_window(self, sequence: SequenceId, instance: InstanceId) -> None:
        """Note that a sequence has left the decode batch of an instance."""
        master, slots = self.window_slots.get(sequence, (None, 0))
        if master is not None and master.id == instance:
            del self.window_slots[sequence]
            master.window_used -= slots
            self._round.stale = True

    def freed(self, sequence: Sequence, instance: InstanceId) -> None:
        """Note that an instance has freed the sequence."""
        if instance not in sequence.unfreed:
            return
        sequence.decode.decoding.pop(sequence.id, None)
        if instance == sequence.master.id:
            self._count_master(sequence, -1)
        del sequence.unfreed[instance]
        self.ledger.free(sequence.id, instance)
        self._round.stale = True
        self._finalize(sequence)

    def _count_master(self, sequence: Sequence, change: int) -> None:
        """Count the master's sequence as long as it has not freed it."""
        if sequence.master.id in sequence.unfreed:
            sequence.master.mastered += change
            sequence.decode.mastered += change

    def _finalize(self, sequence: Sequence) -> None:
        if not sequence.unfreed:
            sequence.decode.owing.pop(sequence.id, None)
            self._unref_decode(sequence)
            if sequence.in_place and not sequence.computing:
                self._unref_prefill(sequence)
            if sequence.over:
                self.by_id.pop(sequence.id, None)

    def inside(self, gang: Gang) -> list[Sequence]:
        """Return the sequences that the gang computes, or for which it holds slots."""
        return [sequence for sequence in self.by_id.values() if _is_inside(sequence, gang)]

    def drop(self, gang: Gang) -> list[Sequence]:
        """Drop a gang's slots; return the sequences that cannot go on without it."""
        self.ledger.drop(gang)
        self.window_slots = {
            sequence: entry
            for sequence, entry in self.window_slots.items()
            if entry[0].gang is not gang
        }
        gang.owing.clear()
        needing = []
        for sequence in list(self.by_id.values()):
            if sequence.decode is gang:
                sequence.unfreed.clear()
            if sequence.prefill_ref is not None and sequence.prefill_ref.gang is gang:
                sequence.prefill_ref = None
            if sequence.decode_ref is not None and sequence.decode_ref.gang is gang:
                sequence.decode_ref = None
            if not sequence.over and _needs(sequence, gang):
                needing.append(sequence)
            self._finalize(sequence)
        return needing

    def between(self, prefill: GangId, decode: GangId) -> list[Sequence]:
        """Return the sequences whose KV is still in transfer from one gang to the other."""
        return [
            sequence
            for sequence in self.by_id.values()
            if not sequence.over
            and sequence.unreceived
            and (sequence.prefill.id, sequence.decode.id) == (prefill, decode)
        ]


def _is_inside(sequence: Sequence, gang: Gang) -> bool:
    if sequence.decode is gang:
        return bool(sequence.unfreed)
    return sequence.prefill is gang and not sequence.received and not sequence.over


def _needs(sequence: Sequence, gang: Gang) -> bool:
    return sequence.decode is gang or (sequence.prefill is gang and not sequence.received)

"""A cell of gangs made of random decisions: an executor of the scheduler that keeps to the protocol
and to nothing else. It also checks what it is told to do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from csps.protocols.core.placement import own, placed_once, tokens_on
from csps.protocols.gang.messages import EvictKv, JoinBatch, ReserveKv, RetainKv
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep, SequencePlacement
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.step_layout import slots_of
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import gang_of, instance_id

MS = 1_000_000


def gang_up(
    gang: int,
    slots: list[int],
    *,
    prefill: bool = False,
    decode: bool = False,
    places: list[str] | None = None,
    generation: int = 1,
    tp: int = 1,
    max_positions: int = 1 << 30,
    kv_bytes_per_token: int = 0,
    window: int = 0,
    windows: list[int] | None = None,
) -> ev.GangUp:
    """Return the event of a gang of instances with so many slots, on one server by default.

    Args:
        windows: room for so many windows in slots of their own, by instance.
    """
    at = places or [f"0-{int(decode)}-{index * tp}" for index in range(len(slots))]
    return ev.GangUp(
        gang=gang,
        generation=generation,
        may_prefill=prefill,
        may_decode=decode,
        tp=tp,
        instances=tuple(
            ev.InstanceUp(location=place, kv_slots=n, window_slots=window * room)
            for place, n, room in zip(at, slots, windows or [0] * len(slots), strict=True)
        ),
        max_positions=max_positions,
        kv_bytes_per_token=kv_bytes_per_token,
        window=window,
    )


Placement = ReserveKv | SequencePlacement


def stored_on(placement: Placement, prompt: int, output: int) -> dict[int, set[int]]:
    """Return the positions whose KV each instance stores, position by position; those that others
    have computed take no slots. The master frees a sequence even if it stores none of it.
    """
    if not placement.slices:
        return {}
    stored: dict[int, set[int]] = {placement.master: set()}
    for kv_slice in (*placement.slices, *placement.answer):
        here = stored.setdefault(kv_slice.instance, set())
        if not kv_slice.source:
            here.update(range(kv_slice.start, kv_slice.stop, kv_slice.step))
    if not placement.answer:
        stored[placement.master].update(range(prompt, prompt + output))
    return stored


def slots_for(placement: Placement, prompt: int, output: int) -> dict[int, int]:
    """Return the slots that a sequence needs on each instance that stores or samples it."""
    stored = stored_on(placement, prompt, output)
    return {instance: len(positions) for instance, positions in stored.items()}


@dataclass
class SentSequence:
    """A sequence as the ranks know it."""

    reserve: cmd.Reserve
    front: bool = False
    """Only the beginning of its request's prompt, of which no token comes."""
    prefill: int = 0
    steps: list[int] = field(default_factory=list)
    computed: int = 0
    first_token: bool = False
    unreceived: dict[int, int] = field(default_factory=dict)
    unfreed: list[int] = field(default_factory=list)
    joined: bool = False
    silent: bool = False
    """Cancelled, failed or restarted: no token comes any more."""
    freeing: bool = False
    """The decode gang frees it."""
    freed_in: int = -1
    """The turn in which an instance freed it last."""
    move: SequencePlacement | None = None
    """Move under way."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slots on each instance, including those that a move takes there."""

    moved: SequencePlacement | None = None
    """Last completed move."""

    @property
    def placed(self) -> ReserveKv | SequencePlacement:
        """Return the sequence's present placement."""
        return self.moved or self.reserve.message


@dataclass
class SentRequest:
    """Request of a client, as the executor knows it."""

    prompt: int
    output: int
    generated: int = 0
    sequence: int | None = None
    ended: str = ""
    ended_in: int = -1
    """Turn in which it was cancelled or sampled its last token."""


class RandomCell:
    """One pair of gangs at a time, or one elastic gang, whose ranks do everything that they may do,
    in any order."""

    PROMPTS = (1, 3, 90, 100, 400, 1500, 3000)
    KV_PERMILLE = 1000
    """Share of each tenant, if there are any."""
    KV_BYTES = 1000
    """KV size of a token."""

    def __init__(
        self,
        scheduler: Scheduler,
        seed: int,
        *,
        faults: float = 0.1,
        elastic: bool = False,
        tenants: int = 0,
        window: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self._window = window
        """Window of layers with slots of their own on decode gangs; 0: there are none."""
        self.full_windows = 0
        """Rounds after which no instance could become the master of a further sequence."""
        self.scheduler, self.faults = scheduler, faults
        self._tenants = tenants
        self._wanted = 1 if elastic else 2
        self.now_ns = 0
        self.turns = 0
        self.wake_at_ns: int | None = None
        self.requests: dict[int, SentRequest] = {}
        self.sequences: dict[int, SentSequence] = {}
        self.steps: dict[int, tuple[PrefillStep, list[int]]] = {}
        self.gangs: dict[int, ev.GangUp] = {}
        self.dead: set[int] = set()
        self.linked = False
        self.commands: list[cmd.AnyCommand] = []
        self._gang_number = 0
        self._doomed: list[int] = []
        self._pending: list[ev.AnyEvent] = []
        self._carry_out = {
            cmd.Reserve: self._reserve,
            cmd.RunStep: self._run_step,
            cmd.SetGroup: self._set_group,
            cmd.ToGang: self._to_gang,
            cmd.Cancel: self._cancel,
            cmd.Restart: self._restart,
            cmd.Refuse: self._refuse,
            cmd.Fail: self._fail,
            cmd.ResetGang: self._reset,
        }

    # --- the turns ---

    def play(self, requests: int, turns: int) -> None:
        """Run random rounds, and then as many as it takes for everything to end."""
        for _ in range(turns):
            for _ in range(self.random.randint(0, 3)):
                self._something(requests)
            self.turn()
        self.faults = 0.0
        for _ in range(50 * (requests + 20)):
            if self.over:
                break
            self._progress_only()
            self.turn()
        assert self.over, f"still open: {self._open()}"
        while self._pending:  # a gang may have been reset at last
            self.turn()

    @property
    def over(self) -> bool:
        return (
            not self._open()
            and not self.steps
            and not any(sequence.unfreed for sequence in self.sequences.values())
        )

    def _open(self) -> dict[int, SentRequest]:
        return {number: request for number, request in self.requests.items() if not request.ended}

    def turn(self) -> None:
        """Hand over what has happened, carry out what comes back."""
        self.now_ns += self.random.choice([0, 1000, MS, 30 * MS, 400 * MS])
        events, self._pending = self._pending, []
        if self.wake_at_ns is not None and self.now_ns >= self.wake_at_ns:
            events.append(ev.Wake())
        outcome = self.scheduler.handle(events, self.now_ns)
        self.wake_at_ns = outcome.wake_at_ns
        self.commands += outcome.commands
        for command in outcome.commands:
            self._carry_out[type(command)](command)
        self.turns += 1
        self.scheduler.check_invariants()
        self._check_slots()

    def _check_slots(self) -> None:
        """Assert that the ranks never hold more than they have."""
        used: Counter[int] = Counter()
        for sequence in self.sequences.values():
            used.update({instance: sequence.slots[instance] for instance in sequence.unfreed})
        for step, undone in self.steps.values():
            histories = [chunk.history for chunk in step.chunks]
            sizes = {} if self._wanted == 1 else slots_of(step, histories)
            used.update({instance: sizes.get(instance, 0) for instance in undone})
        for gang in self.gangs.values():
            for index, instance in enumerate(gang.instances):
                assert used[instance_id(gang.gang, index)] <= instance.kv_slots
        self._check_windows()

    def _check_windows(self) -> None:
        """Assert that masters never hold more in layers with a window than they have, whoever the
        sequences are of: those that they still decode, or will."""
        used: Counter[int] = Counter()
        for sequence in self.sequences.values():
            reserved = sequence.reserve.message
            if reserved.slices and reserved.master in sequence.unfreed:
                prompt = reserved.prompt_tokens
                positions = range(
                    max(0, prompt - self._window + 1), prompt + reserved.output_tokens - 1
                )
                used[reserved.master] += min(self._window, len(positions))
        for gang in self.gangs.values():
            left = [
                instance.window_slots - used[instance_id(gang.gang, index)]
                for index, instance in enumerate(gang.instances)
            ]
            assert not gang.window or min(left) >= 0, f"slots in windows that are left: {left}"
            self.full_windows += 0 <= max(left) < gang.window

    # --- what happens ---

    def _something(self, requests: int) -> None:
        if self.random.random() < self.faults:
            self._fault()
        elif len(self.requests) < requests and self.random.random() < 0.3:
            self._submit()
        else:
            self._progress_only()

    def _submit(self) -> None:
        number = len(self.requests) + 1
        prompt = self.random.choice(self.PROMPTS)
        output = self.random.choice([1, 1, 2, 50, 300])
        deadline = self.now_ns + self.random.choice([5, 500, 50_000]) * MS
        self.requests[number] = SentRequest(prompt, output)
        self._pending.append(
            ev.Submitted(
                request_id=number,
                prompt_tokens=prompt,
                output_tokens=output,
                cls=self.random.choice(["exact", "exact", "fast"]),
                deadline_ns=deadline if self.random.random() < 0.2 else None,
                hashes=self._hashes(number),
                tenant=self.random.randint(1, self._tenants) if self._tenants else 0,
                kv_permille=self.KV_PERMILLE if self._tenants else 1000,
            )
        )

    def _hashes(self, number: int) -> tuple[bytes, ...]:
        """Return the hashes of a prompt, for deployments with a prefix cache."""
        return ()

    def _answer_hashes(self, number: int) -> tuple[bytes, ...]:
        """Return the hashes of the answer's blocks."""
        return ()

    def _progress_only(self) -> None:
        missing = len(self.gangs) < self._wanted
        if not self.gangs or (missing and self.random.random() < 0.5):
            self._bring_up()
            return
        choices = [self._attach]
        choices += [self._step_done] * 4 * bool(self.steps)
        choices += [self._receive_kv, self._sample, self._free, self._finish, self._heartbeat]
        choices += [self._moved] * 2 * (self._some("moving") is not None)
        choices += [self._prompt_computed] * 4 * (self._some("prefilling") is not None)
        self.random.choice(choices)()

    def _bring_up(self) -> None:
        self._gang_number += 1
        has = {gang.may_prefill for gang in self.gangs.values()}
        elastic = self._wanted == 1
        prefill = True not in has
        sizes = [800, 1200, 4000] if prefill and not elastic else [500, 5000]
        slots = [self.random.choice(sizes) for _ in range(self.random.randint(1, 4))]
        decode = elastic or not prefill
        number, kv = self._gang_number, self.KV_BYTES
        up = gang_up(
            number,
            slots,
            prefill=prefill,
            decode=decode,
            kv_bytes_per_token=kv,
            **self._windows(len(slots)) if self._window and not prefill else {},
        )
        self.gangs[up.gang] = up
        self._pending.append(up)

    def _windows(self, instances: int) -> dict[str, Any]:
        rooms = [self.random.randint(1, 3) for _ in range(instances)]
        return {"window": self._window, "windows": rooms}

    def _attach(self) -> None:
        if len(self.gangs) < self._wanted:
            self._bring_up()
        elif not self.linked and self._wanted == 2:
            self.linked = True
            self._pending.append(ev.LinkUp(prefill=self._gang(True), decode=self._gang(False)))

    def _gang(self, prefill: bool) -> int:
        return next(gang.gang for gang in self.gangs.values() if gang.may_prefill == prefill)

    def _heartbeat(self) -> None:
        living = [
            instance_id(gang.gang, index)
            for gang in self.gangs.values()
            for index in range(len(gang.instances))
        ]
        self._pending.append(ev.Heartbeat(instances=tuple(living), steps=tuple(self.steps)))

    def _step_done(self) -> None:
        number = self.random.choice(list(self.steps))
        step, undone = self.steps[number]
        instance = self.random.choice(undone)
        undone.remove(instance)
        if not undone:
            del self.steps[number]
            self._computed(step)
        took_ns = self.random.randint(0, 50 * MS)
        self._pending.append(ev.StepDone(step_id=number, instance=instance, took_ns=took_ns))

    def _computed(self, step: PrefillStep) -> None:
        """Report the first token, which the master does before it reports the step."""
        for chunk in step.chunks:
            sequence = self.sequences[chunk.sequence_id]
            sequence.steps.remove(step.step_id)
            sequence.computed += chunk.length
            whole = sequence.computed == sequence.reserve.message.prompt_tokens
            if whole and not (sequence.silent or sequence.front):
                self._first_token(chunk.sequence_id)

    def _first_token(self, number: int) -> None:
        sequence = self.sequences[number]
        request = self.requests[sequence.reserve.request_id]
        sequence.first_token = True
        request.generated += 1
        self._pending.append(ev.FirstToken(sequence_id=number))
        if request.generated == request.output:
            self._finished(number)

    def _prompt_computed(self) -> None:
        """Finish the prompt of a piggybacked sequence."""
        if (number := self._some("prefilling")) is not None:
            self._first_token(number)

    def _finished(self, number: int) -> None:
        sequence = self.sequences[number]
        sequence.silent = True
        request = self.requests[sequence.reserve.request_id]
        request.ended, request.ended_in = request.ended or "finished", self.turns
        request.sequence = None
        if sequence.joined and not sequence.reserve.message.retain:
            sequence.freeing = True
        hashes = self._answer_hashes(number)
        self._pending.append(
            ev.Finished(sequence_id=number, generated_tokens=request.generated, hashes=hashes)
        )

    def _some(self, wanted: str) -> int | None:
        found = []
        for number, sequence in self.sequences.items():
            fits = {
                "receiving": bool(sequence.unreceived) and not sequence.silent,
                "decoding": sequence.joined and sequence.first_token and not sequence.silent,
                "prefilling": sequence.joined and not sequence.first_token and not sequence.silent,
                "freeing": sequence.freeing and bool(sequence.unfreed),
                "working": not sequence.silent,
                "moving": sequence.move is not None and not sequence.silent,
            }
            if fits[wanted]:
                found.append(number)
        return self.random.choice(found) if found else None

    def _receive_kv(self) -> None:
        if (number := self._some("receiving")) is not None:
            sequence = self.sequences[number]
            instance = self.random.choice(list(sequence.unreceived))
            tokens = sequence.unreceived.pop(instance)
            if self.random.random() < self.faults / 4:
                tokens += 1
            self._pending.append(
                ev.KvReceived(sequence_id=number, instance=instance, tokens=tokens)
            )

    def _sample(self) -> None:
        if (number := self._some("decoding")) is not None:
            request = self.requests[self.sequences[number].reserve.request_id]
            if request.generated < request.output - 1:
                request.generated += self.random.randint(1, request.output - 1 - request.generated)

    def _finish(self) -> None:
        if (number := self._some("decoding")) is not None:
            request = self.requests[self.sequences[number].reserve.request_id]
            request.generated += 1
            self._finished(number)

    def _free(self) -> None:
        if (number := self._some("freeing")) is not None:
            sequence = self.sequences[number]
            instance = self.random.choice(sequence.unfreed)
            sequence.unfreed.remove(instance)
            sequence.freed_in = self.turns
            self._pending.append(ev.Freed(sequence_id=number, instance=instance))

    # --- faults ---

    def _fault(self) -> None:
        faults = [self._gang_dies, self._link_breaks, self._sequence_fails, self._client_leaves]
        self.random.choice([*faults, self._client_leaves, self._sequence_fails])()

    def _gang_dies(self, gang: int | None = None) -> None:
        if not self.gangs:
            return
        gang = self.random.choice(list(self.gangs)) if gang is None else gang
        generated_tokens = tuple(
            (number, self.requests[sequence.reserve.request_id].generated)
            for number, sequence in self.sequences.items()
            if not (sequence.silent or sequence.front)
        )
        self._pending += [
            ev.Progress(generated_tokens=generated_tokens),
            ev.GangDown(gang=gang, reason="killed"),
        ]
        del self.gangs[gang]
        self.linked = False
        for number in [
            step_id for step_id, (step, _) in self.steps.items() if gang_of(step.group[0]) == gang
        ]:
            for chunk in self.steps.pop(number)[0].chunks:
                self.sequences[chunk.sequence_id].steps.remove(number)
        for sequence in self.sequences.values():
            if gang_of(sequence.reserve.message.master) == gang:
                sequence.unfreed, sequence.silent = [], True
            elif sequence.prefill == gang and not (
                sequence.first_token and not sequence.unreceived
            ):
                sequence.silent = True

    def _link_breaks(self) -> None:
        if self.linked:
            self.linked = False
            prefill, decode = self._gang(True), self._gang(False)
            self._pending.append(ev.LinkDown(prefill=prefill, decode=decode, reason="cut"))
            for sequence in self.sequences.values():
                if not sequence.silent and sequence.unreceived:
                    sequence.silent = True

    def _sequence_fails(self) -> None:
        if (number := self._some("working")) is None:
            return
        sequence = self.sequences[number]
        sequence.silent = True
        if not sequence.steps and not sequence.joined and self.random.random() < 0.5:
            refused = sequence.unfreed[: self.random.randint(0, len(sequence.unfreed))]
            for instance in refused:
                sequence.unfreed.remove(instance)
                sequence.freed_in = self.turns
                self._pending.append(ev.Freed(sequence_id=number, instance=instance))
        generated = self.requests[sequence.reserve.request_id].generated
        self._pending.append(
            ev.Failed(
                sequence_id=number,
                generated_tokens=0 if sequence.front else generated,
                error=ev.WireError("TransferError", "bad"),
                retryable=self.random.random() < 0.7,
            )
        )

    def _client_leaves(self) -> None:
        if open_requests := list(self._open()):
            number = self.random.choice(open_requests)
            request = self.requests[number]
            request.ended, request.ended_in = "cancelled", self.turns
            hashes: tuple[bytes, ...] = ()
            if request.sequence is not None:
                self.sequences[request.sequence].silent = True
                hashes = self._answer_hashes(request.sequence)
            self._pending.append(
                ev.RequestCancelled(
                    request_id=number, generated_tokens=request.generated, hashes=hashes
                )
            )

    # --- carrying out ---

    def _reserve(self, command: cmd.Reserve) -> None:
        request, reserved = self.requests[command.request_id], command.message
        assert not request.ended, "placed, but over"
        assert request.sequence is None, "placed twice"
        assert reserved.sequence_id not in self.sequences, "an id came again"
        assert reserved.prompt_tokens == request.prompt + request.generated
        assert reserved.output_tokens == request.output - request.generated > 0
        gang = gang_of(reserved.master)
        assert gang in self.gangs, "reserved on a dead gang"
        assert self.gangs[gang].may_decode
        request.sequence = reserved.sequence_id
        unreceived = {} if command.piggybacked else tokens_on(own(reserved.slices))
        if self._window > 1 and reserved.slices:
            unreceived.setdefault(reserved.master, 0)
        self.sequences[reserved.sequence_id] = SentSequence(
            reserve=command,
            unreceived=unreceived,
            slots=slots_for(reserved, reserved.prompt_tokens, reserved.output_tokens),
            unfreed=list(slots_for(reserved, reserved.prompt_tokens, reserved.output_tokens)),
        )

    def _run_step(self, command: cmd.RunStep) -> None:
        step = command.step
        gang = gang_of(step.group[0])
        assert gang in self.gangs, "launched on a dead gang"
        assert self.gangs[gang].may_prefill
        assert step.step_id not in self.steps
        assert sum(_sizes(step)) == sum(chunk.length for chunk in step.chunks)
        self.steps[step.step_id] = step, list(step.group)
        for chunk in step.chunks:
            sequence = self.sequences[chunk.sequence_id]
            sequence.prefill = gang
            sequence.steps.append(step.step_id)

    def _set_group(self, command: cmd.SetGroup) -> None:
        assert command.gang in self.gangs, "joined on a dead gang"
        for number in command.joined:
            sequence = self.sequences[number]
            assert sequence.first_token, "joined without its first token"
            assert not sequence.unreceived, "joined before its KV"
            assert not sequence.joined, "joined twice"
            sequence.joined = True

    def _to_gang(self, command: cmd.ToGang) -> None:
        assert command.gang in self.gangs, "a message to a dead gang"
        message = command.message
        if isinstance(message, JoinBatch):
            self._piggyback(command.gang, message)
        elif isinstance(message, MoveSequence):
            self._move(message)
        else:
            self._retain_or_evict(command.gang, message)

    def _piggyback(self, gang: int, message: JoinBatch) -> None:
        assert message.budget > 0
        sequence = self.sequences[message.sequence_id]
        assert sequence.reserve.piggybacked, "piggybacked without being reserved for it"
        assert gang_of(sequence.reserve.message.master) == gang
        assert not sequence.joined, "joined twice"
        sequence.joined = True

    def _move(self, message: MoveSequence) -> None:
        sequence, after = self.sequences[message.sequence_id], message.after
        assert sequence.joined, "moved before it is decoded"
        assert sequence.move is None, "moved twice at a time"
        before, reserve = sequence.placed, sequence.reserve
        assert message.before.master == before.master
        assert (message.before.slices, message.before.answer) == (before.slices, before.answer)
        stop = reserve.message.prompt_tokens + reserve.message.output_tokens
        span = (reserve.message.prompt_tokens, stop)
        assert placed_once(0, span[0], after.slices), "not the prompt's positions"
        assert placed_once(*span, after.answer), "not the answer's positions"
        length, output = reserve.message.prompt_tokens, reserve.message.output_tokens
        there, coming = (stored_on(placement, length, output) for placement in (before, after))
        for instance, positions in coming.items():
            if instance not in sequence.slots:
                sequence.slots[instance] = 0
                sequence.unfreed.append(instance)
            sequence.slots[instance] += len(positions - there.get(instance, set()))
        sequence.move = after

    def _moved(self) -> None:
        """Report that a sequence has moved, and free what it has left."""
        if (number := self._some("moving")) is not None:
            sequence = self.sequences[number]
            assert sequence.move is not None
            sequence.moved, sequence.move = sequence.move, None
            reserve = sequence.reserve.message
            sequence.slots = slots_for(sequence.moved, reserve.prompt_tokens, reserve.output_tokens)
            sequence.unfreed = [
                instance for instance in sequence.unfreed if instance in sequence.slots
            ]
            self._pending.append(ev.Moved(sequence_id=number))

    def _retain_or_evict(self, gang: int, message: RetainKv | EvictKv) -> None:
        raise AssertionError("this executor has no prefix cache")

    def _cancel(self, command: cmd.Cancel) -> None:
        sequence = self.sequences[command.sequence_id]
        sequence.silent = True
        for gang in command.gangs:
            assert gang in self.gangs, "cancelled on a dead gang"
            if gang == gang_of(sequence.reserve.message.master):
                late = sequence.freed_in == self.turns
                assert sequence.unfreed or late, "cancelled on an instance without its slots"
                sequence.freeing = True

    def _restart(self, command: cmd.Restart) -> None:
        request = self.requests[command.request_id]
        assert not request.ended or request.ended_in == self.turns, "restarted, but over"
        assert request.sequence in (None, command.sequence_id)
        request.sequence = None

    def _refuse(self, command: cmd.Refuse) -> None:
        self._end(command.request_id, "refused")

    def _fail(self, command: cmd.Fail) -> None:
        self._end(command.request_id, f"failed: {command.error.message}")

    def _end(self, number: int, how: str) -> None:
        request = self.requests[number]
        late = request.ended_in == self.turns
        assert not request.ended or late, f"{how}, but {request.ended}"
        request.ended, request.sequence = how, None

    def _reset(self, command: cmd.ResetGang) -> None:
        assert command.gang in self.gangs, "reset a dead gang"
        self._gang_dies(command.gang)


def _sizes(step: PrefillStep) -> list[int]:
    return [stop - start for start, stop in zip(step.bounds, step.bounds[1:], strict=False)]

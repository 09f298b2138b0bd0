"""Invariants of the scheduler's state, which tests check after every round."""

from __future__ import annotations

from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.core.restores import Restores
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.core.steps import Steps
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache


def check_invariants(
    gangs: Gangs,
    requests: Requests,
    sequences: Sequences,
    steps: Steps,
    prefix: PrefixCache,
    restores: Restores,
) -> None:
    """Assert that no slot, step, sequence, request or segment was lost."""
    _check_slots(gangs, sequences, steps, prefix)
    _check_prefix(gangs, sequences, steps, prefix, restores)
    restores.check()
    for request in requests.live.values():
        if request.waiting and not request.attempts:
            prefix.check_known(request)
    _check_steps(gangs, steps)
    _check_sequences(gangs, requests, sequences)
    _check_queue(requests)


def _check_slots(gangs: Gangs, sequences: Sequences, steps: Steps, prefix: PrefixCache) -> None:
    instances = list(gangs.instances.values())
    of_sequences, of_steps = sequences.ledger.sums(instances), steps.ledger.sums(instances)
    of_retained = prefix.ledger.sums(instances)
    for instance in instances:
        slots = of_sequences[instance.id] + of_steps[instance.id] + of_retained[instance.id]
        assert slots == instance.used, (
            f"ledger entries of instance {instance.id} sum to {slots}, counted {instance.used}"
        )
        assert 0 <= instance.used <= instance.capacity, f"instance {instance.id} is over capacity"
        near = [slots for master, slots in sequences.window_slots.values() if master is instance]
        assert sum(near) == instance.window_used <= instance.window_slots, (
            f"slots in layers with a window of instance {instance.id}"
        )
    for sequence_id, (master, _) in sequences.window_slots.items():
        sequence = sequences.by_id.get(sequence_id)
        in_use = sequence is not None and master.id in sequence.unfreed
        leaves = master.id in prefix.owing(master.gang, sequence_id)
        assert in_use or leaves, f"sequence {sequence_id} has slots in layers with a window"
    for sequence in sequences.by_id.values():
        if sequence.decode.window and sequence.master.id in sequence.unfreed:
            assert sequence.id in sequences.window_slots, (
                f"sequence {sequence.id} has no slots in layers with a window"
            )


def _check_prefix(
    gangs: Gangs,
    sequences: Sequences,
    steps: Steps,
    prefix: PrefixCache,
    restores: Restores,
) -> None:
    """Assert that references belong to sequences that read them, or may."""
    computed = (sequence for step in steps.by_id.values() for sequence in step.sequences)
    known = dict.fromkeys((*sequences.by_id.values(), *computed))
    for sequence in known:
        if sequence.decode_ref is not None:
            assert not sequence.in_place, "in-place sequence holds a second prefix-cache reference"
            assert gangs.lives(sequence.decode_ref.gang), "reference to a prefix of a dead gang"
            assert sequence.decode_ref.gang is sequence.decode, (
                "reference to a prefix on another gang"
            )
            assert sequence.unfreed, "reference to a prefix that nothing reads"
        if sequence.prefill_ref is not None:
            assert sequence.cached, "reference to an empty prefix"
            assert gangs.lives(sequence.prefill_ref.gang), "reference to a prefix of a dead gang"
            assert sequence.computing or (sequence.in_place and sequence.unfreed), (
                "reference to a prefix that nothing reads"
            )
    refs = [
        ref
        for sequence in known
        for ref in (sequence.prefill_ref, sequence.decode_ref)
        if ref is not None
    ]
    prefix.check([*refs, *restores.refs], gangs.instances.values())


def _check_steps(gangs: Gangs, steps: Steps) -> None:
    for step in steps.by_id.values():
        assert step.undone, f"step {step.id} is done but outstanding"
        assert gangs.lives(step.gang), f"step {step.id} of a dead gang"
    for step in steps.unsent.values():
        assert steps.by_id[step.id] is step, f"unsent step {step.id} is not outstanding"
        assert step.unsent, f"step {step.id} was sent and counts as unsent"
    for instance in gangs.instances.values():
        unsent = [step.unsent for step in instance.steps.values() if not step.high_priority]
        assert unsent == sorted(unsent), "a step was sent before one that was launched earlier"
        mine = [step for step in steps.by_id.values() if instance.id in step.undone]
        assert list(instance.steps.values()) == mine, f"outstanding steps of {instance.id}"
        assert instance.low_priority_steps == sum(not step.high_priority for step in mine), (
            f"low-priority steps of {instance.id}"
        )
        assert instance.high_priority_ns == sum(
            step.predicted_ns for step in mine if step.high_priority
        ), f"high-priority time of {instance.id}"


def _check_sequences(gangs: Gangs, requests: Requests, sequences: Sequences) -> None:
    everyone = list(sequences.by_id.values())
    for sequence in everyone:
        assert sequence.unfreed or not sequence.over, (
            f"sequence {sequence.id} is over and has no slots"
        )
        assert bool(sequence.unfreed) == (sequence.id in sequences.ledger), (
            f"slots of sequence {sequence.id}"
        )
        if sequence.piggybacked:
            assert not sequence.unreceived, (
                f"KV of piggybacked sequence {sequence.id} is transferred"
            )
            assert not sequence.computing, f"a step computes piggybacked sequence {sequence.id}"
        if not sequence.over:
            assert sequence.request.sequence is sequence, (
                f"request of sequence {sequence.id} has another one"
            )
            assert sequence.request.id in requests.live, (
                f"request of sequence {sequence.id} is over"
            )
            if sequence.request.front:
                assert sequence.retained_slices, f"front {sequence.id} is computed for nobody"
            assert gangs.lives(sequence.decode), f"sequence {sequence.id} on a dead gang"
    assert len(sequences.ledger) == sum(bool(sequence.unfreed) for sequence in everyone), (
        "ledger has slots of a sequence that is gone"
    )
    for gang in gangs.by_id.values():
        mastered = [
            sequence
            for sequence in everyone
            if sequence.master.gang is gang and sequence.master.id in sequence.unfreed
        ]
        assert gang.mastered == len(mastered), f"decoding sequences of gang {gang.id}"
        assert gang.mastered == sum(instance.mastered for instance in gang.instances), (
            f"sequences by master of gang {gang.id}"
        )


def _check_queue(requests: Requests) -> None:
    waiting = [request for request in requests.live.values() if request.waiting]
    assert requests.admission.waiting == len(waiting), "number of waiting requests"
    tokens = sum(request.prompt_tokens + request.output_tokens for request in waiting)
    assert requests.admission.waiting_tokens == tokens, "tokens of waiting requests"
    requests.admission.check_slots(requests.live.values())
    for request in requests.live.values():
        assert request.waiting == (request.sequence is None), (
            f"request {request.id} either waits or has a sequence"
        )
    for request in requests.blocked:
        assert request.waiting, f"blocked request {request.id} has started"
        assert requests.live.get(request.id) is request, f"blocked request {request.id} is over"
    requests.queue.check()
    for request in requests.queue.everyone():
        assert requests.live.get(request.id) is request, f"queued request {request.id} is over"
        assert request.waiting, f"queued request {request.id} runs"

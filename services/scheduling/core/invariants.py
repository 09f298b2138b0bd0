"""Invariants of the scheduler's state, which tests check after every round."""

from __future__ import annotations

from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.core.steps import Steps
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache


def check_invariants(
    gangs: Gangs, requests: Requests, sequences: Sequences, steps: Steps, prefix: PrefixCache
) -> None:
    """Assert that no slot, step, sequence, request or segment was lost."""
    _check_slots(gangs, sequences, steps, prefix)
    _check_prefix(gangs, sequences, steps, prefix)
    for request in requests.live.values():
        if request.waiting and not request.attempts:
            prefix.check_known(request)
    _check_steps(gangs, steps)
    _check_sequences(gangs, requests, sequences)
    _check_queue(requests)


def _check_slots(gangs: Gangs, sequences: Sequences, steps: Steps, prefix: PrefixCache) -> None:
    instances = list(gangs.instances.values())
    of_sequences, of_steps = sequences.ledger.sums(instances), steps.ledger.sums(instances)
    of_kept = prefix.ledger.sums(instances)
    for instance in instances:
        held = of_sequences[instance.id] + of_steps[instance.id] + of_kept[instance.id]
        assert held == instance.used, (
            f"entries of {instance.id} sum to {held}, counted {instance.used}"
        )
        assert 0 <= instance.used <= instance.capacity, f"instance {instance.id} is over capacity"


def _check_prefix(gangs: Gangs, sequences: Sequences, steps: Steps, prefix: PrefixCache) -> None:
    """Assert that references belong to sequences that read them, or may."""
    computed = (sequence for step in steps.by_id.values() for sequence in step.sequences)
    known = dict.fromkeys((*sequences.by_id.values(), *computed))
    for sequence in known:
        if sequence.decode_ref is not None:
            assert not sequence.in_place, "uses twice where it is computed"
            assert gangs.lives(sequence.decode_ref.gang), "uses what is gone"
            assert sequence.decode_ref.gang is sequence.decode, "uses what lies elsewhere"
            assert sequence.unfreed, "uses what it does not read"
        if sequence.prefill_ref is not None:
            assert sequence.cached, "uses nothing"
            assert gangs.lives(sequence.prefill_ref.gang), "uses what is gone"
            assert sequence.computing or (sequence.in_place and sequence.unfreed), (
                "uses what it does not read"
            )
    uses = [
        use
        for sequence in known
        for use in (sequence.prefill_ref, sequence.decode_ref)
        if use is not None
    ]
    prefix.check(uses, gangs.instances.values())


def _check_steps(gangs: Gangs, steps: Steps) -> None:
    for step in steps.by_id.values():
        assert step.undone, "done, but outstanding"
        assert gangs.lives(step.gang), "a step of a dead gang"
    for step in steps.unsent.values():
        assert steps.by_id[step.id] is step, "held, but over"
        assert step.unsent, "sent, but held"
    for instance in gangs.instances.values():
        held = [step.unsent for step in instance.steps.values() if not step.high_priority]
        assert held == sorted(held), "sent before one that was launched earlier"
        mine = [step for step in steps.by_id.values() if instance.id in step.undone]
        assert list(instance.steps.values()) == mine, f"steps of {instance.id}"
        assert instance.low_priority_steps == sum(not step.high_priority for step in mine), (
            "long steps"
        )
        assert instance.high_priority_ns == sum(
            step.predicted_ns for step in mine if step.high_priority
        ), "urgent"


def _check_sequences(gangs: Gangs, requests: Requests, sequences: Sequences) -> None:
    everyone = list(sequences.by_id.values())
    for sequence in everyone:
        assert sequence.unfreed or not sequence.over, "over and free, but kept"
        assert bool(sequence.unfreed) == (sequence.id in sequences.ledger), "slots of nobody"
        if sequence.piggybacked:
            assert not sequence.unreceived, "a rider whose KV is sent"
            assert not sequence.computing, "a rider that a step computes"
        if not sequence.over:
            assert sequence.request.sequence is sequence, "works for a request that has another"
            assert sequence.request.id in requests.live, "works for a request that is over"
            assert gangs.lives(sequence.decode), "decoded by a dead gang"
    assert len(sequences.ledger) == sum(bool(sequence.unfreed) for sequence in everyone), (
        "slots of nobody"
    )
    for gang in gangs.by_id.values():
        mastered = [
            sequence
            for sequence in everyone
            if sequence.master.gang is gang and sequence.master.id in sequence.unfreed
        ]
        assert gang.mastered == len(mastered), "size of a decode group"
        assert gang.mastered == sum(instance.mastered for instance in gang.instances), "masters"


def _check_queue(requests: Requests) -> None:
    waiting = [request for request in requests.live.values() if request.waiting]
    assert requests.admission.waiting == len(waiting), "length of the line"
    tokens = sum(request.prompt_tokens + request.output_tokens for request in waiting)
    assert requests.admission.waiting_tokens == tokens, "tokens of the line"
    for request in requests.live.values():
        assert request.waiting == (request.sequence is None), "neither waiting nor running"
    for request in requests.blocked:
        assert request.waiting, "blocked, but it has a place"
        assert requests.live.get(request.id) is request, "blocked, but over"
    for request in requests.queue.everyone():
        assert requests.live.get(request.id) is request, "waits, but is over"
        assert request.waiting, "waits and runs"

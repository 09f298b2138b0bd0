"""Reports that count once all ranks of an instance have sent theirs, against counts by rank."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.placement import KvSlice
from csps.protocols.core.topology import GroupShape
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    KvRestored,
    KvRetained,
    KvSaved,
    PrefillDone,
    SavedRun,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc.schema import pack
from csps.services.requests.request_handle import Timings
from csps.services.router.key_limits import KeyLimiter
from csps.services.router.live_requests import LiveRequests
from csps.services.router.live_sequences import LiveSequence, PendingRanks
from csps.services.router.rank_notifications import RankNotifications, RunningSteps
from csps.services.router.scheduler_driver import AttachedGangs
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import (
    AnyEvent,
    Restored,
    Retained,
    Saved,
    instance_id,
)
from csps.services.telemetry.observer import NullObserver, RequestObserver

GANG = 1
SEQUENCE = 7


class Ranks:
    """A gang of which only the arrangement of its ranks matters."""

    role = "prefill"

    def __init__(self, instances: int, tp: int) -> None:
        self.instances, self.tp = instances, tp
        self.world_size, self.locations = instances * tp, ["0"] * instances

    def ranks_of(self, instance: int) -> range:
        return range(instance * self.tp, (instance + 1) * self.tp)

    def instance_of(self, rank: int) -> int:
        return rank // self.tp


def gang_of(instances: int, tp: int) -> GangClient:
    return cast(GangClient, Ranks(instances, tp))


@given(instances=st.integers(1, 3), tp=st.integers(1, 3), data=st.data())
def test_an_instance_has_reported_with_its_last_rank(
    instances: int, tp: int, data: st.DataObject
) -> None:
    members = [instance_id(GANG, index) for index in range(instances)]
    pending, left = PendingRanks(gang_of(instances, tp), members), Counter(members * tp)
    for rank in data.draw(st.permutations(range(instances * tp))):
        instance = members[rank // tp]
        assert pending.awaits(instance, rank)
        left[instance] -= 1
        assert pending.reported(instance, rank) == (not left[instance])
        assert (instance in pending) == bool(left[instance])
        assert not pending.awaits(instance, rank)
        assert bool(pending) == bool(+left)
    assert not pending.reported(members[0], 0), "reported before"


@given(
    instances=st.integers(1, 3),
    tp=st.integers(1, 3),
    messages=st.integers(1, 4),
    data=st.data(),
)
def test_an_instance_answers_each_message_with_the_last_of_its_ranks(
    instances: int, tp: int, messages: int, data: st.DataObject
) -> None:
    """Ranks answer Retain and Evict in order, each at its own pace, and after they were sent."""
    gang, events = gang_of(instances, tp), list[AnyEvent]()
    reader = notifications(gang, events)
    sent, answers = 0, Counter[int]()
    while sent < messages or min(answers[rank] for rank in range(instances * tp)) < sent:
        behind = [rank for rank in range(instances * tp) if answers[rank] < sent]
        if not behind or (sent < messages and data.draw(st.booleans())):
            reader.expect_acks(GANG, gang, SEQUENCE)
            sent += 1
            continue
        rank = data.draw(st.sampled_from(behind))
        instance, members = instance_id(GANG, rank // tp), gang.ranks_of(rank // tp)
        least = min(answers[member] for member in members)
        answers[rank] += 1
        tokens = (messages - answers[rank]) * 10  # each message evicts ten of them
        before = len(events)
        answer(reader, gang, rank, tokens)
        found = [event for event in events[before:] if isinstance(event, Retained)]
        expected = Retained(sequence_id=SEQUENCE, instance=instance, tokens=tokens)
        completes = min(answers[member] for member in members) > least
        assert found == ([expected] if completes else [])
    count = len(events)
    answer(reader, gang, 0, 5)
    assert not [event for event in events[count:] if isinstance(event, Retained)], "not expected"


RUNS = tuple(
    SavedRun(start=64 * n, hashes=(b"%d" % n,), slices=(KvSlice(n % 2, 64 * n, 64 * n + 64),))
    for n in range(3)
)


class Watch(NullObserver):
    """Observer of files."""

    def __init__(self) -> None:
        self.saved, self.restored = list[int](), list[int | None]()

    def kv_saved(self, tokens: int) -> None:
        self.saved.append(tokens)

    def kv_restored(self, tokens: int | None, seconds: float) -> None:
        self.restored.append(tokens)


def test_an_instance_has_a_run_when_all_its_ranks_have_their_parts() -> None:
    gang, events, watch = gang_of(2, 2), list[AnyEvent](), Watch()
    reader = notifications(gang, events, watch)

    def say(rank: int, *runs: SavedRun, written: bool) -> None:
        saved = KvSaved(rank=rank, runs=runs, bytes_per_s=9, written=written)
        reader.read(gang, rank, "saved", pack(saved))

    say(0, *RUNS, written=False)
    say(3, RUNS[0], written=True)
    assert not events
    say(1, *RUNS[:2], written=False)
    first = instance_id(GANG, 0)
    assert events == [Saved(instance=first, runs=RUNS[:2], bytes_per_s=9)]
    say(1, RUNS[2], written=True)
    assert events[1:] == [Saved(instance=first, runs=RUNS[2:], bytes_per_s=9)]
    assert watch.saved == [64], "what was listed was not written"


def test_an_instance_has_listed_its_files_when_all_its_ranks_have() -> None:
    gang, events = gang_of(2, 2), list[AnyEvent]()
    reader = notifications(gang, events)
    for rank, runs, listed in ((2, RUNS[:1], False), (2, (), True), (0, (), True), (3, RUNS, True)):
        assert not [event for event in events if event.listed]  # type: ignore[union-attr]
        saved = KvSaved(rank=rank, runs=runs, bytes_per_s=9, written=False, listed=listed)
        reader.read(gang, rank, "saved", pack(saved))
    second = instance_id(GANG, 1)
    assert events == [Saved(instance=second, runs=RUNS[:1], bytes_per_s=9, listed=True)]


@pytest.mark.parametrize("failed", [None, 0, 1])
def test_an_instance_has_read_what_all_its_ranks_have(failed: int | None) -> None:
    gang, events, watch = gang_of(2, 2), list[AnyEvent](), Watch()
    reader = notifications(gang, events, watch)
    for expected in (False, True):
        if expected:
            reader.expect_restored(GANG, gang, SEQUENCE)
        for rank in range(4):
            tokens = -1 if rank == failed else 32
            restored = KvRestored(sequence_id=SEQUENCE, rank=rank, tokens=tokens, seconds=0.1)
            reader.read(gang, rank, "restored", pack(restored))
        assert bool(events) == expected
    read = [32 if failed is None else -1, 32]
    assert events == [
        Restored(sequence_id=SEQUENCE, instance=instance_id(GANG, index), tokens=tokens)
        for index, tokens in enumerate(read)
    ]
    assert watch.restored == [64 if failed is None else None]


def test_steps_say_how_long_a_request_took_and_not_its_front() -> None:
    gang, waiting, started = gang_of(1, 1), Timings(), Timings()
    requests = LiveRequests(NullObserver(), lambda _: None, KeyLimiter())
    steps = RunningSteps(
        lambda *_: None, lambda _: None, NullObserver(), requests, lambda _event: None
    )
    sequences = [
        SimpleNamespace(
            id=number, front=front, handle=SimpleNamespace(timings=timings, sequence_id=0)
        )
        for number, (front, timings) in enumerate([(True, waiting), (False, started)])
    ]
    for sequence in sequences:
        sequence.handle.prefilled_up_to = lambda _tokens: None
        sequence.handle.prompt_logprobs = None
    chunks = tuple(
        PrefillChunk(sequence_id=number, start=0, length=64, last=False, decoded=False)
        for number in range(2)
    )
    step = PrefillStep(step_id=1, group=(instance_id(GANG, 0),), bounds=(0, 128), chunks=chunks)
    steps.launched(
        RunStep(step=step, cls="exact", ends_ns=0),
        gang,
        cast(list[LiveSequence], sequences),
        GroupShape((1,)),
    )
    done = PrefillDone(
        step_id=1,
        rank=0,
        cancelled=False,
        queue_s=1.0,
        compute_s=2.0,
        communication_s=0.0,
        transfer_s=0.0,
        yielded_s=0.0,
    )
    steps.rank_done(done, instance_id(GANG, 0))
    assert (started.rank_queue_s, started.compute_s) == (1.0, 2.0)
    assert waiting == Timings()


def notifications(
    gang: GangClient, events: list[AnyEvent], observer: RequestObserver | None = None
) -> RankNotifications:
    gangs = AttachedGangs()
    assert gangs.add(gang) == GANG
    requests = LiveRequests(NullObserver(), events.append, KeyLimiter())
    no_steps = cast(RunningSteps, None)
    return RankNotifications(
        gangs,
        requests,
        no_steps,
        events.append,
        observer or NullObserver(),
        on_received=lambda _: None,
        on_link_broken=lambda _gang, _message: None,
        on_bug=fail,
    )


def fail(error: Exception) -> None:
    raise error


def answer(reader: RankNotifications, gang: GangClient, rank: int, tokens: int) -> None:
    """Answer as a rank does: one that retains nothing has freed the sequence."""
    if tokens:
        message: Any = KvRetained(sequence_id=SEQUENCE, rank=rank, tokens=tokens)
        reader.read(gang, rank, "retained", pack(message))
    else:
        reader.read(gang, rank, "freed", pack(SlotsFreed(sequence_id=SEQUENCE, rank=rank)))

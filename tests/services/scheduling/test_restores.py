"""KV that files have of a prompt: what is written, when it is read, and what follows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from scheduler_harness import MS, SECOND, SchedulerHarness, Sent, messages, only, sent

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.core.placement import KvSlice, tokens_on
from csps.protocols.gang.messages import EvictKv, RestoreKv, SavedRun, SaveKv
from csps.services.scheduling.core.decision_log import (
    DecisionLogHeader,
    LogWriter,
    command_bytes,
    replay,
)
from csps.services.scheduling.core.restores import LISTING_NS, OVERHEAD_NS
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import gang_of, instance_id
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state import saved_runs

BLOCK = 32
TOKEN_BYTES = 1_000
FAST = 1_000_000_000
REUSE = ReuseSettings(enabled=True, max_share=1.0, block_tokens=BLOCK, files_bytes=1 << 30)
OPTIONS = {"sp": 2, "spread_tokens": 200}


def hashes(blocks: int, text: bytes = b"") -> tuple[bytes, ...]:
    """Return the hashes of the same text in each test."""
    return tuple(b"%s%d" % (text, block) for block in range(blocks))


class Filing(SchedulerHarness):
    """A prefill gang of two instances whose files survive it, and a decode gang."""

    def __init__(
        self, reuse: ReuseSettings = REUSE, *, sp: int = 2, policy: Policy | None = None
    ) -> None:
        policy = policy or make_policy("fixed_sp", {**OPTIONS, "sp": sp})
        super().__init__(policy, reuse=reuse)
        self._gang = 0
        self.decode_gang = 1000
        self.turn(self.decode(self.decode_gang))
        self.bring_up()

    def bring_up(self, *runs: SavedRun, speed: int = FAST) -> list[cmd.AnyCommand]:
        """Bring a prefill gang up that has files of these runs; return what starts, at once or once
        it has listed them."""
        commands = self.bring_up_unlisted()
        return [*commands, *self.report(*runs, speed=speed, listed=True)]

    def bring_up_unlisted(self) -> list[cmd.AnyCommand]:
        """Bring a prefill gang up that has not listed its files; return what starts at once."""
        self._gang += 1
        up = self.prefill(self._gang, kv_bytes_per_token=TOKEN_BYTES)
        return self.turn(up, ev.LinkUp(prefill=self._gang, decode=self.decode_gang))

    def report(
        self, *runs: SavedRun, speed: int = FAST, listed: bool = False
    ) -> list[cmd.AnyCommand]:
        """Report runs as all instances do."""
        return self.turn(
            *(
                ev.Saved(instance=one, runs=runs, bytes_per_s=speed, listed=listed)
                for one in self.instances
            )
        )

    @property
    def instances(self) -> list[int]:
        return [instance_id(self._gang, index) for index in range(2)]

    def die(self) -> list[cmd.AnyCommand]:
        return self.turn(ev.GangDown(gang=self._gang, reason="killed"))

    def ask(self, blocks: int, prompt: int, text: bytes = b"") -> list[cmd.AnyCommand]:
        """Submit a request whose text begins with so many known blocks."""
        request = self.submit(prompt, 10)
        return self.turn(msgspec.structs.replace(request, hashes=hashes(blocks, text)))

    def end(self, plan: Sent) -> list[cmd.AnyCommand]:
        """Compute a request and decode it to its end; return what the end of its step leads to."""
        done = self.turn(*plan.joined())
        self.turn(plan.finished())
        return done

    def settle(self, message: EvictKv) -> None:
        """Let the prefill gang answer that nothing is left."""
        for one in self.instances:
            self.turn(ev.Retained(sequence_id=message.sequence_id, instance=one, tokens=0))

    def saved_by(self, blocks: int, prompt: int, text: bytes = b"") -> list[SavedRun]:
        """Compute a prompt and return the runs that are written."""
        commands = self.end(sent(self.ask(blocks, prompt, text)))
        return [message.run for message in to_files(commands, SaveKv)]

    def answer(self, message: RestoreKv, *, failed: int | None = None) -> list[cmd.AnyCommand]:
        """Answer a restore as all instances do, of which one may have failed."""
        tokens = tokens_on(message.slices)
        return self.turn(
            *(
                ev.Restored(
                    sequence_id=message.sequence_id,
                    instance=one,
                    tokens=-1 if index == failed else tokens.get(index, 0),
                )
                for index, one in enumerate(self.instances)
            )
        )


def to_files(commands: list[cmd.AnyCommand], kind: type[SaveKv] | type[RestoreKv]) -> list:  # type: ignore[type-arg]
    return [one.message for one in only(commands, cmd.ToFiles) if isinstance(one.message, kind)]


def restart(blocks: int = 10, prompt: int = 321, *, speed: int = FAST) -> Filing:
    """Return a gang that came up after one that has computed a prompt and died."""
    filing = Filing()
    runs = filing.saved_by(blocks, prompt)
    assert sum(len(run.hashes) for run in runs) == blocks
    filing.die()
    filing.bring_up(*runs, speed=speed)
    return filing


def test_what_is_retained_is_written_once() -> None:
    filing = Filing()
    (run,) = filing.saved_by(10, 330)
    assert (run.start, run.stop, run.hashes) == (0, 320, hashes(10))
    assert set(tokens_on(run.slices)) == {0, 1}
    filing.report(run)
    (behind,) = filing.saved_by(15, 500)
    assert (behind.start, behind.hashes) == (320, hashes(15)[10:])


def test_long_prompts_are_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_runs, "RUN_BLOCKS", 4)
    runs = Filing().saved_by(10, 330)
    assert [(run.start, run.stop) for run in runs] == [(0, 128), (128, 256), (256, 320)]


def test_nothing_is_written_unless_files_are_wanted() -> None:
    filing = Filing(replace(REUSE, files_bytes=0))
    assert not filing.saved_by(10, 330)


def test_a_turn_after_a_restart_waits_for_its_files_and_computes_the_rest() -> None:
    filing = restart()
    commands = filing.ask(12, 400)
    (message,) = to_files(commands, RestoreKv)
    assert not only(commands, cmd.Reserve)
    assert sorted(position for part in message.slices for position in part.span.positions) == list(
        range(320)
    )
    plan = sent(filing.answer(message))
    assert plan.reserve.cached == 320
    (chunk,) = plan.step.chunks
    assert (chunk.start, chunk.length) == (320, 80)
    assert {part.source for part in chunk.history} == {message.sequence_id}
    held = {gang_of(part.instance) for part in chunk.history}
    assert held == {gang_of(filing.instances[0])}


def test_last_token_of_a_prompt_is_computed_even_if_files_have_it() -> None:
    (message,) = to_files(restart(10, 320).ask(10, 320), RestoreKv)
    assert max(part.stop for part in message.slices) == 288


def test_what_was_read_serves_later_requests() -> None:
    filing = restart()
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    filing.end(sent(filing.answer(message)))
    plan = sent(filing.ask(12, 400))
    assert plan.reserve.cached >= 320


def test_a_request_that_came_before_its_gang_waits_for_the_list_of_its_files() -> None:
    filing = Filing()
    (run,) = filing.saved_by(10, 330)
    filing.die()
    assert not filing.ask(10, 330)
    assert not filing.bring_up_unlisted()
    assert sent(filing.turn(filing.submit(400, 10))).reserve.cached == 0, "it has no hashes"
    first, second = (
        ev.Saved(instance=one, runs=(run,), bytes_per_s=FAST, listed=True)
        for one in filing.instances
    )
    assert not filing.turn(first)
    (message,) = to_files(filing.turn(second), RestoreKv)
    assert sent(filing.answer(message)).reserve.cached == 320


def test_a_request_does_not_wait_for_a_list_that_does_not_come() -> None:
    filing = Filing()
    filing.die()
    filing.ask(10, 330)
    filing.bring_up_unlisted()
    began_ns = filing.now_ns
    assert sent(filing.wait()).reserve.cached == 0
    assert filing.now_ns - began_ns == LISTING_NS


@pytest.mark.parametrize("failed", [0, 1])
def test_a_request_computes_what_could_not_be_read(failed: int) -> None:
    filing = restart()
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    commands = filing.answer(message, failed=failed)
    plan = sent(commands)
    assert plan.reserve.cached == 0
    (evict,) = messages(commands, EvictKv)
    assert (evict.sequence_id, evict.start, evict.stop) == (message.sequence_id, 0, 320)
    filing.settle(evict)
    filing.turn(plan.finished(0))
    assert not to_files(filing.ask(12, 400), RestoreKv), "the files count as gone"


def test_a_request_waits_no_longer_than_it_would_compute() -> None:
    filing = restart()
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    asked_ns = filing.now_ns
    plan = sent(filing.wait())
    whole, rest = (Unmeasured().step(2, 1).predict_ns(330 - past, past) for past in (0, 320))
    assert filing.now_ns - asked_ns == whole - rest
    assert plan.reserve.cached == 0
    filing.answer(message)  # late, but not in vain
    filing.end(plan)
    assert sent(filing.ask(12, 400)).reserve.cached == 320


def test_what_is_computed_faster_is_not_read() -> None:
    whole, rest = (Unmeasured().step(2, 1).predict_ns(330 - past, past) for past in (0, 320))
    share = 160 * TOKEN_BYTES
    even = share * SECOND // (whole - rest - OVERHEAD_NS)
    assert to_files(restart(speed=even * 11 // 10).ask(10, 330), RestoreKv)
    assert sent(restart(speed=even * 9 // 10).ask(10, 330)).reserve.cached == 0


def test_a_slow_restore_makes_the_next_one_doubt() -> None:
    filing = restart()
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    before = filing.scheduler._prefix.saved[gang_of(filing.instances[0])].bytes_per_s
    filing.wait()
    filing.answer(message)
    after = filing.scheduler._prefix.saved[gang_of(filing.instances[0])].bytes_per_s
    assert after < before


def of_two_texts(*, faster: float) -> Filing:
    """Return a gang with files of two prompts, each read by so much faster than it is computed."""
    filing = Filing()
    runs = [*filing.saved_by(10, 330), *filing.saved_by(10, 330, b"other ")]
    filing.die()
    # Each instance reads half of the tokens.
    filing.bring_up(*runs, speed=int(like_computing(330, 320) * faster / 2))
    return filing


@pytest.mark.parametrize(("faster", "waits"), [(1.5, False), (3, True)])
def test_a_request_reads_behind_another_only_if_that_pays_off(
    faster: float, *, waits: bool
) -> None:
    filing = of_two_texts(faster=faster)
    assert to_files(filing.ask(10, 330), RestoreKv)
    commands = filing.ask(10, 330, b"other ")
    assert bool(to_files(commands, RestoreKv)) == waits
    assert bool(only(commands, cmd.Reserve)) != waits


def test_what_is_read_behind_another_does_not_say_that_reading_is_slow() -> None:
    filing = of_two_texts(faster=3)
    saved = filing.scheduler._prefix.saved[gang_of(filing.instances[0])]
    before = saved.bytes_per_s
    read_ns = 160 * TOKEN_BYTES * SECOND // before
    (first,) = to_files(filing.ask(10, 330), RestoreKv)
    (second,) = to_files(filing.ask(10, 330, b"other "), RestoreKv)
    for message in (first, second):
        filing.now_ns += read_ns - MS
        filing.answer(message)
    assert saved.bytes_per_s == pytest.approx(before, rel=0.1)


def test_a_run_counts_when_all_its_instances_have_reported() -> None:
    filing = Filing()
    runs = filing.saved_by(10, 330)
    filing.die()
    filing.bring_up()
    first, second = filing.instances
    filing.turn(ev.Saved(instance=first, runs=tuple(runs), bytes_per_s=FAST))
    plan = sent(filing.ask(10, 330))
    assert plan.reserve.cached == 0
    filing.turn(plan.finished(0), *plan.steps_done(), *plan.freed())
    filing.turn(ev.Saved(instance=second, runs=tuple(runs), bytes_per_s=FAST))
    assert filing.scheduler._prefix.saved[gang_of(first)]


def test_files_follow_what_is_cached() -> None:
    """Of what a gang has, only the beginning is still in its slots."""
    filing = restart()
    (message,) = to_files(filing.ask(4, 130), RestoreKv)
    assert max(part.stop for part in message.slices) == 128
    filing.end(sent(filing.answer(message)))
    (rest,) = to_files(filing.ask(12, 400), RestoreKv)
    assert min(part.start for part in rest.slices) == 128
    plan = sent(filing.answer(rest))
    assert plan.reserve.cached == 320
    sources = {part.source for part in plan.step.chunks[0].history}
    assert rest.sequence_id in sources


def like_computing(prompt: int, tokens: int) -> int:
    """Return the speed at which an instance reads so many tokens as fast as two compute them."""
    whole, rest = (Unmeasured().step(2, 1).predict_ns(prompt - past, past) for past in (0, tokens))
    return tokens * TOKEN_BYTES * SECOND // (whole - rest - OVERHEAD_NS)


class Halved:
    """A gang that computes the first half of a prompt and reads the second one. All lies on one
    instance."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        blocks: int = 10,
        faster: float = 1.0,
        policy: Policy | None = None,
    ) -> None:
        monkeypatch.setattr(saved_runs, "RUN_BLOCKS", blocks)
        self.filing = Filing(sp=1, policy=policy)
        self.runs = self.filing.saved_by(40, 1300)
        assert [run.start for run in self.runs] == list(range(0, 1280, blocks * BLOCK))
        self.filing.die()
        self.speed = int(like_computing(1300, 1280) * faster)
        self.bring_up()

    def bring_up(self) -> list[cmd.AnyCommand]:
        """Bring a gang up that has the prompt in files; return what starts."""
        return self.filing.bring_up(*self.runs, speed=self.speed)

    def ask(self) -> tuple[Sent, RestoreKv]:
        """Ask for the prompt; return the plan of its front, and what is read meanwhile."""
        commands = self.filing.ask(40, 1300)
        (read,) = to_files(commands, RestoreKv)
        return sent(commands), read


def test_a_front_is_computed_while_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    assert [(part.start, part.stop) for part in read.parts] == [(640, 960), (960, 1280)]
    (chunk,) = front.step.chunks
    assert (chunk.start, chunk.length, chunk.history) == (0, 640, ())
    assert (chunk.retain, chunk.last, chunk.decoded, chunk.destinations) == (True, False, False, ())
    assert (front.reserve.message.prompt_tokens, front.reserve.message.slices) == (640, ())


@pytest.mark.parametrize("front_first", [True, False])
def test_a_request_starts_behind_its_front_and_what_was_read(
    monkeypatch: pytest.MonkeyPatch, *, front_first: bool
) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    computed = partial(halved.filing.turn, *front.steps_done())
    answered = partial(halved.filing.answer, read)
    earlier, later = (computed, answered) if front_first else (answered, computed)
    assert not only(earlier(), cmd.Reserve)
    plan = sent(later())
    assert plan.request == front.request
    assert plan.reserve.cached == 1280
    (chunk,) = plan.step.chunks
    assert (chunk.start, chunk.length) == (1280, 20)
    by_source = {
        source: sum(part.tokens for part in chunk.history if part.source == source)
        for source in (front.sequence, read.sequence_id)
    }
    assert by_source == {front.sequence: 640, read.sequence_id: 640}
    assert chunk.last


def test_the_executor_is_told_of_the_end_of_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch)
    front, _ = halved.ask()
    (over,) = only(halved.filing.turn(*front.steps_done()), cmd.Cancel)
    assert over == cmd.Cancel(sequence_id=front.sequence, gangs=())


def test_what_was_read_behind_a_lost_front_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    halved.filing.turn(front.failed())
    commands = halved.filing.answer(read)
    assert sent(commands).reserve.cached == 0
    (evict,) = messages(commands, EvictKv)
    assert (evict.sequence_id, evict.start, evict.stop) == (read.sequence_id, 640, 1280)


def test_a_front_serves_its_request_if_the_rest_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    assert not only(halved.filing.answer(read, failed=1), cmd.Reserve), "its front is computed"
    plan = sent(halved.filing.turn(*front.steps_done()))
    assert plan.reserve.cached == 640


def test_what_is_read_or_computed_already_does_not_count_as_work_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    work_ns = Unmeasured().step(1, 1).predict_ns
    front, read = halved.ask()
    (request,) = halved.filing.scheduler._requests.live.values()
    assert request.work_ns == work_ns(20, 1280)
    halved.filing.turn(front.failed())
    assert sent(halved.filing.answer(read)).request == request.id
    assert request.work_ns == work_ns(1300, 0), "nothing was retained"


@pytest.mark.parametrize("late", [False, True])
def test_a_request_waits_behind_its_front_no_longer_than_it_would_compute(
    monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    until_ns = halved.filing.now_ns + 10 * SECOND
    if late:
        assert not only(halved.filing.wait(until_ns=until_ns), cmd.Reserve), "its front is computed"
        plan = sent(halved.filing.turn(*front.steps_done()))
    else:
        assert not only(halved.filing.turn(*front.steps_done()), cmd.Reserve), "the rest is read"
        plan = sent(halved.filing.wait(until_ns=until_ns))
    assert (plan.request, plan.reserve.cached) == (front.request, 640)
    halved.filing.answer(read)  # late, but not in vain
    halved.filing.end(plan)
    assert sent(halved.filing.ask(40, 1300)).reserve.cached == 1280


def test_younger_requests_are_not_bounded_by_one_that_waits_for_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    scheduler = halved.filing.scheduler
    halved.filing.die()
    halved.filing.ask(40, 1300)
    (request,) = scheduler._requests.live.values()
    scheduler._requests.note_blocked([request.id])
    front = sent(halved.bring_up())
    assert front.request == request.id
    assert request.blocked_ns is None, "its front has started"
    scheduler._requests.note_blocked([request.id])
    assert scheduler._requests.blocked == [request]
    assert not scheduler._view().blocked
    halved.filing.wait(until_ns=halved.filing.now_ns + 10 * SECOND)
    halved.filing.turn(*front.steps_done())
    assert request.sequence is not None


def test_a_lost_front_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch)
    front, _ = halved.ask()
    halved.filing.wait(until_ns=halved.filing.now_ns + 10 * SECOND)
    plan = sent(halved.filing.turn(front.failed()))
    assert (plan.reserve.cached, plan.reserve.message.prompt_tokens) == (0, 1300)


def test_no_front_behind_a_request_that_starts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch, faster=1.1)
    first = halved.filing.submit(700, 10)
    second = msgspec.structs.replace(halved.filing.submit(1300, 10), hashes=hashes(40))
    commands = halved.filing.turn(first, second)
    assert sent(commands).reserve.message.prompt_tokens == 700
    assert [read.parts[0].start for read in to_files(commands, RestoreKv)] == [0]


def test_a_front_ends_with_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    commands = halved.filing.turn(ev.RequestCancelled(request_id=front.request))
    (cancelled,) = only(commands, cmd.Cancel)
    assert cancelled == cmd.Cancel(
        sequence_id=front.sequence, gangs=(gang_of(halved.filing.instances[0]),)
    )
    (behind,) = messages(halved.filing.answer(read), EvictKv)
    (computed,) = messages(halved.filing.turn(*front.steps_done()), EvictKv)
    assert (behind.sequence_id, behind.start, behind.stop) == (read.sequence_id, 640, 1280)
    assert (computed.sequence_id, computed.start, computed.stop) == (front.sequence, 0, 640)
    for evict in (behind, computed):
        halved.filing.settle(evict)
    (again,) = to_files(halved.filing.ask(40, 1300), RestoreKv)
    assert (again.parts[0].start, again.parts[-1].stop) == (0, 1280)


def test_what_a_front_has_computed_stays_when_its_request_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    front, read = halved.ask()
    halved.filing.turn(*front.steps_done())
    halved.filing.turn(ev.RequestCancelled(request_id=front.request))
    halved.filing.answer(read)
    assert sent(halved.filing.ask(40, 1300)).reserve.cached == 1280


@pytest.mark.parametrize("lost", [False, True])
def test_tenants_are_charged_for_fronts_and_for_no_token_twice(
    monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    halved = Halved(monkeypatch)
    counters = halved.filing.scheduler._requests.queue._counters
    before = counters[0]
    front, read = halved.ask()
    assert counters[0] - before == 640
    halved.filing.turn(front.failed()) if lost else halved.filing.turn(*front.steps_done())
    plan = sent(halved.filing.answer(read))
    assert counters[0] - before == 1300
    if lost:
        halved.filing.turn(*front.steps_done())
    halved.filing.end(plan)
    assert counters[0] - before == 1300 + 2 * 10


def test_a_gang_that_dies_with_a_front_lets_its_request_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    front, _ = halved.ask()
    halved.filing.die()
    plan = sent(halved.filing.bring_up())
    assert (plan.request, plan.reserve.cached) == (front.request, 0)
    assert plan.reserve.message.prompt_tokens == 1300


def test_a_prompt_whose_front_kills_its_gang_kills_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    front, _ = halved.ask()
    halved.filing.die()
    commands = halved.bring_up()
    plan = sent(commands)
    assert (plan.request, plan.reserve.cached) == (front.request, 0)
    assert plan.reserve.message.prompt_tokens == 1300
    assert not to_files(commands, RestoreKv)
    (failed,) = only(halved.filing.die(), cmd.Fail)
    assert (failed.request_id, failed.error.code) == (front.request, "GangLost")


def test_a_prompt_that_kills_its_gang_behind_its_front_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch)
    front, _ = halved.ask()
    halved.filing.turn(*front.steps_done())
    halved.filing.die()
    commands = halved.bring_up()
    assert sent(commands).reserve.message.prompt_tokens == 1300
    assert not to_files(commands, RestoreKv)


def test_files_that_kill_two_gangs_are_not_read_by_a_third() -> None:
    filing = Filing()
    runs = filing.saved_by(10, 330)
    filing.die()
    filing.ask(10, 330)
    for _ in range(2):
        assert to_files(filing.bring_up(*runs), RestoreKv)
        filing.die()
    commands = filing.bring_up(*runs)
    assert not to_files(commands, RestoreKv)
    assert sent(commands).reserve.cached == 0


def test_a_busy_gang_reads_all_that_it_would_compute_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halved = Halved(monkeypatch, faster=1.1)
    other = halved.filing.turn(halved.filing.submit(700, 10))
    assert sent(other)
    commands = halved.filing.ask(40, 1300)
    assert [message.parts[0].start for message in to_files(commands, RestoreKv)] == [0]
    assert not only(commands, cmd.Reserve)


@pytest.mark.parametrize("faster", [0.7, 0.9, 1.0, 1.2, 1.5])
def test_a_front_ends_where_both_are_over_earliest(
    monkeypatch: pytest.MonkeyPatch, faster: float
) -> None:
    halved = Halved(monkeypatch, blocks=2, faster=faster)
    _, read = halved.ask()
    steps = [Unmeasured().step(size, 1) for size in (1, 2)]
    time_ns = {
        front: OVERHEAD_NS
        + max(
            (1280 - front) * TOKEN_BYTES * SECOND // halved.speed,
            min(step.predict_ns(front, 0) for step in steps),
        )
        for front in range(64, 1280, 64)
    }
    assert time_ns[read.parts[0].start] == min(time_ns.values())


@pytest.mark.parametrize(("short_tokens", "start"), [(500, 640), (700, 800), (1000, None)])
def test_a_front_waits_in_the_queue_of_its_request(
    monkeypatch: pytest.MonkeyPatch, short_tokens: int, start: int | None
) -> None:
    """A shorter prompt would have high priority."""
    policy = make_policy("csps", {"spt_tokens": 2000, "short_tokens": short_tokens})
    halved = Halved(monkeypatch, policy=policy, blocks=5)
    commands = halved.filing.ask(40, 1300)
    reads = to_files(commands, RestoreKv)
    assert [read.parts[0].start for read in reads] == ([] if start is None else [start])
    assert sent(commands).reserve.message.prompt_tokens == (start or 1300)


@pytest.mark.parametrize("faster", [0.1, 10])
def test_no_front_where_reading_or_computing_is_much_faster(
    monkeypatch: pytest.MonkeyPatch, faster: float
) -> None:
    commands = Halved(monkeypatch, faster=faster).filing.ask(40, 1300)
    if faster > 1:
        assert not only(commands, cmd.RunStep)
        assert to_files(commands, RestoreKv)[0].parts[0].start == 0
    else:
        assert sent(commands).reserve.message.prompt_tokens == 1300


def test_no_front_of_a_prompt_that_may_be_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Halved(monkeypatch)
    request = halved.filing.submit(1300, 10, cls="bounded?accuracy:0.01:None")
    commands = halved.filing.turn(msgspec.structs.replace(request, hashes=hashes(40)))
    assert all(reserve.message.prompt_tokens == 1300 for reserve in only(commands, cmd.Reserve))


def test_a_gang_that_dies_while_it_reads_lets_its_requests_go() -> None:
    filing = restart()
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    filing.die()
    assert not only(filing.turn(), cmd.Reserve)
    assert sent(filing.bring_up()).reserve.cached == 0
    filing.turn(
        ev.Restored(sequence_id=message.sequence_id, instance=filing.instances[0], tokens=1)
    )


def test_a_request_that_ends_while_files_are_read_leaves_them_to_others() -> None:
    filing = restart()
    commands = filing.ask(10, 330)
    (message,) = to_files(commands, RestoreKv)
    filing.turn(ev.RequestCancelled(request_id=2))
    filing.answer(message)
    assert sent(filing.ask(12, 400)).reserve.cached == 320


def test_a_silent_reader_is_reset() -> None:
    filing = restart()
    filing.ask(10, 330)
    commands = filing.wait(until_ns=filing.now_ns + 200 * SECOND)
    assert only(commands, cmd.ResetGang)


def test_files_beyond_the_share_for_cached_kv_are_not_read() -> None:
    filing = Filing(replace(REUSE, max_share=0.02))  # 80 of 4000 slots
    runs = filing.saved_by(10, 330)
    filing.die()
    filing.bring_up(*runs)
    assert sent(filing.ask(10, 330)).reserve.cached == 0


def test_a_retried_request_reads_no_files() -> None:
    filing = restart()
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    plan = sent(filing.answer(message))
    filing.turn(plan.failed(), *plan.freed(), *plan.steps_done())
    again = sent(filing.wait())
    assert again.reserve.cached == 0


def test_where_a_prompt_leaves_a_run_another_one_goes_on() -> None:
    """Both have the position behind; only one of them has this prompt's token there."""
    saved = saved_runs.SavedRuns(1, 32, most_blocks=40)
    first, second = instance_id(1, 0), instance_id(1, 1)
    one = SavedRun(start=0, hashes=(b"a", b"b", b"c"), slices=(KvSlice(0, 0, 96),))
    other = SavedRun(start=64, hashes=(b"C", b"D"), slices=(KvSlice(1, 64, 128),))
    saved.add(first, (one,), FAST)
    saved.add(second, (other,), FAST)
    found = saved.behind((b"a", b"b", b"C", b"D", b"E"), 1)
    assert found is not None
    assert [(part.name, part.start, part.stop) for part in found.parts] == [
        (one.name, 32, 64),
        (other.name, 64, 128),
    ]
    assert found.slices == (KvSlice(first, 32, 64), KvSlice(second, 64, 128))


def test_an_instance_without_files_does_not_say_that_reading_is_slow() -> None:
    saved = saved_runs.SavedRuns(1, 32, most_blocks=40)
    run = SavedRun(start=0, hashes=(b"a",), slices=(KvSlice(0, 0, 32),))
    saved.add(instance_id(1, 0), (run,), FAST)
    saved.add(instance_id(1, 1), (), 0)
    assert saved.bytes_per_s == FAST


def test_oldest_runs_are_forgotten_beyond_what_the_files_can_hold() -> None:
    runs = [SavedRun(start=0, hashes=(b"%d" % n,), slices=(KvSlice(0, 0, 32),)) for n in range(100)]
    saved = saved_runs.SavedRuns(1, 32, most_blocks=40)
    for run in runs:
        saved.add(instance_id(1, 0), (run,), FAST)
        assert len(saved) <= 40
    assert saved.behind((b"99",), 0) is not None
    assert saved.behind((b"0",), 0) is None
    assert len(saved._reported) <= 40


def test_a_log_with_files_is_replayed(tmp_path: Path) -> None:
    recorded: list[tuple[int, tuple[ev.AnyEvent, ...]]] = []
    commands: list[bytes] = []

    class Recorded(Filing):
        def turn(self, *events: ev.AnyEvent, after_ns: int = MS) -> list[cmd.AnyCommand]:
            found = super().turn(*events, after_ns=after_ns)
            recorded.append((self.now_ns, events))
            commands.append(command_bytes(found))
            return found

    filing = Recorded()
    runs = filing.saved_by(10, 330)
    filing.die()
    filing.bring_up(*runs)
    (message,) = to_files(filing.ask(10, 330), RestoreKv)
    filing.answer(message)
    path = tmp_path / "log"
    with path.open("wb") as file:
        header = DecisionLogHeader(
            policy="fixed_sp", policy_digest="", table_digest="", options=OPTIONS, reuse=REUSE
        )
        writer = LogWriter(file, header)
        for now_ns, events in recorded:
            writer.append(now_ns, events)
        writer.flush()

    def again(header: DecisionLogHeader) -> Scheduler:
        return Scheduler(
            make_policy(header.policy, header.options),
            Costs(CostTable(latencies=Unmeasured())),
            reuse=header.reuse,
        )

    assert replay(path, again) == b"".join(commands)

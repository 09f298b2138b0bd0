"""The total order of jobs, and the urgent ones that may leave it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from csps.actors import job_queue
from csps.actors.job_queue import JobQueue
from csps.protocols.errors import DeadlineExceeded
from csps.protocols.messages import PrefillJob, PrefillPiece

JOIN_S = 10.0


def job(
    job_id: int, group: tuple[int, ...] = (0, 1), *, rid: int = 0, urgent: bool = False
) -> PrefillJob:
    piece = PrefillPiece(rid=rid or job_id, start=0, length=1)
    return PrefillJob(job_id=job_id, group=group, bounds=(0, 1, 1), pieces=(piece,), urgent=urgent)


def inside(running: PrefillJob) -> Callable[[PrefillJob], bool]:
    """Whether all members of a job are members of the running one."""
    return lambda job: set(running.group).issuperset(job.group)


def next_id(queue: JobQueue) -> int:
    it = queue.next()
    assert it is not None
    return it.job_id


@pytest.fixture
def queue() -> JobQueue:
    return JobQueue()


def answers_of(body: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """What a function that waits returns or raises."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(body())
        except DeadlineExceeded as exc:
            answers.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, answers


def test_jobs_leave_in_the_order_they_came(queue: JobQueue) -> None:
    for job_id in (3, 4, 7):
        queue.put(job(job_id))
    assert [next_id(queue) for _ in range(3)] == [3, 4, 7]


def test_next_waits_for_a_job(queue: JobQueue) -> None:
    thread, answers = answers_of(queue.next)
    it = job(1)
    queue.put(it)
    thread.join(JOIN_S)
    assert answers == [it]


def test_closing_ends_whoever_waits(queue: JobQueue) -> None:
    waiting = [answers_of(queue.next), answers_of(lambda: queue.take(5))]
    queue.close()
    for thread, answers in waiting:
        thread.join(JOIN_S)
        assert answers == [None]
    queue.put(job(1))
    assert queue.next() is None


def test_an_urgent_job_is_taken_once_and_never_again(queue: JobQueue) -> None:
    queue.put(job(1))
    queue.put(job(2))
    queue.put(job(3, urgent=True))
    assert next_id(queue) == 1
    taken = queue.take(3)
    assert taken is not None
    assert taken.job_id == 3
    assert queue.take(3) is None  # the leader of another group named it as well
    assert next_id(queue) == 2
    assert queue.take(3) is None
    queue.put(job(4))
    assert next_id(queue) == 4
    assert len(queue) == 0


def test_taking_waits_until_the_job_arrives_here_too(queue: JobQueue) -> None:
    thread, answers = answers_of(lambda: queue.take(2))
    queue.put(job(1))
    it = job(2, urgent=True)
    queue.put(it)
    thread.join(JOIN_S)
    assert answers == [it]
    assert next_id(queue) == 1


def test_a_job_that_never_arrives_is_an_error(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "JOB_ARRIVAL_S", 0.01)
    with pytest.raises(DeadlineExceeded, match="urgent job 9"):
        queue.take(9)


def test_only_urgent_jobs_that_may_run_now_are_named(queue: JobQueue) -> None:
    running = job(1, (0, 1, 2))
    queue.put(job(2, (0, 1)))
    queue.put(job(3, (1, 2), urgent=True))
    queue.put(job(4, (2, 3), urgent=True))
    queue.put(job(5, (2,), urgent=True))
    assert queue.urgent_within(running, inside(running), 6) == [3, 5]
    assert queue.urgent_within(running, inside(running), 1) == [3]
    assert queue.urgent_within(running, lambda job: job.group == (2,), 6) == [5]


def test_a_chunk_never_overtakes_an_earlier_one_of_its_prompt(queue: JobQueue) -> None:
    running = job(1, rid=7)
    queue.put(job(2, rid=8))
    queue.put(job(3, rid=7, urgent=True))
    queue.put(job(4, rid=8, urgent=True))
    queue.put(job(5, rid=9, urgent=True))
    queue.put(job(6, rid=9, urgent=True))
    assert queue.urgent_within(running, inside(running), 6) == [5, 6]


def test_waiting_for_an_urgent_job_ends_with_one_or_when_it_is_over(queue: JobQueue) -> None:
    running, met, roomy = job(1), threading.Event(), threading.Event()

    def wait() -> list[int]:
        return queue.urgent_until(met.is_set, running, lambda _: roomy.is_set())

    thread, answers = answers_of(wait)
    queue.put(job(2))
    queue.put(job(3, urgent=True))
    roomy.set()
    queue.look_again()
    thread.join(JOIN_S)
    assert answers == [[3]]
    met.set()
    assert wait() == []

    met.clear()
    roomy.clear()
    thread, answers = answers_of(wait)
    met.set()
    queue.look_again()
    thread.join(JOIN_S)
    assert answers == [[]]

"""Carrying out the policy's decisions on the ranks, and keeping the books of what they hold."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from csps.protocols.errors import (
    ConnectionLost,
    CspsError,
    DeadlineExceeded,
    GangLost,
    ProtocolError,
    TransferError,
)
from csps.protocols.errors import from_wire as error_from_wire
from csps.protocols.gang_client import GangClient
from csps.protocols.gang_members import GangRole
from csps.protocols.messages import (
    CancelRequest,
    JoinBatch,
    KvLanded,
    PrefillDone,
    PrefillProgress,
    RequestFailed,
    SlotsFreed,
    TokenDrawn,
    Tokens,
)
from csps.protocols.schema import pack, unpack
from csps.services.attempts import Attempt, Job, new_attempt
from csps.services.cluster import KvLink
from csps.services.job_messages import csa_plan, prefill_messages, reserve_message
from csps.services.running import Placement, Running
from csps.services.scheduling.decode_load import DecodeLoad
from csps.services.scheduling.policy import JobDecision
from csps.services.scheduling.prefill_load import PrefillLoad
from csps.services.scheduling.state import ClusterState, WaitingRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExecutionDeadlines:
    """Seconds."""

    reserve_s: float = 10.0
    """For a decode rank to set slots aside."""
    landing_s: float = 60.0
    """From a request's first token until all of its KV has landed."""
    prefill_progress_s: float = 180.0
    """Silence of the instances that a prefill job runs on, and of those that they wait for: longer
    than any of them computes between two words, which is a part of a layer."""
    decode_progress_s: float = 120.0
    """Silence of a decode gang that owes a token."""


class ExecutionListener(Protocol):
    """What carrying out leads to, on the event loop."""

    def launched(self, running: Running) -> None:
        """The request's prefill job was sent."""

    def drawn(self, running: Running, token: TokenDrawn) -> None:
        """The next token; with a `finish_reason`, the last."""

    def handed_over(self, running: Running) -> None:
        """All KV has landed, decode goes on from here."""

    def prefilled(self, running: Running, figures: Sequence[PrefillDone]) -> None:
        """Every rank of the prefill group is done."""

    def attempt_failed(self, running: Running, error: Exception) -> None:
        """The attempt is over without a whole answer; what it held is on its way back."""

    def room_made(self) -> None:
        """Slots came back, or an instance finished a job."""


class Execution:
    """Attempts and jobs on the current pair of gangs.

    One sequencer: `_launch` numbers a job and sends it to every rank of the gang without giving
    the event loop away in between, so all ranks see all jobs in one order. That is what keeps
    jobs on overlapping groups from waiting for each other.
    """

    def __init__(self, listener: ExecutionListener, deadlines: ExecutionDeadlines) -> None:
        self._listener, self._deadlines = listener, deadlines
        self._link: KvLink | None = None
        self._gangs: dict[GangRole, GangClient] = {}
        self.prefill_load: PrefillLoad | None = None
        self.decode_load: DecodeLoad | None = None
        self._attempts: dict[int, Attempt] = {}
        self._serving: dict[int, Attempt] = {}
        """The attempts that are not over, by their request's number."""
        self._jobs: dict[int, Job] = {}
        self._prefill_heard: dict[int, float] = {}
        """`time.monotonic()` of the last word of each prefill instance's progress."""
        # Microseconds since 1970 to begin with: ranks remember what a former router has cancelled,
        # and its numbers must not come up again.
        first = time.time_ns() // 1_000
        self._rids, self._job_ids, self._tickets = (itertools.count(first) for _ in range(3))
        self._tasks: set[asyncio.Task[None]] = set()
        self.fault: BaseException | None = None
        """A mistake of ours in the background, for health checks."""
        self._handlers: dict[str, Callable[[int, Any], None]] = {
            "prefill_progress": self._prefill_progress,
            "prefill_done": self._prefill_done,
            "landed": self._landed,
            "freed": self._freed,
            "failed": self._failed,
        }

    # --- the pair of gangs ---

    def link_up(self, link: KvLink) -> None:
        """Both gangs are ready; one that was there before has kept what it holds."""
        self._link = link
        if self._gangs.get("prefill") is not link.prefill:
            gang = self._gangs["prefill"] = link.prefill
            self.prefill_load = PrefillLoad(gang.capacities, gang.locations)
        if self._gangs.get("decode") is not link.decode:
            gang = self._gangs["decode"] = link.decode
            self.decode_load = DecodeLoad(gang.capacities, gang.locations)

    def link_down(self, link: KvLink, reason: str) -> None:
        """Both gangs live: what decodes goes on, all else has no way to get there."""
        self._link = None
        error = TransferError(f"the KV-transfer connection broke: {reason}")
        for attempt in list(self._serving.values()):
            if attempt.joined_at is None:
                self._fail(attempt, error)

    def gang_down(self, gang: GangClient, reason: str) -> None:
        """Forget what the gang held; every attempt that still needs it has failed."""
        self._link = None
        if self._gangs.get(gang.role) is not gang:
            return  # it was never linked
        del self._gangs[gang.role]
        if gang.role == "prefill":
            self.prefill_load = None
            self._jobs.clear()
            self._prefill_heard.clear()
        else:
            self.decode_load = None
        error = GangLost(f"the {gang.role} gang was lost: {reason}")
        for attempt in list(self._attempts.values()):
            self._attempt_lost_gang(attempt, gang, error)

    def _attempt_lost_gang(self, attempt: Attempt, gang: GangClient, error: GangLost) -> None:
        if gang.role == "decode":
            attempt.unfreed.clear()
        needed = gang.role == "decode" or attempt.joined_at is None
        if needed and not attempt.over:
            self._fail(attempt, error)
        self._settle(attempt)

    def picture(self, waiting: tuple[WaitingRequest, ...]) -> ClusterState | None:
        """What the policy decides on; None while the gangs are not linked."""
        if self._link is None or self.prefill_load is None or self.decode_load is None:
            return None
        return ClusterState(
            waiting=waiting,
            prefill=self.prefill_load.snapshot(),
            decode=self.decode_load.snapshot(),
        )

    # --- starting ---

    def start(self, decision: JobDecision, members: Sequence[Running]) -> None:
        """Count the slots as taken, then reserve and launch in the background."""
        assert self._link is not None, "decided without a link"
        assert self.prefill_load is not None
        assert self.decode_load is not None
        ticket = next(self._tickets)
        self.prefill_load.start(ticket, decision)
        attempts = []
        for member, running in zip(decision.members, members, strict=True):
            attempt = new_attempt(next(self._rids), running, self._link, member.placement)
            self.decode_load.reserve(attempt.rid, member.placement)
            self._attempts[attempt.rid] = self._serving[running.number] = attempt
            running.placement = _shown(decision, attempt)
            attempts.append(attempt)
        job = Job(ticket=ticket, decision=decision, link=self._link, attempts=attempts)
        self._in_background(self._reserve_and_launch(job))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("starting a job failed", exc_info=error)
            self.fault = error

    async def _reserve_and_launch(self, job: Job) -> None:
        """A job is sent only when its KV has a place to go: ranks never wait for slots."""
        await asyncio.gather(*map(self._reserve, job.attempts))
        if job.link.prefill.lost.done():
            return
        assert self.prefill_load is not None
        if withdrawn := [attempt for attempt in job.attempts if attempt.over]:
            for attempt in withdrawn:
                job.leave(attempt)
            self.prefill_load.shrink(job.ticket, job.decision if job.attempts else None)
            self._listener.room_made()
        if job.attempts:
            self._launch(job)

    async def _reserve(self, attempt: Attempt) -> None:
        decode, message = attempt.link.decode, reserve_message(attempt)
        answers = await asyncio.gather(
            *(
                decode.call(rank, "reserve", message, deadline_s=self._deadlines.reserve_s)
                for rank in range(decode.world_size)
            ),
            return_exceptions=True,
        )
        attempt.reserved = True
        errors = {rank: it for rank, it in enumerate(answers) if isinstance(it, Exception)}
        for rank, error in errors.items():
            if not isinstance(error, DeadlineExceeded | ConnectionLost):
                self._give_back(attempt, rank)  # it refused, so it holds nothing
        if attempt.over:
            self._cancel_at_decode(attempt)  # what was withdrawn meanwhile
            self._settle(attempt)
        elif errors:
            self._fail(attempt, next(iter(errors.values())))

    def _launch(self, job: Job) -> None:
        """The sequencer. Nothing in here may await."""
        job_id = next(self._job_ids)
        self._jobs[job_id] = job
        csa = csa_plan(job)
        for rank, message in enumerate(prefill_messages(job, job_id, csa)):
            job.link.prefill.notify(rank, "prefill", message)
        job.launched()
        for attempt in job.attempts:
            attempt.launched = True
            attempt.running.csa = csa
            self._listener.launched(attempt.running)

    # --- ending ---

    def withdraw(self, running: Running) -> None:
        """Stop working for the request, if any work has begun."""
        if (attempt := self._serving.get(running.number)) is not None:
            self._withdraw(attempt)

    def _withdraw(self, attempt: Attempt) -> None:
        self._over(attempt)
        if attempt.launched:
            attempt.link.prefill.notify_all("cancel", pack(CancelRequest(rid=attempt.rid)))
        if attempt.reserved:
            self._cancel_at_decode(attempt)
        self._settle(attempt)

    def _cancel_at_decode(self, attempt: Attempt) -> None:
        attempt.owed_since = attempt.owed_since or time.monotonic()
        attempt.link.decode.notify_all("cancel", pack(CancelRequest(rid=attempt.rid)))

    def _fail(self, attempt: Attempt, error: Exception) -> None:
        self._withdraw(attempt)
        self._listener.attempt_failed(attempt.running, error)

    def _complete(self, attempt: Attempt) -> None:
        """The last token was drawn: decode frees what it decoded, not what never joined."""
        self._over(attempt)
        if attempt.joined_at is None:
            self._cancel_at_decode(attempt)
        self._settle(attempt)

    def _over(self, attempt: Attempt) -> None:
        attempt.over = True
        del self._serving[attempt.running.number]

    def _settle(self, attempt: Attempt) -> None:
        if attempt.over and not attempt.unfreed:
            self._attempts.pop(attempt.rid, None)

    # --- what ranks tell ---

    def notified(self, rank: int, method: str, payload: Any) -> None:
        """A notification from a rank of the current gangs."""
        if method == "tokens":  # thousands a second: before everything else
            for token in unpack(Tokens, payload).each():
                self._token(token)
        elif (handler := self._handlers.get(method)) is not None:
            handler(rank, payload)
        else:
            raise ProtocolError(f"rank {rank} sent {method}, which a router does not know")

    def _token(self, token: TokenDrawn) -> None:
        attempt = self._attempts.get(token.rid)
        if attempt is None or attempt.over:
            return
        if token.index != attempt.next_index:
            error = f"token {token.index} arrived where {attempt.next_index} was due"
            self._fail(attempt, ProtocolError(error))
            return
        attempt.next_index += 1
        if token.finish_reason is not None:
            self._complete(attempt)
        self._listener.drawn(attempt.running, token)
        if token.index == 0 and not attempt.over:
            attempt.first_token, attempt.first_token_at = token.token, time.monotonic()
            self._join_if_landed(attempt)

    def _landed(self, rank: int, payload: Any) -> None:
        message = unpack(KvLanded, payload)
        attempt = self._attempts.get(message.rid)
        if attempt is None or attempt.over:
            return
        expected = attempt.unlanded.pop(rank, None)
        if message.tokens != expected:
            error = f"KV of {message.tokens} tokens landed at decode rank {rank}, not {expected}"
            self._fail(attempt, ProtocolError(error))
            return
        self._join_if_landed(attempt)

    def _join_if_landed(self, attempt: Attempt) -> None:
        if attempt.unlanded or attempt.first_token_at is None:
            return
        attempt.joined_at = attempt.owed_since = time.monotonic()
        message = JoinBatch(rid=attempt.rid, first_token=attempt.first_token)
        attempt.link.decode.notify(0, "join", pack(message))
        self._listener.handed_over(attempt.running)

    def _prefill_progress(self, rank: int, payload: Any) -> None:
        unpack(PrefillProgress, payload)
        self._hear_prefill(rank)

    def _hear_prefill(self, rank: int) -> None:
        """Also of a gang that is not linked yet: it may still end a former router's jobs."""
        if (gang := self._gangs.get("prefill")) is not None:
            self._prefill_heard[gang.instance_of(rank)] = time.monotonic()

    def _prefill_done(self, rank: int, payload: Any) -> None:
        message = unpack(PrefillDone, payload)
        job = self._jobs.get(message.job_id)
        if job is None or self.prefill_load is None:
            return
        self._hear_prefill(rank)
        job.figures.append(message)
        instance = job.link.prefill.instance_of(rank)
        if job.rank_done(rank, instance):
            self.prefill_load.done(job.ticket, instance)
            self._listener.room_made()
        if not job.undone:
            del self._jobs[message.job_id]
            self._job_done(job)

    def _job_done(self, job: Job) -> None:
        for attempt in job.attempts:
            self._listener.prefilled(attempt.running, job.figures)
            if not attempt.over and attempt.first_token_at is None:
                # The rank that draws says so before it reports, so no token is on its way.
                self._fail(attempt, ProtocolError("a prefill job ended without its first token"))

    def _freed(self, rank: int, payload: Any) -> None:
        message = unpack(SlotsFreed, payload)
        if (attempt := self._attempts.get(message.rid)) is not None:
            self._give_back(attempt, rank)
            self._settle(attempt)

    def _give_back(self, attempt: Attempt, rank: int) -> None:
        """A decode rank holds nothing of the attempt; its instance, once all its ranks say so."""
        attempt.unfreed.discard(rank)
        decode = attempt.link.decode
        instance = decode.instance_of(rank)
        if attempt.unfreed.isdisjoint(decode.ranks_of(instance)) and self.decode_load is not None:
            self.decode_load.freed(attempt.rid, instance)
            self._listener.room_made()

    def _failed(self, rank: int, payload: Any) -> None:
        message = unpack(RequestFailed, payload)
        attempt = self._attempts.get(message.rid)
        if attempt is not None and not attempt.over:
            self._fail(attempt, _error_of(message))

    # --- deadlines ---

    def check_deadlines(self, now: float) -> Iterable[tuple[GangRole, str]]:
        """Fail attempts whose KV does not land; returns gangs that owe something and are silent."""
        for attempt in list(self._serving.values()):
            since = attempt.first_token_at
            if since is not None and attempt.unlanded and now - since > self._deadlines.landing_s:
                self._fail(attempt, DeadlineExceeded("KV landing", self._deadlines.landing_s))
        silent: dict[GangRole, tuple[float, float]] = {
            "prefill": (self._prefill_silence(now), self._deadlines.prefill_progress_s),
            "decode": (self._decode_silence(now), self._deadlines.decode_progress_s),
        }
        for role, (silent_s, limit_s) in silent.items():
            if silent_s > limit_s:
                yield role, f"the {role} gang owes an answer and was silent for {silent_s:.0f} s"

    def _prefill_silence(self, now: float) -> float:
        """Of the job that was not heard of for longest: others may go on beside one that hangs.

        A job in line makes no progress, and neither does an instance that waits in one for the
        job's other members. A word of an instance is therefore one for every job that has it still
        to come, and through their other instances for the jobs behind those.
        """
        heard, since = dict(self._prefill_heard), now
        for job in self._jobs.values():  # in the order of their launch, which is that of the ranks
            latest = max([job.launched_at, *(heard.get(it, 0.0) for it in job.undone)])
            heard.update(dict.fromkeys(job.undone, latest))
            since = min(since, latest)
        return now - since

    def _decode_silence(self, now: float) -> float:
        owed = [it.owed_since for it in self._attempts.values() if it.owed_since is not None]
        if not owed or (gang := self._gangs.get("decode")) is None:
            return 0.0
        return now - max(gang.last_heard, min(owed))

    async def close(self) -> None:
        """Stop what goes on in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_integrity(self) -> None:
        """Assert that the books agree with themselves."""
        for load in (self.prefill_load, self.decode_load):
            if load is not None:
                load.ledger.check_integrity()
        assert all(not attempt.over for attempt in self._serving.values()), "over, but serving"
        if self.decode_load is not None:
            assert self.decode_load.ledger.owners <= set(self._attempts), "slots of nobody"


def _error_of(failed: RequestFailed) -> CspsError:
    wire: dict[str, Any] = {"code": failed.code, "message": failed.message}
    if failed.param is not None:
        wire["data"] = {"message": failed.message, "param": failed.param}
    return error_from_wire(wire)


def _shown(decision: JobDecision, attempt: Attempt) -> Placement:
    return Placement(
        group=decision.group,
        bounds=decision.bounds,
        shares=attempt.placement.shares,
        master=attempt.placement.master,
        batched_with=len(decision.members) - 1,
    )

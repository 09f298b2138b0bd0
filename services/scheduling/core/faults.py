"""Faults: retries of sequences that cannot go on, and liveness of gangs."""

from __future__ import annotations

import logging

from csps.protocols.core.errors import CspsError, DeadlineExceeded, GangLost
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.core.sequences import Sequences
from csps.services.scheduling.core.steps import Steps
from csps.services.scheduling.events.commands import Restart
from csps.services.scheduling.events.events import GangId, InstanceId, SequenceId, WireError
from csps.services.scheduling.events.limits import SECOND_NS, QueueLimits, SchedulerDeadlines
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.state import Gang, Request, Round, Sequence, wire_error

_log = logging.getLogger(__name__)

MAX_LONE_LOSSES = 2
"""Gangs that may die with one request alone in them: it may be what kills them."""


class Retries:
    """Puts requests back into their queue after a fault of the cluster. Generated tokens stay: the
    next attempt computes prompt and delivered tokens and goes on from there."""

    def __init__(
        self,
        this_round: Round,
        requests: Requests,
        sequences: Sequences,
        limits: QueueLimits,
        deadlines: SchedulerDeadlines,
    ) -> None:
        self._round, self._requests, self._sequences = this_round, requests, sequences
        self._limits, self._deadlines = limits, deadlines

    def failed(
        self, sequence: Sequence, error: WireError, *, retryable: bool = True, pause: bool = True
    ) -> None:
        """End a sequence without its whole answer.

        Args:
            sequence: still serves its request.
            error: for the client, if this was the last attempt.
            retryable: the cluster is at fault and not the request.
            pause: the gangs live on, as far as is known.
        """
        request = sequence.request
        self._sequences.close(sequence)
        if request.front:
            return  # its request waits anyway
        request.sequence = None
        if request.output_tokens <= 0:
            self._requests.end(request)  # all of its tokens were delivered
        elif retryable and self._may_retry(request):
            _log.info(
                "retrying request %d after attempt %d (sequence %d) failed: %s",
                request.id,
                request.attempts,
                sequence.id,
                error.message,
            )
            self._round.emit(Restart(request_id=request.id, sequence_id=sequence.id, error=error))
            self._wait_again(request, self._deadlines.retry_pause_ns if pause else 0)
        else:
            _log.info(
                "request %d failed in sequence %d: %s", request.id, sequence.id, error.message
            )
            self._requests.fail(request, error)

    def _may_retry(self, request: Request) -> bool:
        return (
            request.attempts < self._limits.max_attempts
            and request.lone_losses < MAX_LONE_LOSSES
            # The prompt has grown by the generated tokens and needs more room for its prefill.
            and self._requests.capacity.fits(request.prompt_tokens, request.output_tokens)
        )

    def _wait_again(self, request: Request, pause_ns: int) -> None:
        self._requests.wait_again(request)
        if pause_ns:
            self._requests.later(request, self._round.now_ns + pause_ns, self._requests.push)
        else:
            self._requests.push(request)

    def delivered(self, sequence_id: SequenceId, generated_tokens: int) -> None:
        """Count tokens that were delivered when the executor reported, also of a sequence that an
        earlier event of this round has ended."""
        sequence = self._sequences.serving(sequence_id)
        if sequence is not None:
            sequence.request.note_generated(generated_tokens)
            return
        sequence = self._sequences.closed_now.get(sequence_id)
        if sequence is None or self._requests.live.get(sequence.request.id) is not sequence.request:
            return
        request = sequence.request
        queued = request in self._requests.queue
        self._requests.queue.remove(request)
        request.note_generated(generated_tokens)
        if request.output_tokens <= 0:
            self._requests.end(request)
        elif queued:
            self._requests.push(request)  # a longer prompt may have low priority

    def finished_late(self, sequence_id: SequenceId, generated_tokens: int) -> None:
        """End the request of a sequence whose whole answer was delivered before the fault."""
        sequence = self._sequences.closed_now.get(sequence_id)
        if sequence and self._requests.live.get(sequence.request.id) is sequence.request:
            sequence.request.note_generated(generated_tokens)
            self._requests.end(sequence.request)

    def broken(self, sequence: Sequence, error: CspsError) -> None:
        """Fail a sequence for an error on living gangs."""
        self.failed(sequence, wire_error(error))

    def transfer_deadline_ns(self, sequence: Sequence) -> int:
        """Return how long a sequence's KV transfer may take from its first token on."""
        tokens = sum(kv_slice.tokens for kv_slice in sequence.slices)
        return self._deadlines.transfer_ns + self._deadlines.transfer_token_ns * tokens

    def transfer_is_late(self, sequence: Sequence) -> None:
        """Fail a sequence whose KV transfer took too long."""
        seconds = self.transfer_deadline_ns(sequence) / SECOND_NS
        self.broken(sequence, DeadlineExceeded("KV transfer", seconds))

    def gang_lost(self, gang: Gang, reason: str) -> None:
        """Restart everything that needs the gang elsewhere; the rest goes on."""
        inside = self._sequences.inside(gang)
        if len(inside) == 1 and not inside[0].over:
            self._requests.live[inside[0].request.id].lone_losses += 1  # a front is a copy
        needing = self._sequences.drop(gang)
        error = wire_error(GangLost(f"the {gang.role} gang was lost: {reason}"))
        for sequence in needing:
            self.failed(sequence, error, pause=False)

    def link_lost(self, prefill: GangId, decode: GangId, reason: str) -> None:
        """Restart the sequences whose KV was in transfer over the link."""
        error = wire_error(GangLost(f"the connection for KV was lost: {reason}"))
        for sequence in self._sequences.between(prefill, decode):
            self.failed(sequence, error, pause=False)


class LivenessTimeouts:
    """Resets gangs of which a step does not advance, or an instance samples or frees nothing
    although it owes it. What else the gang does is no excuse."""

    def __init__(
        self,
        gangs: Gangs,
        steps: Steps,
        sequences: Sequences,
        prefix: PrefixCache,
        deadlines: SchedulerDeadlines,
    ) -> None:
        self._gangs, self._steps, self._deadlines = gangs, steps, deadlines
        self._sequences, self._prefix = sequences, prefix

    @property
    def expects_answers(self) -> bool:
        """True if some gang owes something."""
        return bool(self._steps.by_id) or any(gang.owing for gang in self._gangs.by_id.values())

    def check(self, now_ns: int) -> None:
        """Reset gangs that were silent for too long."""
        limits = self._deadlines
        for gang in list(self._gangs.by_id.values()):
            computing_ns = self._computing_silence_ns(gang, now_ns)
            decoding_ns = self._decoding_silence_ns(gang, now_ns)
            if computing_ns > limits.prefill_liveness_ns:
                self._gangs.reset(gang, _reason(gang, computing_ns))
            elif decoding_ns > limits.decode_liveness_ns:
                self._gangs.reset(gang, _reason(gang, decoding_ns))

    def _computing_silence_ns(self, gang: Gang, now_ns: int) -> int:
        """Return the silence of the step that was silent for longest.

        A step may wait for those launched before it on its instances, as long as these advance:
        low-priority steps for all, high-priority steps for their like. High-priority steps that
        preempt it excuse it for the time that they cost it, which their policy bounds.
        """
        high_ns: dict[InstanceId, int] = {}
        any_ns: dict[InstanceId, int] = {}
        longest_ns = 0
        for step in self._steps.by_id.values():  # in the order of their launch
            if step.gang is not gang or step.unsent:
                continue
            excused_ns = max(0, step.delayed_ns - step.delayed_before_ns)
            own_ns = max(step.launched_ns, step.advanced_ns) + excused_ns
            before = high_ns if step.high_priority else any_ns
            alive_ns = max([own_ns, *(before.get(instance, 0) for instance in step.undone)])
            longest_ns = max(longest_ns, now_ns - alive_ns)
            for later_ns in (high_ns, any_ns) if step.high_priority else (any_ns,):
                for instance in step.undone:
                    later_ns[instance] = max(alive_ns, later_ns.get(instance, 0))
        return longest_ns

    def _decoding_silence_ns(self, gang: Gang, now_ns: int) -> int:
        """Return the silence of the instance that owes something and was silent for longest."""
        since_ns: dict[InstanceId, int] = {}
        for source, owed_ns in gang.owing.items():  # the oldest first
            for instance in self._debtors(gang, source):
                since_ns.setdefault(instance, owed_ns)
        return max(
            (
                now_ns - max(owed_ns, self._gangs.instances[instance].last_heartbeat_ns)
                for instance, owed_ns in since_ns.items()
            ),
            default=0,
        )

    def _debtors(self, gang: Gang, source: SequenceId) -> list[InstanceId]:
        """Return the instances that owe tokens or slots of a sequence, or an acknowledgement of
        what to do with its KV. The holders of KV wait for their sequence's master."""
        debtors = self._prefix.owing(gang, source)
        sequence = self._sequences.by_id.get(source)
        if sequence is not None and sequence.decode is gang:
            debtors += sequence.unfreed if sequence.over else [sequence.master.id]
        return debtors


def _reason(gang: Gang, silent_ns: int) -> str:
    seconds = silent_ns // SECOND_NS
    return f"the {gang.role} gang owes an answer and was silent for {seconds} s"


class LivenessMonitor:
    """Checks for silent gangs and for requests that no gang serves, while there may be any."""

    def __init__(
        self,
        this_round: Round,
        gangs: Gangs,
        requests: Requests,
        timeouts: LivenessTimeouts,
        deadlines: SchedulerDeadlines,
    ) -> None:
        self._round, self._gangs, self._requests = this_round, gangs, requests
        self._timeouts, self._deadlines = timeouts, deadlines
        self.next_ns: int | None = None
        """Time of the next check; None if nobody owes anything."""

    def check(self) -> None:
        """Check if it is time."""
        if self.next_ns is not None and self._round.now_ns >= self.next_ns:
            self.next_ns = None
            self._timeouts.check(self._round.now_ns)
            self._fail_without_gangs()

    def schedule_check(self) -> None:
        """Schedule the next check, or none if nobody owes anything any more."""
        waits_for_gangs = not self._gangs.pairs and self._requests.admission.waiting
        if not (waits_for_gangs or self._timeouts.expects_answers):
            self.next_ns = None
        elif self.next_ns is None:
            self.next_ns = self._round.now_ns + self._deadlines.liveness_check_ns

    def _fail_without_gangs(self) -> None:
        missing_ns, limit_ns = self._gangs.missing_ns, self._deadlines.gang_recovery_ns
        if missing_ns is None:
            return
        reason = f"no gangs to serve the request for {limit_ns / SECOND_NS:g} s"
        error = wire_error(GangLost(reason))
        for request in list(self._requests.live.values()):
            since_ns = max(missing_ns, request.waiting_since_ns)
            if request.waiting and self._round.now_ns - since_ns > limit_ns:
                self._requests.fail(request, error)

"""What becomes of a request whose sequence cannot go on."""

from __future__ import annotations

from csps.protocols.errors import CspsError, DeadlineExceeded, GangLost
from csps.services.scheduling.commands import Restart
from csps.services.scheduling.events import WireError
from csps.services.scheduling.ids import GangId, SequenceId
from csps.services.scheduling.limits import SECOND_NS, DeadlineSettings, QueueLimits
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.state import Gang, Request, Sequence
from csps.services.scheduling.turn import Turn, wire_error

MAX_LONE_LOSSES = 2
"""A request that has been alone in so many gangs when they died may be what killed them."""


class Retries:
    """After a fault of the cluster a request goes back to its place in the line. What was drawn
    stays drawn: the next attempt computes prompt and delivered tokens and goes on from there."""

    def __init__(
        self,
        turn: Turn,
        requests: Requests,
        sequences: Sequences,
        limits: QueueLimits,
        deadlines: DeadlineSettings,
    ) -> None:
        self._turn, self._requests, self._sequences = turn, requests, sequences
        self._limits, self._deadlines = limits, deadlines

    def failed(
        self, sequence: Sequence, error: WireError, *, retryable: bool = True, pause: bool = True
    ) -> None:
        """The sequence is over without a whole answer.

        Args:
            sequence: still works for its request.
            error: for the client, if this was the last attempt.
            retryable: the cluster's fault and not the request's.
            pause: the gangs live on, as far as is known.
        """
        request = sequence.request
        self._sequences.close(sequence)
        request.sequence = None
        if request.output_tokens <= 0:
            self._requests.end(request)  # all of its tokens were delivered
        elif retryable and self._may_go_on(request):
            self._turn.emit(Restart(request=request.id, sequence=sequence.id, error=error))
            self._wait_again(request, self._deadlines.retry_pause_ns if pause else 0)
        else:
            self._requests.fail(request, error)

    def _may_go_on(self, request: Request) -> bool:
        return (
            request.attempts < self._limits.max_attempts
            and request.lone_losses < MAX_LONE_LOSSES
            # The prompt has grown by what was drawn, and needs more room to be prefilled.
            and self._requests.fit.fits(request.prompt_tokens, request.output_tokens)
        )

    def _wait_again(self, request: Request, pause_ns: int) -> None:
        self._requests.wait_again(request)
        if pause_ns:
            self._requests.later(request, self._turn.now_ns + pause_ns, self._requests.push)
        else:
            self._requests.push(request)

    def delivered(self, number: SequenceId, drawn: int) -> None:
        """So many tokens had left when the executor reported it: also those of a sequence that an
        event before in this turn has ended."""
        sequence = self._sequences.serving(number)
        if sequence is not None:
            sequence.request.draw(drawn)
            return
        sequence = self._sequences.closed_now.get(number)
        if sequence is None or self._requests.live.get(sequence.request.id) is not sequence.request:
            return
        request = sequence.request
        queued = request in self._requests.queue
        self._requests.queue.remove(request)
        request.draw(drawn)
        if request.output_tokens <= 0:
            self._requests.end(request)
        elif queued:
            self._requests.push(request)  # a longer prompt may not be urgent any more

    def finished_late(self, number: SequenceId) -> None:
        """Nothing is left to be tried again if all of the answer had left before the fault."""
        sequence = self._sequences.closed_now.get(number)
        if sequence and self._requests.live.get(sequence.request.id) is sequence.request:
            self._requests.end(sequence.request)

    # --- faults ---

    def broken(self, sequence: Sequence, error: CspsError) -> None:
        """Something is wrong with the sequence on gangs that live."""
        self.failed(sequence, wire_error(error))

    def landing_deadline_ns(self, sequence: Sequence) -> int:
        """How long a sequence's KV may take from its first token on."""
        tokens = sum(it.tokens for it in sequence.shares)
        return self._deadlines.landing_ns + self._deadlines.landing_token_ns * tokens

    def landing_is_late(self, sequence: Sequence) -> None:
        """Its time has come."""
        seconds = self.landing_deadline_ns(sequence) / SECOND_NS
        self.broken(sequence, DeadlineExceeded("KV landing", seconds))

    def gang_lost(self, gang: Gang, reason: str) -> None:
        """Everything that needs the gang starts over elsewhere; the rest goes on."""
        inside = self._sequences.inside(gang)
        if len(inside) == 1 and not inside[0].over:
            inside[0].request.lone_losses += 1
        needing = self._sequences.drop(gang)
        error = wire_error(GangLost(f"the {gang.role} gang was lost: {reason}"))
        for sequence in needing:
            self.failed(sequence, error, pause=False)

    def link_lost(self, prefill: GangId, decode: GangId, reason: str) -> None:
        """KV on its way does not arrive."""
        error = wire_error(GangLost(f"the connection for KV was lost: {reason}"))
        for sequence in self._sequences.between(prefill, decode):
            self.failed(sequence, error, pause=False)

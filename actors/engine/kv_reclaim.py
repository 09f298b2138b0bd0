"""Freeing a rank's KV, as soon as neither a step nor the stream needs it, and saying so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from csps.actors.engine.engine import Engine
from csps.actors.engine.kv_lifetime import KvLifetime
from csps.actors.engine.step_reports import StepReports
from csps.actors.slot_allocator import NotHeld
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.span import Span


class KvReclaim:
    """Of all sequences of a rank. Any thread may call anything.

    Args:
        reserved: whether the stream has a sequence.
        slots_came_back: told when there may be room for others.
    """

    def __init__(
        self,
        engine: Engine,
        reports: StepReports,
        *,
        reserved: Callable[[int], bool],
        slots_came_back: Callable[[], None],
    ) -> None:
        self._here, self._slots, self._reports = engine.instance, engine.pool.slots, reports
        self._reserved, self._slots_came_back = reserved, slots_came_back
        self._lifetime = KvLifetime()

    def enter(self, job: PrefillJob) -> None:
        """A step is in line: what others have computed here of its pieces' history is held,
        whatever becomes of them.

        Raises:
            NotHeld: some of it is not here; the step is over.
        """
        self._lifetime.enter(job)
        try:
            for piece in job.pieces:
                for share in piece.history:
                    if share.origin is not None and share.instance == self._here:
                        self._slots.share(piece.rid, share.origin, share.span)
        except NotHeld:
            self._free(self._lifetime.settle(job, cancelled=True))
            raise

    def given_up(self, rid: int) -> None:
        """Nobody wants a sequence that has a step."""
        self._lifetime.cancel(rid)

    def stay(self, rid: int) -> None:
        """The stream is to decode a sequence whose KV is kept at its end."""
        self._lifetime.stay(rid)

    def cancel(self, rid: int) -> None:
        """Nobody wants a sequence: what lies here between two of its steps goes."""
        self._lifetime.unkeep(rid)
        if not self._reserved(rid) and self._lifetime.cancel(rid):
            self._free([rid])

    def cancel_all(self) -> None:
        """Nobody wants anything."""
        self._free(rid for rid in self._lifetime.cancel_all() if not self._reserved(rid))

    def settle(self, job: PrefillJob, *, cancelled: bool) -> None:
        """A step is over here.

        Args:
            cancelled: it was given up.
        """
        self._free(self._lifetime.settle(job, cancelled=cancelled))
        for piece in job.pieces:
            if piece.stays and piece.last and self._lifetime.stays(piece.rid):
                self._slots.drop_shared(piece.rid)
            if due := self._lifetime.due(piece.rid):
                self.release(piece.rid, due)

    def release(self, rid: int, spans: tuple[Span, ...]) -> None:
        """Free some of what is kept of a sequence that is over, or will be with its last step."""
        if not self._lifetime.release(rid, spans):
            return
        if not self._reserved(rid):
            for span in spans:
                self._slots.free_span(rid, span)
        if not (left := self._slots.tokens(rid)):
            self._lifetime.gone(rid)
        self._slots_came_back()
        self._reports.held(rid, left)

    def let_go(self, rid: int) -> None:
        """The stream is done with a sequence, but a step that is under way may have it as well."""
        if self._lifetime.leave(rid):
            self._slots.free_request(rid)
            self._slots_came_back()
            self._reports.freed(rid)
        elif self._lifetime.stays(rid):
            self._slots.drop_shared(rid)

    def _free(self, rids: Iterable[int]) -> None:
        for rid in rids:
            self._slots.free_request(rid)
            if self._lifetime.left(rid):
                self._reports.freed(rid)
        self._slots_came_back()

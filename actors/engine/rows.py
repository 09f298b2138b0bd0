"""The rows of a stream: sequences, and how far each of them is.

A row that decodes computes one token an iteration, one that rides a piece of its prompt (`fill`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csps.actors.held_rows import RequestSlots
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.sampler_request import drawn_before
from csps.actors.strategies.query_exchange import ExchangeTimes
from csps.actors.token_sampler import TokenSampler
from csps.protocols.iteration import RowState
from csps.protocols.messages import Reserve
from csps.protocols.placement import KvShare
from csps.protocols.span import Span


@dataclass(eq=False)
class Row:
    """One sequence in the stream. All ranks count alike where it is; what it holds differs."""

    reservation: Reservation
    index: int
    """Number of the answer's token that is drawn next."""
    next: int
    """First position that is not computed."""
    token: int
    """At `next`, once the row decodes."""
    sampler: TokenSampler | None
    """At its master."""
    instances: frozenset[int]
    """Whom it concerns: who draws its tokens, and who holds or is to keep its KV."""
    slots: RequestSlots | None = None
    """Of its KV as far as it lies here, once the row decodes."""
    exchanges: ExchangeTimes = field(default_factory=ExchangeTimes)
    """Of this rank, as they were when it joined."""
    over: bool = False
    """Its last token was drawn. It stays, unheard, until the log lets it leave everywhere."""

    @property
    def request(self) -> Reserve:
        """What was reserved for it."""
        return self.reservation.request

    @property
    def rid(self) -> int:
        """The sequence."""
        return self.request.rid

    @property
    def prompt(self) -> int:
        """Positions that are given, those that an earlier attempt has drawn included."""
        return self.request.prompt_length

    @property
    def state(self) -> RowState:
        """How far it is."""
        request = self.request
        return RowState(
            next=self.next,
            prompt=self.prompt,
            stop=last_position(request),
            master=request.master,
            first=request.reused,
        )

    @property
    def decodes(self) -> bool:
        """Its prompt is computed."""
        return self.next >= self.prompt

    def tokens(self, span: Span) -> NDArray[np.int32]:
        """Of positions that a row that rides computes, at its master."""
        given = np.frombuffer(self.request.prompt, dtype="<i4")
        first = self.prompt - len(given)
        return given[span.start - first : span.stop - first]

    @cached_property
    def answer(self) -> tuple[KvShare, ...]:
        """Who keeps the KV of the answer."""
        return answer_of(self.request)

    @property
    def keeper(self) -> int:
        """The instance that keeps the KV of the row's next token, once it decodes."""
        return next(it.instance for it in self.answer if self.next in it.span.positions)

    @property
    def holders(self) -> set[int]:
        """Instances that hold KV of it, or keep that of its next token, once it decodes. Who keeps
        later ones has nothing to answer yet."""
        shares = (*self.request.shares, *self.answer)
        return {it.instance for it in shares if it.span.length and it.span.start <= self.next}

    @property
    def keeps_at_master(self) -> bool:
        """No KV of the answer goes to another instance."""
        return all(it.instance == self.request.master for it in self.answer)

    def shares_before(self, position: int) -> list[KvShare]:
        """Where the KV of the prompt's positions before this one lies."""
        return _within(self.request.shares, Span(start=0, stop=position))

    def shares_of(self, span: Span) -> list[KvShare]:
        """Where the KV of a piece of the prompt is to lie."""
        return _within(self.request.shares, span)


def instances_of(request: Reserve) -> frozenset[int]:
    """Whom a row concerns, as it was reserved."""
    named = (it.instance for it in (*request.shares, *answer_of(request)))
    return frozenset((request.master, *named))


def last_position(request: Reserve) -> int:
    """Behind the last position that is computed: the answer's last token is never embedded."""
    to_come = request.sampling.max_tokens - drawn_before(request.drawn)
    return request.prompt_length + max(0, to_come - 1)


def answer_of(request: Reserve) -> tuple[KvShare, ...]:
    """Where the KV of the answer's positions is to lie."""
    answer = Span(request.prompt_length, last_position(request))
    if not request.answer:
        return (KvShare(instance=request.master, span=answer),)
    return tuple(_within(request.answer, answer))


def _within(shares: Sequence[KvShare], span: Span) -> list[KvShare]:
    cuts = [replace(it, span=span.intersection(it.span)) for it in shares]
    return [cut for cut in cuts if cut.span.length]

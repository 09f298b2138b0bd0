"""The seam between deciding and doing: what a policy is, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from csps.services.scheduling.commands import Share
from csps.services.scheduling.ids import InstanceId, RequestId, SequenceId
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView, View


class Part(msgspec.Struct, frozen=True, gc=False):
    """Base of all that decisions are made of: as cheap as a tuple."""


class PlannedPiece(Part, frozen=True):
    """Positions [start, start + length) of a waiting request.

    The first one of a request begins at 0, or behind what the gang has kept of the prompt
    (`View.cached`).
    """

    request: RequestId
    start: int
    length: int
    rows: tuple[Share, ...] = ()
    """Who computes what (`shares.laid_out`), each position once; empty cuts at the step's bounds.
    Of all pieces of a step or of none, and not every strategy takes such rows."""
    keep: tuple[Share, ...] = ()
    """Who keeps the chunk's KV from this step on; empty: who computes it. It may also name earlier
    positions, whose KV moves there. A gang that decodes in place keeps it where
    `DecodePlacement.shares` says, and nowhere else."""


class PlannedStep(Part, frozen=True, kw_only=True):
    """A step to be launched. Its pieces are laid end to end and cut at `bounds`, or have rows."""

    group: tuple[InstanceId, ...]
    """Of one gang that may prefill, in topology order: all that compute something, or hold or keep
    KV of its pieces."""
    bounds: tuple[int, ...]
    """Instance `group[i]` computes tokens [bounds[i], bounds[i+1]), or as many by its rows."""
    pieces: tuple[PlannedPiece, ...]
    strategy: str
    predicted_ns: int
    urgent: bool = False


class DecodePlacement(Part, frozen=True):
    """Where a request's KV goes and who draws its tokens."""

    request: RequestId
    shares: tuple[Share, ...]
    """The prompt's KV: each position once. What was kept where it is decoded may be named as it
    lies there (`View.cached`), with its origin: then it takes no slots and is not sent. If it is
    computed there as well, what is reused is named so."""
    master: InstanceId
    """Slots for all tokens to come are set aside there, if `answer` does not name others."""
    answer: tuple[Share, ...] = ()
    """Who keeps the KV of the tokens to come, positions from the prompt's end on: each once."""


class StartPlan(Part, frozen=True, kw_only=True):
    """Start these requests now: reserve all slots, launch all steps.

    Several requests may share a step (a batch, fillers), one request may have several steps
    (chunks, in order). The scheduler derives where the KV of earlier chunks lies.
    """

    steps: tuple[PlannedStep, ...]
    decode: tuple[DecodePlacement, ...]
    """Of each request that has a piece in a step."""
    ahead_ns: int | None = None
    """Steps are sent to the ranks so long before they begin, as predicted, and may be planned again
    until then (`Replan`); None: all at once. Of a plan of one request."""


class Replan(Part, frozen=True, kw_only=True):
    """Steps of a sequence that the ranks have not heard of are to be others, in the same place in
    the line. The slots of the new ones must be free beside those of the old ones."""

    sequence: SequenceId
    version: int
    """Of the plan that this one was made from."""
    steps: tuple[PlannedStep, ...]
    """Of all that is left; none: the old ones stay, and what is predicted of them now is what
    reality is compared with from now on."""


class Ride(Part, frozen=True, kw_only=True):
    """Start this request in the stream of a gang that decodes: iterations compute its prompt, in
    pieces, where its tokens will be drawn."""

    placement: DecodePlacement
    budget: int
    """Tokens that an iteration of the gang's stream may compute on each master."""


class Move(Part, frozen=True, kw_only=True):
    """Let a sequence that is decoded go on elsewhere in its gang, with its KV."""

    sequence: SequenceId
    placement: DecodePlacement
    """Of the same positions, those of the answer named in full."""


class Blocked(Part, frozen=True, kw_only=True):
    """There are not slots enough for a request whose turn it is. Whoever passes it from now on
    must have ended within the bound of overtaking."""

    request: RequestId


class Passed(Part, frozen=True, kw_only=True):
    """Younger requests have gone before this one in this round."""

    request: RequestId


class WakeAt(Part, frozen=True, kw_only=True):
    """Ask again then, although nothing may have changed."""

    at_ns: int


Decision = StartPlan | Replan | Ride | Move | Blocked | Passed | WakeAt


class Trial(Protocol):
    """What a policy could do with two gangs that have nothing else to do."""

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether it would start such a request. More tokens never fit where fewer do not."""
        ...


class Policy(Protocol):
    """Decides which requests start, where, and together with which others.

    A policy keeps no state between rounds: what it must remember is data of the scheduler, so that
    router and simulator drive the same object and a log can be replayed.
    """

    @property
    def name(self) -> str:
        """As in `scheduling: {policy: NAME}`."""
        ...

    @property
    def options(self) -> object:
        """A frozen dataclass of what users may tell it."""
        ...

    @property
    def decode_options(self) -> object:
        """Those about decoding, which all policies have."""
        ...

    def line(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Line:
        """Where a request waits. Asked again when gangs come up."""
        ...

    def decide(self, view: View) -> Sequence[Decision]:
        """What to do now; requests in no plan go on waiting.

        Asked whenever something has changed. All plans together must fit into the free slots.
        """
        ...

    @property
    def whole_prompts(self) -> bool:
        """A prompt is computed at once and by the strategies of its class: what sparse attention
        needs."""
        ...

    @property
    def regroups(self) -> bool:
        """It has something to decide although nothing waits: where that is decoded which has begun
        (`Move`)."""
        ...

    def trial(self, pair: PairView) -> Trial:
        """Placements on a pair of gangs that have nothing to do. Admission asks it for every
        request: what it accepts, `decide` must start at the latest when everything else ended."""
        ...


def digest_of(policy: Policy) -> str:
    """Equal options, equal digests; in every log."""
    return f"{policy.options} {policy.decode_options}"

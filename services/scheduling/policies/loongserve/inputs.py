"""Options and inputs of the policy `loongserve`.

The four steps of a round work on pending prompts, elastic instances and decode groups.
`PrefillModel` predicts a prefill iteration by degree of parallelism (§5.5, Eq. 7). `wait_ns`,
`saved_ns` and `worth_waiting` estimate what waiting costs (Eq. 2, App. A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from csps.protocols.core.errors import ConfigError, nearest
from csps.services.scheduling.events.events import InstanceId, RequestId
from csps.services.scheduling.policies.rounds.decode_overlay import check_least

OBJECTIVES = ("normalised", "sum")
BATCHINGS = ("plain", "pruned")


@dataclass(frozen=True, kw_only=True)
class LoongServeOptions:
    """Options of the policy `loongserve`."""

    max_num_ooe: int = 8
    """Rounds in which younger requests may pass a request without slots."""
    objective: str = "normalised"
    """Quantity that batching minimizes: the sum of latencies, or of latencies over lengths."""
    batching: str = "plain"
    """Search for batches: the whole one, or the paper's pruned one, which is not exact."""
    tipping_tokens: int = 0
    """Tokens from which a prefill is compute-bound; 0: by Eq. 7."""
    scale_up_batch: int = 0
    """Sequences that a master samples before others join; 0: as many as it is predicted to sample
    at least as fast as two instances would."""
    decode_iterations: int = 10
    """Minimum iterations of a decode group between two preemptions."""
    migrate: bool = True
    """True if KV of decoding requests moves where that gains more than it costs."""
    max_delay_s: float = 0.0
    """Seconds that requests may be delayed to start on all instances instead of some."""
    max_prompts: int = 0
    """Most prompts that start in a round; 0: as many as pay off. 1 is single-request scheduling,
    for comparison."""
    static_dop: int = 0
    """Size of fixed groups, for comparison; 0: elastic."""

    def __post_init__(self) -> None:
        check_least(self, 0, "max_num_ooe", "tipping_tokens", "decode_iterations", "static_dop")
        check_least(self, 0, "max_prompts")
        check_least(self, 0, "max_delay_s", "scale_up_batch")
        for name, known in (("objective", OBJECTIVES), ("batching", BATCHINGS)):
            if (value := getattr(self, name)) not in known:
                words, hint = " or ".join(known), nearest(value, known)
                raise ConfigError(f"option {name} must be {words}, not {value}{hint}")


class PendingPrompt(NamedTuple):
    """A request of the pending queue."""

    id: RequestId
    tokens: int
    answer: int
    """Most tokens of its answer."""
    bypassed_rounds: int = 0
    """Rounds in which younger requests started first."""
    waited_ns: int = 0
    """Time since it arrived."""

    @property
    def future(self) -> int:
        """Most slots that it takes."""
        return self.tokens + self.answer


class Elastic(NamedTuple):
    """An elastic instance that does not prefill."""

    id: InstanceId
    order: int
    """Position among the gang's instances."""
    unused: int
    """Slots that are not reserved."""
    used: int
    """Slots with KV, or reserved for it."""


class Decoding(NamedTuple):
    """A decoding request."""

    generated_tokens: int
    """Tokens of its answer so far, at least 1; its final length is unknown."""
    executed_ns: int
    """Time for which it has been decoded."""


class DecodeGroup(NamedTuple):
    """A decode batch B_i and its parallel group G_i."""

    instances: tuple[Elastic, ...]
    requests: tuple[Decoding, ...]
    context: int = 0
    """Tokens that the requests attend to, summed."""

    @property
    def unused(self) -> int:
        """Slots of the group that are not reserved."""
        return sum(instance.unused for instance in self.instances)


class Eq7(NamedTuple):
    """Coefficients of T(R) = alpha + beta * sum(len) + gamma * sum(len^2), in nanoseconds."""

    alpha: float
    beta: float
    gamma: float

    def ns(self, tokens: int, squares: int) -> float:
        """Predict an iteration by the sum of the lengths and the sum of their squares."""
        return self.alpha + self.beta * tokens + self.gamma * squares


class PrefillModel:
    """Predictions by Eq. 7 for groups of every size.

    Args:
        eq7: returns the coefficients for a number of instances; called once for each.
        tipping_tokens: tokens of a batch, without attention, at which prefill turns from
            memory-bound to compute-bound; 0: where the constant part of Eq. 7 equals the rest.
    """

    def __init__(self, eq7: Callable[[int], Eq7], tipping_tokens: int = 0) -> None:
        self._eq7 = eq7
        self._tipping_tokens = tipping_tokens
        self._known: dict[int, Eq7] = {}

    def eq7(self, dop: int) -> Eq7:
        """Return the coefficients of groups of `dop` instances."""
        if dop not in self._known:
            self._known[dop] = self._eq7(dop)
        return self._known[dop]

    def ns(self, lengths: Sequence[int], dop: int) -> float:
        """Predict T(R, E) of requests on `dop` instances."""
        return self.eq7(dop).ns(sum(lengths), sum(length * length for length in lengths))

    def tipping_ns(self, dop: int) -> float:
        """Return the time beyond which an iteration is compute-bound."""
        eq7 = self.eq7(dop)
        if self._tipping_tokens:
            return eq7.alpha + eq7.beta * self._tipping_tokens
        return 2 * eq7.alpha


def wait_ns(decoding: Sequence[Decoding], average_decode_ns: int) -> int:
    """Estimate the time until the instances of a group are free: AvgLat_d - min(exec_time)."""
    executed_ns = min((request.executed_ns for request in decoding), default=average_decode_ns)
    return max(0, average_decode_ns - executed_ns)


def saved_ns(waited_ns: int, decoding: Sequence[Decoding], average_decode_ns: int) -> int:
    """Return the waiting time that preempting a decode group saves a prompt (Eq. 2)."""
    # A group that decodes for longer than estimated may do so for any time. Then the time that the
    # prompt has waited for it since counts, as in the rent-or-buy problem: Eq. 2 alone would let
    # prompts wait for long answers without bound.
    executed_ns = min((request.executed_ns for request in decoding), default=average_decode_ns)
    over_ns = max(0, executed_ns - average_decode_ns)
    return wait_ns(decoding, average_decode_ns) or min(waited_ns, over_ns)


def worth_waiting(
    prompts: Sequence[PendingPrompt], dop: int, all_dop: int, wait: int, model: PrefillModel
) -> bool:
    """Return True if an iteration on all instances after a wait ends before one on `dop` now."""
    if dop >= all_dop:
        return False
    lengths = [prompt.tokens for prompt in prompts]
    return wait < model.ns(lengths, dop) - model.ns(lengths, all_dop)

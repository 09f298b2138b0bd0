"""Options of the policy `loongserve`.

What LoongServe's four steps work on: prompts, elastic instances, and batches that decode.

The time of a prefill iteration by degree of parallelism (LoongServe §5.5, Eq. 7).

When it is better to wait for more instances (LoongServe App. A).
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
    """What the four steps need to know besides times."""

    max_num_ooe: int = 8
    """Rounds in which a request that finds no slots may be passed by younger ones."""
    objective: str = "normalised"
    """What batching minimises: the sum of latencies, or of these divided by the prompts' lengths.
    """
    batching: str = "plain"
    """Batching by the whole search, or by the pruned one of the paper, which is no exact one."""
    tipping_tokens: int = 0
    """A prefill of so many tokens is compute-bound; 0: where Eq. 7 says."""
    scale_up_batch: int = 0
    """Rows that a master draws before others share them; 0: as many as it is predicted to draw at
    least as fast as two instances would."""
    decode_iterations: int = 10
    """Iterations that a decode group has, at least, between two preemptions."""
    migrate: bool = True
    """KV of what decodes moves where that gains more than it costs; false: it stays."""
    max_delay_s: float = 0.0
    """How long requests that could start on some instances may be delayed in the hope for all;
    0: not at all."""
    static_dop: int = 0
    """Always groups of so many instances, for comparison; 0: elastic."""

    def __post_init__(self) -> None:
        check_least(self, 0, "max_num_ooe", "tipping_tokens", "decode_iterations", "static_dop")
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
    """Most tokens that it may draw."""
    bypassed_rounds: int = 0
    """Rounds in which younger ones went first."""
    waited_ns: int = 0
    """Since it came."""

    @property
    def future(self) -> int:
        """Slots that it takes at most."""
        return self.tokens + self.answer


class Elastic(NamedTuple):
    """An elastic instance that does not prefill."""

    id: InstanceId
    order: int
    """Of its place among the gang's."""
    unused: int
    """KV slots that nobody was promised."""
    used: int
    """Slots with KV, or promised for KV to come."""


class Decoding(NamedTuple):
    """A request of a batch that decodes."""

    generated_tokens: int
    """Tokens of its answer so far, at least 1: how many it will be is unknown."""
    executed_ns: int
    """How long it has been decoded."""


class DecodeGroup(NamedTuple):
    """B_i and its parallel group G_i."""

    instances: tuple[Elastic, ...]
    requests: tuple[Decoding, ...]
    context: int = 0
    """Tokens that they attend to, summed."""

    @property
    def unused(self) -> int:
        """Slots of the group."""
        return sum(instance.unused for instance in self.instances)


class Eq7(NamedTuple):
    """T(R) = alpha + beta * sum(len) + gamma * sum(len^2), in nanoseconds."""

    alpha: float
    beta: float
    gamma: float

    def ns(self, tokens: int, squares: int) -> float:
        """Of requests with so many tokens together, and such a sum of squared lengths."""
        return self.alpha + self.beta * tokens + self.gamma * squares


class PrefillModel:
    """Eq. 7 of groups of every size.

    Args:
        line: coefficients for a number of instances; asked once for each.
        tipping_tokens: a batch of so many tokens, each attending to nobody, is where prefill turns
            from memory-bound to compute-bound; 0 is where the two parts of Eq. 7 are equal, when
            computing takes as long as whatever does not grow with the batch.
    """

    def __init__(self, line: Callable[[int], Eq7], tipping_tokens: int = 0) -> None:
        self._eq7 = line
        self._tipping_tokens = tipping_tokens
        self._known: dict[int, Eq7] = {}

    def eq7(self, dop: int) -> Eq7:
        """Coefficients of groups of `dop` instances."""
        if dop not in self._known:
            self._known[dop] = self._eq7(dop)
        return self._known[dop]

    def ns(self, lengths: Sequence[int], dop: int) -> float:
        """T(R, E)."""
        return self.eq7(dop).ns(sum(lengths), sum(length * length for length in lengths))

    def tipping_ns(self, dop: int) -> float:
        """Iterations that take longer are compute-bound: more requests only make them longer."""
        line = self.eq7(dop)
        if self._tipping_tokens:
            return line.alpha + line.beta * self._tipping_tokens
        return 2 * line.alpha


def wait_ns(decoding: Sequence[Decoding], average_decode_ns: int) -> int:
    """Until the instances of a batch are free, as roughly estimated: AvgLat_d - min(exec_time)."""
    executed_ns = min((it.executed_ns for it in decoding), default=average_decode_ns)
    return max(0, average_decode_ns - executed_ns)


def spared_ns(waited_ns: int, decoding: Sequence[Decoding], average_decode_ns: int) -> int:
    """What a prompt need not wait if a batch gives way to it now (Eq. 2). A batch that goes on for
    longer than was estimated may do so for any time: what the prompt has waited for it since then
    counts, as whoever rents has paid enough when he might have bought."""
    executed_ns = min((it.executed_ns for it in decoding), default=average_decode_ns)
    over_ns = max(0, executed_ns - average_decode_ns)
    return wait_ns(decoding, average_decode_ns) or min(waited_ns, over_ns)


def worth_waiting(
    prompts: Sequence[PendingPrompt], dop: int, all_dop: int, wait: int, model: PrefillModel
) -> bool:
    """Whether an iteration on all instances, begun after the wait, ends before one that begins now
    on those that are available."""
    if dop >= all_dop:
        return False
    lengths = [prompt.tokens for prompt in prompts]
    return wait < model.ns(lengths, dop) - model.ns(lengths, all_dop)

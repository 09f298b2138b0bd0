"""What LoongServe's four steps work on: prompts, elastic instances, and batches that decode."""

from __future__ import annotations

from typing import NamedTuple

from csps.services.scheduling.ids import InstanceId, RequestId


class Prompt(NamedTuple):
    """A request of the pending queue."""

    id: RequestId
    tokens: int
    answer: int
    """Most tokens that it may draw."""
    passed: int = 0
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

    drawn: int
    """Tokens of its answer so far, at least 1: how many it will be is unknown."""
    executed_ns: int
    """How long it has been decoded."""


class DecodeBatch(NamedTuple):
    """B_i and its parallel group G_i."""

    instances: tuple[Elastic, ...]
    requests: tuple[Decoding, ...]
    context: int = 0
    """Tokens that they attend to, summed."""

    @property
    def unused(self) -> int:
        """Slots of the group."""
        return sum(it.unused for it in self.instances)

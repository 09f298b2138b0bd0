"""Names of what the scheduler speaks about. All are integers: they are keys of every table here."""

from __future__ import annotations

RequestId = int
"""A client's request, in order of admission. It stays inside the router."""
SequenceId = int
"""One attempt at a request: generation and counter. A retry is a new sequence."""
StepId = int
"""One step: generation and counter, from another counter than sequences."""
GangId = int
"""One incarnation of a gang, counted by the executor; never comes again."""
InstanceId = int
"""One instance of one incarnation of a gang."""

COUNTER_BITS = 40
"""A trillion sequences and eight million generations fit into what MessagePack calls an int64."""
INDEX_BITS = 16


def numbered(generation: int, counter: int) -> int:
    """A sequence's or a step's id, greater than every one of an older generation."""
    assert 0 <= counter < 1 << COUNTER_BITS, "the counter has run over"
    return generation << COUNTER_BITS | counter


def instance_id(gang: GangId, index: int) -> InstanceId:
    """Instance `index` of a gang."""
    assert 0 <= index < 1 << INDEX_BITS, "too many instances for one gang"
    return gang << INDEX_BITS | index


def gang_of(instance: InstanceId) -> GangId:
    """The gang that an instance belongs to."""
    return instance >> INDEX_BITS


def index_of(instance: InstanceId) -> int:
    """An instance's place in its gang."""
    return instance & ((1 << INDEX_BITS) - 1)

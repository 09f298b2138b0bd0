"""Policies read the scheduler's state and change none of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from canonical_streams import event_of, read_stream
from recorded_workloads import WORKLOADS

from csps.services.scheduling.deciding.decisions import Decision, Policy, SchedulerView

STREAMS = Path(__file__).parent / "recorded_streams"
TURNS = 200
"""Rounds of a stream that are replayed: a snapshot takes longer than a round."""
NAMES = (
    "csps-riding",
    "context_parallel-conversations",
    "fixed_sp-keeping",
    "chunked_prefill-keeping",
    "tetris-replanning-storm",
    "loongserve-moving-storm",
)
OWN_CACHE = "cached_by_gang"
"""Field in which the scheduler remembers what it has looked up for a policy."""

Snapshot = dict[int, tuple[str, dict[str, object]]]
"""Type and fields of every structure that can be reached, by the structure's identity."""


def snapshot_of(view: SchedulerView) -> Snapshot:
    """Return all structures that the view leads to, with their present fields."""
    found: Snapshot = {}
    waiting: list[msgspec.Struct] = [view]
    while waiting:
        struct = waiting.pop()
        if id(struct) in found:
            continue
        fields = {
            name: getattr(struct, name) for name in struct.__struct_fields__ if name != OWN_CACHE
        }
        found[id(struct)] = (
            type(struct).__name__,
            {name: _flat(value) for name, value in fields.items()},
        )
        for value in fields.values():
            waiting.extend(_structs(value))
    return found


def _flat(value: Any) -> object:
    """Return a copy that later changes do not reach; a structure becomes its identity."""
    if isinstance(value, msgspec.Struct):
        return id(value)
    if isinstance(value, dict):
        return tuple((key, _flat(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return tuple(_flat(entry) for entry in value)
    return value


def _structs(value: Any) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _structs(entry)


class Unchanged:
    """Policy that may not change what it is given."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.rounds = 0

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Ask the policy, and compare the state before and after."""
        before = snapshot_of(view)
        decisions = self._policy.decide(view)
        after = snapshot_of(view)
        for struct, (kind, fields) in before.items():
            _, present = after.get(struct, (kind, {}))
            changed = [name for name, value in fields.items() if present.get(name) != value]
            assert not changed, f"{self._policy.name} has changed {kind}.{changed[0]}"
        self.rounds += 1
        return decisions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def replay(name: str, policies: list[Unchanged], policy: type[Policy] | None = None) -> None:
    """Replay the first rounds of a stream with a policy that may not change the state."""

    def watched(real: Policy) -> Policy:
        policies.append(Unchanged(real if policy is None else policy(real)))  # type: ignore[call-arg]
        return policies[-1]  # type: ignore[return-value]

    scheduler = WORKLOADS[name].scheduler(watched)
    for turn in read_stream(STREAMS / f"{name}.jsonl.gz").turns[:TURNS]:
        scheduler.handle([event_of(event) for event in turn.events], turn.now_ns)


@pytest.mark.parametrize("name", NAMES)
def test_policy_that_decides_leaves_the_state_as_it_is(name: str) -> None:
    policies: list[Unchanged] = []
    replay(name, policies)
    assert policies[0].rounds > 20


class Meddling:
    """Policy that writes what only the scheduler may write."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Decide, and take a slot."""
        view.pairs[0].decode.instances[0].used += 1
        return self._policy.decide(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def test_policy_that_changes_the_state_is_found() -> None:
    with pytest.raises(AssertionError, match=r"has changed Instance\.used"):
        replay("fixed_sp-keeping", [], Meddling)  # type: ignore[arg-type]

"""What is retained of a request, and what the next one with the same beginning reuses."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_harness import SMALL, SchedulerHarness, Sent, messages, only, sent

from csps.protocols.core.placement import own, tokens_on
from csps.protocols.gang.messages import RetainKv
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy

BLOCK = 32
DECODE = instance_id(2, 0)
REUSE = ReuseSettings(enabled=True, block_tokens=BLOCK)


def hashes(blocks: int) -> tuple[bytes, ...]:
    """Return the hashes of the same text in each test."""
    return tuple(str(block).encode() for block in range(blocks))


class Caching(SchedulerHarness):
    """Pair of gangs of one instance each that retain KV."""

    def __init__(self) -> None:
        super().__init__(make_policy("csps", {**SMALL, "short_tokens": 0}), reuse=REUSE)
        self.turn(self.prefill(1, 1000), self.decode(2, 1000), ev.LinkUp(prefill=1, decode=2))

    def start_with(self, known: tuple[bytes, ...], prompt: int, output: int) -> Sent:
        """Submit a request whose text begins with known blocks."""
        submitted = msgspec.structs.replace(self.submit(prompt, output), hashes=known)
        return sent(self.turn(submitted))

    def end(self, plan: Sent, generated: int, answer: tuple[bytes, ...] = ()) -> range:
        """End a request, with the hashes of its answer; return what its decode gang retains."""
        finished = msgspec.structs.replace(plan.finished(generated), hashes=answer)
        return self.end_by(plan, finished)

    def end_by(self, plan: Sent, event: ev.Finished | ev.RequestCancelled) -> range:
        """End a request; return what its decode gang retains."""
        self.turn(*plan.joined())
        (retain,) = messages(self.turn(event), RetainKv)
        kept = range(retain.start, retain.stop)
        self.turn(ev.Retained(sequence_id=plan.sequence, instance=DECODE, tokens=len(kept)))
        return kept


def test_next_request_receives_what_its_decode_gang_lacks() -> None:
    harness = Caching()
    first = harness.start_with(hashes(3), 100, 10)
    assert harness.end(first, 10) == range(96)
    second = harness.start_with(hashes(6), 200, 10)
    assert second.reserve.cached == 96
    assert {part.source for part in second.reserve.message.slices if part.start < 96} == {
        first.sequence
    }
    assert harness.scheduler.counts.decode_kv == (96 + 104 + 10) / 1000
    assert tokens_on(own(second.reserve.message.slices)) == {DECODE: 104}
    commands = harness.turn(*second.joined())
    assert only(commands, cmd.SetGroup) == [cmd.SetGroup(gang=2, joined=(second.sequence,))]


def test_last_token_of_a_prompt_is_computed_even_if_it_is_cached() -> None:
    """It samples the first token of the answer."""
    harness = Caching()
    harness.end(harness.start_with(hashes(3), 96, 10), 10)
    again = harness.start_with(hashes(3), 96, 10)
    assert again.reserve.cached == 64
    assert [(chunk.start, chunk.length) for chunk in again.step.chunks] == [(64, 32)]


def test_retried_request_computes_all_of_its_prompt() -> None:
    """The cached KV may be what was wrong with the first attempt."""
    harness = Caching()
    harness.end(harness.start_with(hashes(3), 100, 10), 10)
    second = harness.start_with(hashes(6), 200, 10)
    assert second.reserve.cached == 96
    harness.turn(second.failed(), *second.freed(), *second.steps_done())
    again = sent(harness.wait())
    assert again.request == second.request
    assert again.reserve.cached == 0
    assert not any(part.source for part in again.reserve.message.slices)
    assert not again.step.chunks[0].history


@pytest.mark.parametrize(("generated", "kept"), [(32, 96), (33, 128)])
def test_block_of_the_last_token_is_not_retained(generated: int, kept: int) -> None:
    """Nobody computes the last token, so it has no KV."""
    harness = Caching()
    plan = harness.start_with(hashes(3), 96, 40)
    assert harness.end(plan, generated, answer=hashes(4)[3:]) == range(kept)


@pytest.mark.parametrize(("generated", "kept"), [(0, 96), (32, 96), (33, 128)])
def test_an_answer_that_its_reader_has_ended_is_retained(generated: int, kept: int) -> None:
    """A stop string and the end of a call end it, or its client leaves."""
    harness = Caching()
    plan = harness.start_with(hashes(3), 96, 40)
    cancelled = ev.RequestCancelled(
        request_id=plan.request, generated_tokens=generated, hashes=hashes(4)[3:]
    )
    assert harness.end_by(plan, cancelled) == range(kept)
    following = harness.start_with(hashes(6), 200, 10)
    reused = [part for part in following.reserve.message.slices if part.source]
    assert sum(part.tokens for part in reused) == kept


def test_an_answer_of_a_second_attempt_is_retained_with_that_of_the_first() -> None:
    harness = Caching()
    plan = harness.start_with(hashes(3), 96, 100)
    harness.turn(*plan.joined())
    harness.turn(plan.failed(20), *plan.freed())
    again = sent(harness.wait())
    assert again.reserve.message.prompt_tokens == 116
    cancelled = ev.RequestCancelled(
        request_id=plan.request, generated_tokens=33, hashes=hashes(4)[3:]
    )
    assert harness.end_by(again, cancelled) == range(128)


@pytest.mark.parametrize(("generated", "kept"), [(18, 96), (19, 128), (60, 160)])
def test_the_answer_to_a_turn_that_fills_no_block_is_retained(generated: int, kept: int) -> None:
    """Its prompt has no whole block behind what it reuses. Prompt and answer have."""
    harness = Caching()
    harness.end(harness.start_with(hashes(3), 100, 10), 10)
    plan = harness.start_with(hashes(3), 110, 60)
    assert plan.reserve.cached == 96
    harness.end(plan, generated, answer=hashes(5)[3:])
    following = harness.start_with(hashes(6), 200, 10)
    reused = [part for part in following.reserve.message.slices if part.source]
    assert sum(part.tokens for part in reused) == kept

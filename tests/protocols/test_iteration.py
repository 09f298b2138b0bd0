"""Filling iterations: against Sarathi-Serve's Alg. 3 written out, and what it promises."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.protocols.sequencer.decode_batches import SequenceCursor, chunk_lengths


@st.composite
def row_states(draw: st.DrawFn) -> SequenceCursor:
    prompt = draw(st.integers(1, 40))
    stop = prompt + draw(st.integers(0, 5))
    position = draw(st.integers(0, stop))
    first = draw(st.integers(0, min(position, prompt - 1)))
    return SequenceCursor(next=position, prompt=prompt, stop=stop, first=first)


def test_decoding_sequences_precede_begun_prompts_and_these_new_ones() -> None:
    new, decoding = SequenceCursor(0, 100, 110), SequenceCursor(50, 50, 60)
    begun = SequenceCursor(30, 40, 50)
    assert chunk_lengths([new, decoding, begun], 20) == [9, 1, 10]
    assert chunk_lengths([new, decoding, begun], 11) == [0, 1, 10]
    assert chunk_lengths([new, decoding, begun], 5) == [0, 1, 4]
    assert chunk_lengths([new, decoding, begun], 1) == [0, 1, 0]


def test_a_prompt_whose_beginning_is_known_is_new_until_it_is_computed() -> None:
    """Or those that reuse much would pass all others for ever."""
    old, reuses = SequenceCursor(0, 100, 110), SequenceCursor(30, 40, 50, first=30)
    assert chunk_lengths([old, reuses], 20) == [20, 0]
    assert chunk_lengths([old, reuses._replace(next=31)], 20) == [11, 9]


def test_decoding_sequences_run_whatever_the_budget() -> None:
    assert chunk_lengths([SequenceCursor(8, 8, 9)] * 5 + [SequenceCursor(0, 3, 3)], 2) == [
        1
    ] * 5 + [0]


def test_a_row_that_has_computed_all_computes_nothing() -> None:
    assert chunk_lengths([SequenceCursor(10, 8, 10), SequenceCursor(8, 8, 8)], 4) == [0, 0]


@settings(max_examples=examples(300))
@given(st.lists(row_states(), max_size=12), st.integers(0, 60))
def test_the_budget_is_spent_and_only_decoding_exceeds_it(
    rows: list[SequenceCursor], budget: int
) -> None:
    lengths = chunk_lengths(rows, budget)
    decoding = [row.prompt <= row.next for row in rows]
    prefilled = sum(
        length for length, decodes in zip(lengths, decoding, strict=True) if not decodes
    )
    to_prefill = sum(row.prompt - row.next for row in rows if row.next < row.prompt)
    assert prefilled == min(max(0, budget - sum(decoding)), to_prefill)
    for row, length in zip(rows, lengths, strict=True):
        if row.next < row.prompt:
            assert 0 <= length <= row.prompt - row.next
        else:
            assert length == (row.next < row.stop)


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(row_states(), st.integers(0, 3)), max_size=12),
    st.integers(0, 40),
)
def test_each_master_fills_its_own_budget(
    rows: list[tuple[SequenceCursor, int]], budget: int
) -> None:
    states = [row._replace(master=master) for row, master in rows]
    lengths = chunk_lengths(states, budget)
    for master in range(4):
        mine = [index for index, state in enumerate(states) if state.master == master]
        alone = chunk_lengths([states[index]._replace(master=0) for index in mine], budget)
        assert [lengths[index] for index in mine] == alone


@settings(max_examples=examples(300))
@given(st.lists(row_states(), max_size=12), st.integers(1, 60))
def test_the_oldest_prompt_advances_if_the_budget_has_a_token_for_it(
    rows: list[SequenceCursor], budget: int
) -> None:
    lengths = chunk_lengths(rows, budget)
    decoding = sum(row.prompt <= row.next for row in rows)
    begun = [index for index, row in enumerate(rows) if row.first < row.next < row.prompt]
    new = [index for index, row in enumerate(rows) if row.first == row.next < row.prompt]
    if budget > decoding and (begun or new):
        assert lengths[(begun or new)[0]] > 0


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 6), st.integers(0, 10), st.randoms(use_true_random=False))
def test_a_prompt_waits_only_for_those_before_it(most: int, more: int, random: Random) -> None:
    """Up to `most` sequences join and leave at random.

    A prompt's first token comes when the prompts that joined before it could have been computed one
    after another, with what other sequences leave of the budget.
    """
    budget = most + more
    rows: list[SequenceCursor] = []
    ages: list[int] = []
    limits: list[int] = []
    for _ in range(120):
        while len(rows) < most and random.random() < 0.7:
            prompt = random.randint(1, 30)
            before = sum(max(0, row.prompt - row.next) for row in rows)
            first = random.choice([0, random.randrange(prompt)])
            rows.append(SequenceCursor(first, prompt, prompt + random.randint(0, 9), first=first))
            ages.append(0)
            limits.append(-(-(before + prompt - first) // (budget - (most - 1))))
        lengths = chunk_lengths(rows, budget)
        kept = []
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if row.next < row.prompt:
                ages[number] += 1
            rows[number] = row._replace(next=row.next + length)
            assert ages[number] <= limits[number], "waits longer than for those before it"
            leaves = rows[number].next == row.stop or random.random() < 0.02
            kept += [] if leaves else [number]
        rows, ages, limits = ([column[index] for index in kept] for column in (rows, ages, limits))


@dataclass(eq=False)
class Request:
    """A request of Alg. 3."""

    arrival: int
    prompt: int
    output: int
    done: int = 0
    sampled: int = 0


def sarathi(requests: list[Request], budget: int) -> list[dict[int, int]]:
    """Alg. 3 as it is printed, one iteration after another: what each request computes in each."""
    waiting = deque(sorted(enumerate(requests), key=lambda numbered: numbered[1].arrival))
    batch: list[tuple[int, Request]] = []
    iterations: list[dict[int, int]] = []
    while waiting or batch:
        computed: dict[int, int] = {}
        tokens = 0
        for number, request in batch:
            if request.done == request.prompt:
                tokens += 1
                computed[number] = 1
        for number, request in batch:
            if request.done < request.prompt:
                chunk = min(request.prompt - request.done, max(0, budget - tokens))
                if chunk:
                    tokens += chunk
                    computed[number] = chunk
        while waiting and waiting[0][1].arrival <= len(iterations) and tokens < budget:
            number, arrived = waiting.popleft()
            chunk = min(arrived.prompt, budget - tokens)
            tokens += chunk
            computed[number] = chunk
            batch.append((number, arrived))
        iterations.append(computed)
        for number, request in list(batch):
            if number not in computed:
                continue
            if request.done < request.prompt:
                request.done += computed[number]
            if request.done == request.prompt:
                request.sampled += 1
                if request.sampled == request.output:
                    batch.remove((number, request))
    return iterations


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 6)),
        min_size=1,
        max_size=8,
    ),
    st.integers(8, 40),
)
def test_batches_are_those_of_sarathi(sizes: list[tuple[int, int, int]], budget: int) -> None:
    """The budget is as large as the most rows, as the policy demands."""
    expected = sarathi([Request(*size) for size in sizes], budget)
    order = sorted(range(len(sizes)), key=lambda number: sizes[number][0])
    states = {
        number: SequenceCursor(0, prompt, prompt + output - 1)
        for number, (_, prompt, output) in enumerate(sizes)
    }
    for iteration, computed in enumerate(expected):
        there = [
            sequence
            for sequence in order
            if sizes[sequence][0] <= iteration and states[sequence].next < states[sequence].stop
        ]
        lengths = chunk_lengths([states[sequence] for sequence in there], budget)
        assert {sequence: n for sequence, n in zip(there, lengths, strict=True) if n} == computed
        for sequence, length in zip(there, lengths, strict=True):
            states[sequence] = states[sequence]._replace(next=states[sequence].next + length)
    assert all(state.next == state.stop for state in states.values())

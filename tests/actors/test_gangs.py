"""Gangs against transformers: the same greedy tokens, and logits within 1e-4."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from gang_driver import Request, even_slices, prefill_step, prompt_of, slices_at
from gang_threads import ThreadCell, thread_cell
from greedy_reference import greedy, greedy_tokens
from tiny_checkpoints import FAMILIES, ORIGINAL_POSITIONS, VOCAB, make_checkpoint

from csps.protocols.gang.messages import RankKvReceived, Sampling

TOKENS = 5
EVERYTHING = Sampling(temperature=0, max_tokens=TOKENS, logprobs=VOCAB)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of every family."""
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@dataclass(frozen=True)
class Layout:
    """Instances and tensor parallelism of both gangs."""

    prefill: int
    prefill_tp: int
    decode: int
    decode_tp: int

    def __str__(self) -> str:
        return f"{self.prefill}x{self.prefill_tp}-{self.decode}x{self.decode_tp}"


COVERING = [
    ("llama", Layout(1, 1, 1, 1)),
    ("llama", Layout(3, 1, 2, 1)),  # heads do not divide
    ("llama", Layout(4, 2, 1, 2)),  # fewer heads than members
    ("mistral", Layout(2, 1, 3, 1)),
    ("qwen2", Layout(2, 2, 1, 1)),
    ("qwen3", Layout(2, 1, 2, 2)),
    ("glm", Layout(4, 1, 2, 1)),
    ("internlm2", Layout(1, 2, 2, 1)),
    ("gpt_oss", Layout(3, 1, 2, 1)),
    ("gemma3_text", Layout(2, 2, 3, 1)),
]


def all_layouts() -> Iterator[tuple[str, Layout]]:
    """Return the layouts that the default suite leaves out."""
    sizes = itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 3), (1, 2))
    for family, size in itertools.product(FAMILIES, sizes):
        if (family, Layout(*size)) not in COVERING:
            yield family, Layout(*size)


@pytest.mark.parametrize(("family", "layout"), COVERING, ids=str)
async def test_tokens_and_logits_equal_transformers(
    checkpoints: dict[str, Path], family: str, layout: Layout
) -> None:
    await check_layout(checkpoints[family], family, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), list(all_layouts()), ids=str)
async def test_tokens_and_logits_equal_transformers_everywhere(
    checkpoints: dict[str, Path], family: str, layout: Layout
) -> None:
    await check_layout(checkpoints[family], family, layout)


async def check_layout(model: Path, family: str, layout: Layout) -> None:
    # Inside the original context, transformers takes LongRoPE's short factors and csps the long.
    shortest = ORIGINAL_POSITIONS + 1 if family == "phi3" else 1
    prompts = [prompt_of(length, seed) for seed, length in enumerate((67, shortest, 30))]
    requests = [
        Request(
            sequence_id=sequence_id,
            prompt=prompt,
            slices=even_slices(len(prompt), range(layout.decode)),
            master=sequence_id % layout.decode,
            sampling=EVERYTHING,
        )
        for sequence_id, prompt in enumerate(prompts)
    ]
    async with thread_cell(
        model,
        prefill=layout.prefill,
        prefill_tp=layout.prefill_tp,
        decode=layout.decode,
        decode_tp=layout.decode_tp,
    ) as cell:
        answers = await cell.generate(*requests, group=range(layout.prefill))
        for request, answer in zip(requests, answers, strict=True):
            expected, logprobs = greedy(model, request.prompt.tolist(), TOKENS)
            assert answer == expected
            torch.testing.assert_close(
                distribution(cell, request.sequence_id), logprobs, atol=1e-4, rtol=0.0
            )
        await cell.freed(*range(len(requests)))
        await cell.prefilled(*cell.steps)
        cell.check_idle()


def distribution(cell: ThreadCell, sequence_id: int) -> torch.Tensor:
    """Return (tokens, vocab) log-probabilities from which a request's tokens were sampled."""
    table = torch.full((len(cell.tokens(sequence_id)), VOCAB), torch.nan)
    for draw in cell.samples(sequence_id):
        for top_logprob in draw.top_logprobs:
            table[draw.index, top_logprob.token] = top_logprob.logprob
    return table


def has_begun(cell: ThreadCell, sequence_id: int) -> bool:
    """Return whether the request decodes."""
    return len(cell.tokens(sequence_id)) >= 3


@pytest.mark.parametrize(
    ("group", "bounds"),
    [
        ((1,), (0, 40)),
        ((2, 0), (0, 3, 40)),
        ((0, 1, 2), (0, 0, 39, 40)),  # a member without rows, another with one
        ((2, 1, 0), (0, 40, 40, 40)),
    ],
)
async def test_any_group_in_any_order_with_any_bounds(
    tiny_llama: Path, group: tuple[int, ...], bounds: tuple[int, ...]
) -> None:
    prompt = prompt_of(40)
    async with thread_cell(tiny_llama, prefill=3, decode=1) as cell:
        request = Request(sequence_id=1, prompt=prompt, slices=even_slices(40, [0]))
        answers = await cell.generate(request, group=group, bounds=bounds)
        assert answers == [greedy_tokens(tiny_llama, prompt.tolist(), 6)]
        await cell.freed(1)
        await cell.prefilled(*cell.steps)
        cell.check_idle()


async def test_kv_slices_may_be_uneven_and_in_any_order(tiny_llama: Path) -> None:
    """Spans of one instance need not be neighbours, and the master may hold none of the prompt."""
    prompts = [prompt_of(50, seed) for seed in range(3)]
    placements = [
        (slices_at([0, 1, 20, 21, 50], [2, 0, 2, 1]), 0),
        (slices_at([0, 50], [2]), 1),
        (tuple(reversed(slices_at([0, 10, 45, 50], [0, 1, 0]))), 2),
    ]
    async with thread_cell(tiny_llama, prefill=2, decode=3) as cell:
        requests = [
            Request(sequence_id=sequence_id, prompt=prompt, slices=slices, master=master)
            for sequence_id, (prompt, (slices, master)) in enumerate(
                zip(prompts, placements, strict=True)
            )
        ]
        answers = await cell.generate(*requests, group=(0, 1))
        assert answers == [greedy_tokens(tiny_llama, prompt.tolist(), 6) for prompt in prompts]
        await cell.freed(0, 1, 2)
        await cell.prefilled(*cell.steps)
        cell.check_idle()


async def test_requests_join_and_leave_while_others_decode(tiny_llama: Path) -> None:
    """Every request starts once the one before has sampled its third token, and ends before it."""
    prompts = [prompt_of(20 + seed, seed) for seed in range(4)]
    lengths = [30, 20, 12, 5]
    async with thread_cell(tiny_llama, prefill=1, decode=2) as cell:
        for sequence_id, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            request = Request(
                sequence_id=sequence_id,
                prompt=prompt,
                slices=even_slices(len(prompt), [0, 1]),
                master=sequence_id % 2,
                sampling=Sampling(temperature=0, max_tokens=length),
            )
            await cell.reserve(request)
            cell.submit(prefill_step([request.chunk()], [0]), prompt)
            await cell.join(request)
            await cell.until(partial(has_begun, cell, sequence_id))
        await cell.until(lambda: all(cell.finished(sequence_id) for sequence_id in range(4)))
        for sequence_id, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            assert cell.tokens(sequence_id) == greedy_tokens(tiny_llama, prompt.tolist(), length)
        await cell.freed(*range(4))
        cell.check_idle()


async def test_kv_that_nobody_decodes_is_not_sent(tiny_llama: Path) -> None:
    """The first token is the last one."""
    async with thread_cell(tiny_llama, prefill=2, decode=1) as cell:
        one = Sampling(temperature=0, max_tokens=1)
        request = Request(
            sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0]), sampling=one
        )
        await cell.reserve(request)
        step_id = cell.submit(prefill_step([request.chunk()], [0, 1]), request.prompt)
        await cell.prefilled(step_id)
        assert cell.tokens(1) == greedy_tokens(tiny_llama, request.prompt.tolist(), 1)
        assert cell.finished(1)
        cell.cancel(1)
        await cell.freed(1)
        assert not cell.about(RankKvReceived)
        cell.check_idle()

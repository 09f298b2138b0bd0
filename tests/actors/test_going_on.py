"""An answer that another attempt has begun continues with the tokens that it would have had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gang_driver import Request, even_slices, prompt_of
from gang_threads import thread_cell

from csps.models.tokenizers.grammar import regex_grammar
from csps.protocols.gang.messages import Sampling

TOKENS = 8
GREEDY = Sampling(temperature=0, max_tokens=TOKENS)
SEEDED = Sampling(temperature=0.8, top_p=0.9, seed=7, max_tokens=TOKENS)
PENALISED = replace(
    SEEDED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, min_tokens=TOKENS
)


GRAMMAR = replace(SEEDED, grammar=regex_grammar("([a-f][0-9]?x){1,99}"), bad_words=((97, 120),))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED, GRAMMAR])
async def test_a_resumed_answer_equals_an_undisturbed_one(
    tiny_llama: Path, sampling: Sampling
) -> None:
    prompt = prompt_of(41)
    whole = Request(sequence_id=1, prompt=prompt, sampling=sampling, slices=even_slices(41, (0, 1)))
    async with thread_cell(tiny_llama, prefill=2, decode=2) as cell:
        [tokens] = await cell.generate(whole, group=(0, 1))
        assert len(tokens) == TOKENS
        for sequence_id, before in enumerate((1, 3, TOKENS - 1), 2):
            again = np.concatenate((prompt, np.array(tokens[:before], "<i4")))
            rest = Request(
                sequence_id=sequence_id,
                prompt=again,
                generated_tokens=tuple(tokens[:before]),
                sampling=sampling,
                master=1,
                slices=even_slices(len(again), (0, 1)),
            )
            assert await cell.generate(rest, group=(0, 1)) == [tokens[before:]]
            assert [draw.index for draw in cell.samples(sequence_id)] == list(range(before, TOKENS))
            assert cell.samples(sequence_id)[-1].finish_reason == "length"
            await cell.freed(sequence_id)
        await cell.freed(1)
        await cell.prefilled(*cell.steps)
        cell.check_idle()

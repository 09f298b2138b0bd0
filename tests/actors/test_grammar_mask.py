"""Answers under a grammar are sampled as it allows, and alike wherever their sampling goes on."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
import torch
from bounded_schemas import bounded_schemas
from llguidance import LLMatcher
from tiny_checkpoints import make_tokenizer

from csps.actors.sampling import grammar_mask
from csps.actors.sampling.batch_sampler import Sample, sample_batch
from csps.actors.sampling.grammar_mask import COMPILE_WAIT_S
from csps.actors.sampling.token_sampler import TokenSampler, sampler_of
from csps.models.network.checkpoint_json import InvalidTextError
from csps.models.tokenizers.grammar import (
    CACHED_GRAMMARS,
    CACHED_TEXT,
    COMPILE_S,
    Grammars,
    GrammarState,
    json_grammar,
    regex_grammar,
)
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.core.errors import DeadlineExceeded, InvalidRequest
from csps.protocols.gang.messages import SamplerInputs, Sampling
from csps.protocols.rpc.schema import encode

VOCAB = 272
END = 257
LONGEST = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB)


class SlowCompiles:
    """Counts what is compiled, and lets it wait until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.count = threading.Event(), 0
        compile_now = Grammars._compile

        def compile_later(grammars: Grammars, grammar: str) -> LLMatcher:
            self.count += 1
            assert self.go_on.wait(60), "nobody lets it go on"
            return compile_now(grammars, grammar)

        monkeypatch.setattr(Grammars, "_compile", compile_later)


def logits_of(seed: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + index)
    return 2 * torch.randn(1, VOCAB, generator=generator)


def sampled(sampler: TokenSampler, seed: int, index: int) -> Sample:
    (sample,) = sample_batch([sampler], logits_of(seed, index), [index])
    assert isinstance(sample, Sample), sample
    return sample


def check_answers(grammars: Grammars, tokenizer: Tokenizer, *, kinds: int, answers: int) -> None:
    """Check random answers, each of which another rank goes on with somewhere."""
    for number, schema in enumerate(bounded_schemas(kinds)):
        grammar = json_grammar(schema)
        for answer in range(answers):
            seed = answers * number + answer
            sampling = Sampling(
                seed=seed, max_tokens=LONGEST, stop_token_ids=(END,), grammar=grammar
            )
            sampler, tokens = TokenSampler(sampling, VOCAB, grammars=grammars), list[int]()
            moved_at = seed % 13
            while True:
                index = len(tokens)
                if index == moved_at:
                    packed = encode(
                        SamplerInputs(
                            sampling=sampling, generated_tokens=np.array(tokens, "<i4").tobytes()
                        )
                    )
                    sampler = sampler_of(packed, VOCAB, grammars)
                sample = sampled(sampler, seed, index)
                if sample.finish_reason == "stop":
                    break
                assert sample.finish_reason is None, f"cut: {schema}"
                tokens.append(sample.token)
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


def test_random_answers_validate_although_their_sampling_moves(
    grammars: Grammars, folder: Path
) -> None:
    check_answers(grammars, Tokenizer(folder), kinds=10, answers=3)


@pytest.mark.slow
def test_a_thousand_answers_under_fifty_schemas_validate(grammars: Grammars, folder: Path) -> None:
    check_answers(grammars, Tokenizer(folder), kinds=50, answers=20)


def test_a_move_goes_on_with_the_tokens_that_an_undisturbed_answer_has(grammars: Grammars) -> None:
    sampling = Sampling(seed=3, max_tokens=99, grammar=regex_grammar("([a-f][0-9]?x){1,99}"))
    whole = TokenSampler(sampling, VOCAB, grammars=grammars)
    tokens = [sampled(whole, 1, index).token for index in range(30)]
    for at in (1, 7, 29):
        moved = TokenSampler(sampling, VOCAB, grammars=grammars)
        moved.catch_up(tokens[:at])
        moved.catch_up(tokens[:at])  # what it has counted already, it does not count again
        assert [sampled(moved, 1, index).token for index in range(at, 30)] == tokens[at:]


@pytest.mark.parametrize("beside", [True, False])
def test_masks_are_found_beside_the_network_where_they_take_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    found_by: list[str] = []
    allowed_now = GrammarState.allowed

    def allowed(state: GrammarState, ends: frozenset[int]) -> npt.NDArray[np.uint8]:
        found_by.append(threading.current_thread().name)
        return allowed_now(state, ends)

    monkeypatch.setattr(GrammarState, "allowed", allowed)
    monkeypatch.setattr(grammar_mask, "BESIDE_S", 0.0 if beside else math.inf)
    sampling = Sampling(seed=3, max_tokens=99, grammar=regex_grammar("([a-f][0-9]?x){1,99}"))
    sampler = TokenSampler(sampling, VOCAB, grammars=grammars)
    other = "grammar-masks" if beside else threading.current_thread().name
    tokens = [sampled(sampler, 1, index).token for index in range(30)]
    assert sampler.grammar_mask(0) is not None  # waits for the mask that may be under way
    # The first mask is found beside the network in any case.
    assert found_by == ["grammar-masks"] + [other] * (len(found_by) - 1)
    assert len(found_by) == 31
    again = TokenSampler(sampling, VOCAB, grammars=grammars)
    assert [sampled(again, 1, index).token for index in range(30)] == tokens


def test_rows_do_not_wait_for_a_grammar_that_compiles_slowly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own row fails for now. Another attempt finds it compiled, and it is compiled once."""
    grammars, compiles = Grammars(folder, VOCAB), SlowCompiles(monkeypatch)
    slow = Sampling(grammar=regex_grammar("[a-c]{9}"))
    samplers = [TokenSampler(slow, VOCAB, grammars=grammars), TokenSampler(Sampling(), VOCAB)]
    samplers += [TokenSampler(slow, VOCAB, grammars=grammars) for _ in range(14)]
    began = time.monotonic()
    failed, fine, *others = sample_batch(samplers, logits_of(1, 0).repeat(16, 1), [0] * 16)
    assert time.monotonic() - began < 8 * COMPILE_WAIT_S, "each row has waited"
    assert isinstance(fine, Sample)
    for sample in (failed, *others):
        assert isinstance(sample, DeadlineExceeded)
    compiles.go_on.set()
    grammars.compiled(slow.grammar).result(10)
    again = sampled(TokenSampler(slow, VOCAB, grammars=grammars), 1, 0)
    assert ord("a") - 33 <= again.token <= ord("c") - 33
    assert compiles.count == 1


def test_compiled_grammars_are_dropped_beyond_their_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, compiles = Grammars(folder, VOCAB), SlowCompiles(monkeypatch)
    compiles.go_on.set()
    for number in range(CACHED_GRAMMARS + 1):
        grammars.compiled(regex_grammar(f"a{number}")).result(10)
    grammars.compiled(regex_grammar("a1"))
    assert compiles.count == CACHED_GRAMMARS + 1
    grammars.compiled(regex_grammar("a0")).result(10)
    assert compiles.count == CACHED_GRAMMARS + 2
    large = regex_grammar("b" * (CACHED_TEXT - 100))
    grammars.compiled(large).result(10)
    grammars.compiled(regex_grammar("a1")).result(10)
    assert compiles.count == CACHED_GRAMMARS + 4, "the large one has replaced all"


def test_a_grammar_that_takes_long_to_compile_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(0.0, 1.5 * COMPILE_S)
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    with pytest.raises(InvalidTextError, match="longer than 1 s to compile"):
        grammars.check(regex_grammar("a"))


def test_a_row_without_a_grammar_is_sampled_as_if_it_were_alone(grammars: Grammars) -> None:
    free, bound = Sampling(seed=4), Sampling(seed=5, grammar=regex_grammar("[a-c]{9}"))
    alone = TokenSampler(free, VOCAB)
    pair = [TokenSampler(free, VOCAB), TokenSampler(bound, VOCAB, grammars=grammars)]
    for index in range(5):
        logits = torch.cat([logits_of(1, index), logits_of(2, index)])
        first, second = sample_batch(pair, logits, [index, index])
        assert isinstance(first, Sample)
        assert isinstance(second, Sample)
        assert first.token == sampled(alone, 1, index).token
        assert ord("a") - 33 <= second.token <= ord("c") - 33


def test_a_grammar_that_allows_no_token_fails_its_own_row(grammars: Grammars) -> None:
    """Here the answer is complete, and the request has no token that ends it."""
    sampler = TokenSampler(Sampling(grammar=regex_grammar("a")), VOCAB, grammars=grammars)
    token = sampled(sampler, 1, 0).token
    failed, fine = sample_batch(
        [sampler, TokenSampler(Sampling(), VOCAB)], logits_of(1, 1).repeat(2, 1), [1, 1]
    )
    assert token == ord("a") - 33
    assert isinstance(failed, InvalidRequest)
    assert isinstance(fine, Sample)


def test_allowed_tokens_and_bad_words(grammars: Grammars) -> None:
    sampling = Sampling(allowed_token_ids=(5, 6, 7), bad_words=((5, 6), (7,)), max_tokens=999)
    sampler, tokens = TokenSampler(sampling, VOCAB), list[int]()
    for index in range(60):
        tokens.append(sampled(sampler, 9, index).token)
    assert set(tokens) == {5, 6}
    assert (5, 6) not in set(pairwise(tokens))

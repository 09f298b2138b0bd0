"""Sampling against a naive reference in plain Python, against transformers, and by chi-square."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor
from transformers.generation import logits_process as hf

from csps.actors.sampling.batch_sampler import Sample, edited, sample_batch, uniform
from csps.actors.sampling.token_sampler import BadLogits, TokenSampler
from csps.kernels.sampling import candidates
from csps.protocols.core.errors import CspsError, InvalidRequest
from csps.protocols.gang.messages import Sampling

VOCAB = 12
GREEDY = Sampling(temperature=0.0, max_tokens=1000)
RANDOM = Sampling(max_tokens=10**9)


def logits_of(seed: int, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def sampled_by(sampler: TokenSampler, logits_v: Tensor, index: int) -> Sample:
    """Sample a batch of one; raise its error if there is one."""
    (sampled,) = sample_batch([sampler], logits_v[None], [index])
    if isinstance(sampled, CspsError):
        raise sampled
    return sampled


def sampler_after(sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> TokenSampler:
    sampler = TokenSampler(sampling, VOCAB, prompt)
    for token in answer:
        sampler.observe(token)
    return sampler


def scores_of(sampling: Sampling, logits_v: Tensor) -> Tensor:
    """Return the edited logits of the token that follows ANSWER."""
    sampler = sampler_after(sampling, PROMPT, ANSWER)
    return edited([sampler], logits_v[None], [len(ANSWER)])[0]


# --- the reference -----------------------------------------------------------------------------


def reference_scores(
    logits: list[float], s: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    scores = []
    for token, logit in enumerate(logits):
        score = logit + s.logit_bias.get(token, 0.0)
        if token in s.stop_token_ids and len(answer) < s.min_tokens:
            score = -math.inf
        if token in prompt or token in answer:
            score = score / s.repetition_penalty if score > 0 else score * s.repetition_penalty
        count = list(answer).count(token)
        scores.append(score - s.frequency_penalty * count - s.presence_penalty * (count > 0))
    return scores


def softmax(scores: dict[int, float]) -> dict[int, float]:
    peak = max(scores.values())
    weights = {token: math.exp(score - peak) for token, score in scores.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def nucleus(probs: dict[int, float], p: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    for token in sorted(probs, key=lambda token: (-probs[token], token)):
        if kept and sum(kept.values()) >= p:
            break
        kept[token] = probs[token]
    return kept


def reference_distribution(scores: list[float], s: Sampling) -> dict[int, float]:
    kept = {token: (score - max(scores)) / s.temperature for token, score in enumerate(scores)}
    if s.top_k:
        lowest = sorted(kept.values(), reverse=True)[: s.top_k][-1]
        kept = {token: score for token, score in kept.items() if score >= lowest}
    probs = softmax(kept)
    if s.top_p < 1.0:
        probs = nucleus(probs, s.top_p)
    probs = {token: p for token, p in probs.items() if p >= s.min_p * max(probs.values())}
    return {token: p / sum(probs.values()) for token, p in probs.items() if p > 0}


def distribution(scores_v: Tensor, sampling: Sampling) -> dict[int, float]:
    filters = TokenSampler(sampling, len(scores_v)).filters
    ((rows, ids_bc, probs_bc),) = candidates(scores_v[None].float(), [filters])
    assert rows.tolist() == [0]
    ids_c = torch.arange(len(scores_v)) if ids_bc is None else ids_bc[0]
    assert (ids_c.diff() > 0).all()
    probs = (probs_bc[0] / probs_bc.sum()).tolist()
    return {token: p for token, p in zip(ids_c.tolist(), probs, strict=True) if p > 0}


# --- filters -----------------------------------------------------------------------------------

# Coarse values and the prime 211: no nearly equal tokens, and no top-p that up to 13 equal tokens
# reach exactly. Rounding would decide there.
LEVELS = st.one_of(st.integers(-80, 80).map(lambda n: n / 8), st.just(-math.inf))
SHARES = st.integers(0, 211).map(lambda n: n / 211)
FILTERS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 1.7]),
    top_k=st.integers(0, 14),
    top_p=SHARES,
    min_p=SHARES,
)


@settings(max_examples=examples(400))
@given(logits=st.lists(LEVELS, min_size=1, max_size=12), sampling=FILTERS)
def test_filters_keep_what_the_reference_keeps(logits: list[float], sampling: Sampling) -> None:
    logits = [*logits, 0.0]  # one of them must be possible
    expected = reference_distribution(logits, sampling)
    assert distribution(torch.tensor(logits), sampling) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_top_p_of_a_large_vocabulary(p: float, scale: float) -> None:
    logits_v = logits_of(5, vocab=5000, scale=scale)
    ids_c = torch.tensor(list(distribution(logits_v, replace(RANDOM, top_p=p))))
    probs_v, order = logits_v.double().softmax(0).sort(descending=True, stable=True)
    mass = probs_v.cumsum(0)
    count = len(ids_c)
    assert ids_c.tolist() == sorted(order[:count].tolist())
    assert mass[count - 1] >= p - 1e-12
    assert count == 1 or mass[count - 2] < p + 1e-12


def test_equal_tokens_at_the_edge_of_top_p_stay_by_id() -> None:
    assert set(distribution(torch.zeros(8), replace(RANDOM, top_p=0.5))) == {0, 1, 2, 3}


def test_tiny_temperature_does_not_overflow() -> None:
    logits_v = torch.tensor([3e38, 1.0, -3e38])  # their quotients are no fp32 numbers
    assert distribution(logits_v, replace(RANDOM, temperature=2e-5)) == {0: 1.0}


# --- penalties ---------------------------------------------------------------------------------

PROMPT, ANSWER = [1, 4, 4, 7], [2, 4, 2, 2, 9]

EDITS = {
    "bias": Sampling(logit_bias={3: 2.5, 0: -100.0}),
    "minimum": Sampling(min_tokens=6, stop_token_ids=(2, 11, 50_000)),
    "minimum reached": Sampling(min_tokens=5, stop_token_ids=(2, 11)),
    "repetition": Sampling(repetition_penalty=1.3),
    "repetition reward": Sampling(repetition_penalty=0.7),
    "frequency": Sampling(frequency_penalty=0.6),
    "presence": Sampling(presence_penalty=-0.4),
    "all": Sampling(
        logit_bias={9: 1.0, 5: -1.0, 2: 3.0},
        min_tokens=9,
        stop_token_ids=(9,),
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    ),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_match_the_reference(name: str, dtype: torch.dtype) -> None:
    logits_v = logits_of(3).to(dtype)
    untouched = logits_v.clone()
    scores_v = scores_of(EDITS[name], logits_v)
    expected = reference_scores(untouched.tolist(), EDITS[name], PROMPT, ANSWER)
    assert scores_v.tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(logits_v, untouched)


def test_a_sample_counts_its_own_token() -> None:
    """Greedy sampling with a penalty that forbids repetition says everything once."""
    sampler = TokenSampler(replace(GREEDY, presence_penalty=100.0), VOCAB)
    logits_v = logits_of(1)
    sampled = [sampled_by(sampler, logits_v, index).token for index in range(VOCAB)]
    assert sampled == logits_v.argsort(descending=True).tolist()


# --- transformers ------------------------------------------------------------------------------


def transformers_distribution(logits_v: Tensor, s: Sampling) -> dict[int, float]:
    """Run PROMPT and ANSWER through the processors of `generate`, in its order."""
    chain = hf.LogitsProcessorList(
        [
            hf.SequenceBiasLogitsProcessor([[[t], b] for t, b in s.logit_bias.items()]),
            hf.MinNewTokensLengthLogitsProcessor(
                len(PROMPT), s.min_tokens, list(s.stop_token_ids), device="cpu"
            ),
            hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty),
            hf.TemperatureLogitsWarper(s.temperature),
            hf.TopKLogitsWarper(s.top_k),
            hf.TopPLogitsWarper(s.top_p),
            hf.MinPLogitsWarper(s.min_p),
        ]
    )
    probs_v = chain(torch.LongTensor([PROMPT + ANSWER]), logits_v[None].double())[0].softmax(0)
    return {token: p for token, p in enumerate(probs_v.tolist()) if p > 0}


@pytest.mark.parametrize("seed", range(20))
def test_distribution_is_that_of_transformers(seed: int) -> None:
    sampling = Sampling(
        temperature=(0.3, 0.8, 1.0, 2.0)[seed % 4],
        top_k=(3, 6, 12)[seed % 3],
        top_p=(0.4, 0.8, 0.95)[seed // 3 % 3],
        min_p=(0.0, 0.05, 0.3)[seed // 5 % 3],
        repetition_penalty=(0.8, 1.0, 1.5)[seed // 2 % 3],
        logit_bias={seed % VOCAB: 1.5, 3: -2.0},
        min_tokens=seed % 10,
        stop_token_ids=(seed % 7, 8),
    )
    logits_v = logits_of(100 + seed)
    scores_v = scores_of(sampling, logits_v)
    expected = transformers_distribution(logits_v, sampling)
    assert distribution(scores_v, sampling) == pytest.approx(expected, rel=1e-5)


# --- randomness --------------------------------------------------------------------------------


def assert_fits(counts: Counter[int], probs: dict[int, float]) -> None:
    """Check Pearson's chi-square, up to five standard deviations above its mean; seeds are
    fixed."""
    samples, freedom = sum(counts.values()), len(probs) - 1
    assert set(counts) <= set(probs)
    assert min(probs.values()) * samples > 5, "the test has too few samples"
    chi_square = sum((counts[t] - samples * p) ** 2 / (samples * p) for t, p in probs.items())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.5),
        Sampling(temperature=0.7, top_k=5),
        Sampling(top_p=0.9),
        Sampling(temperature=2.0, min_p=0.2),
        Sampling(temperature=1.3, top_k=8, top_p=0.95, min_p=0.02, logit_bias={3: 4.0}),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("vary", ["index", "seed"])
def test_samples_follow_the_exact_distribution(sampling: Sampling, vary: str) -> None:
    logits_v, samples = logits_of(8, scale=1.0), 2500
    scores = reference_scores(logits_v.tolist(), sampling, [], [])
    if vary == "index":
        sampler = TokenSampler(replace(sampling, seed=42), VOCAB)
        counts = Counter(sampled_by(sampler, logits_v, index).token for index in range(samples))
    else:
        samplers = (TokenSampler(replace(sampling, seed=seed), VOCAB) for seed in range(samples))
        counts = Counter(sampled_by(sampler, logits_v, 3).token for sampler in samplers)
    assert_fits(counts, reference_distribution(scores, sampling))


@pytest.mark.parametrize(
    ("seed_step", "index_step"), [(0, 1), (1, 0), (1, 1), (1, -1)], ids=lambda step: f"{step:+d}"
)
def test_neighboring_samples_are_independent(seed_step: int, index_step: int) -> None:
    def cell(i: int) -> int:
        seed, index = i // 100, i % 100 + 1
        first, second = uniform(seed, index), uniform(seed + seed_step, index + index_step)
        return int(first * 8) * 8 + int(second * 8)

    assert_fits(Counter(map(cell, range(20_000))), dict.fromkeys(range(64), 1 / 64))


def test_seed_zero_is_the_published_splitmix64_sequence() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [uniform(0, index) for index in range(4)] == [(word >> 12) / 2**52 for word in published]


def test_any_integer_is_a_seed() -> None:
    seeds = [-1, 0, 1, 2**31, 2**63, 2**64 - 2]
    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)
    assert all(0 <= uniform(seed, index) < 1 for seed in seeds for index in (0, 1, 10**6))


def test_a_sample_depends_on_seed_and_index_only() -> None:
    logits_bv = torch.stack([logits_of(seed) for seed in range(40)])
    sampling = replace(RANDOM, seed=7, frequency_penalty=0.5)
    alone = TokenSampler(sampling, VOCAB)
    expected = [
        sampled_by(alone, logits_v, index).token for index, logits_v in enumerate(logits_bv)
    ]

    moved = [TokenSampler(sampling, VOCAB) for _ in range(3)]  # three ranks take turns
    for index, logits_v in enumerate(logits_bv):
        turn = index % 3
        bystander = TokenSampler(replace(RANDOM, seed=index), VOCAB)
        _, draw = sample_batch(
            [bystander, moved[turn]], torch.stack([logits_v, logits_v]), [5, index]
        )
        assert isinstance(draw, Sample)
        assert draw.token == expected[index]
        for rank in {0, 1, 2} - {turn}:
            moved[rank].observe(draw.token)


def test_impossible_tokens_are_never_sampled() -> None:
    logits_v = torch.full((VOCAB,), -math.inf)
    logits_v[[4, 6]] = 0.0
    sampler = TokenSampler(RANDOM, VOCAB)
    assert {sampled_by(sampler, logits_v, index).token for index in range(200)} == {4, 6}


# --- greedy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_takes_the_first_of_equals(temperature: float) -> None:
    logits_v = torch.zeros(VOCAB)
    logits_v[[5, 3, 9]] = 2.0
    sampling = replace(GREEDY, temperature=temperature, top_k=1, top_p=0.1)
    assert sampled_by(TokenSampler(sampling, VOCAB), logits_v, 0).token == 3
    assert sample_batch([TokenSampler(sampling, VOCAB)], logits_v[None], [0]) == [Sample(token=3)]


def test_a_batch_samples_what_single_requests_sample() -> None:
    logits_bv = torch.stack([logits_of(seed) for seed in range(6)])
    mixed = [GREEDY, RANDOM, replace(GREEDY, logit_bias={1: 50.0}), replace(GREEDY, logprobs=2)]
    for samplings in ([GREEDY] * 6, [*mixed, GREEDY, RANDOM]):
        indices = [3, 0, 5, 1, 2, 999]
        singly = [
            sampled_by(TokenSampler(s, VOCAB), row, index)
            for s, row, index in zip(samplings, logits_bv, indices, strict=True)
        ]
        assert (
            sample_batch([TokenSampler(s, VOCAB) for s in samplings], logits_bv, indices) == singly
        )


# --- reports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, replace(RANDOM, temperature=0.5, top_k=2)])
def test_logprobs_are_those_of_the_logits_as_they_came(sampling: Sampling) -> None:
    logits_v = logits_of(4)
    logprobs_v = logits_v.double().log_softmax(0)
    asked = replace(sampling, logprobs=3, logit_bias={2: 100.0}, repetition_penalty=2.0)
    draw = sampled_by(TokenSampler(asked, VOCAB, [2]), logits_v, 0)
    assert draw.token == 2
    assert draw.logprob == pytest.approx(float(logprobs_v[2]), rel=1e-5)
    best = logprobs_v.sort(descending=True)
    assert [entry.token for entry in draw.top] == best.indices[:3].tolist()
    assert [entry.logprob for entry in draw.top] == pytest.approx(best.values[:3].tolist())


def test_logprobs_are_reported_only_on_request() -> None:
    draw = sampled_by(TokenSampler(GREEDY, VOCAB), logits_of(4), 0)
    assert (draw.logprob, draw.top) == (None, ())
    draw = sampled_by(TokenSampler(replace(GREEDY, logprobs=0), VOCAB), logits_of(4), 0)
    assert draw.logprob is not None
    assert draw.top == ()
    draw = sampled_by(TokenSampler(replace(GREEDY, logprobs=VOCAB + 5), VOCAB), logits_of(4), 0)
    assert len(draw.top) == VOCAB


@pytest.mark.parametrize(
    ("sampling", "index", "expected"),
    [
        (Sampling(max_tokens=3), 1, None),
        (Sampling(max_tokens=3), 2, "length"),
        (Sampling(max_tokens=3, stop_token_ids=(3, 5)), 0, "stop"),
        (Sampling(max_tokens=3, stop_token_ids=(5,)), 2, "stop"),
        (Sampling(max_tokens=3, stop_token_ids=(5,), min_tokens=1), 0, None),
        (Sampling(max_tokens=3, stop_token_ids=(5,), min_tokens=1), 1, "stop"),
        (Sampling(max_tokens=1, stop_token_ids=(5,), min_tokens=1), 0, "length"),
    ],
)
def test_finish_reason(sampling: Sampling, index: int, expected: str | None) -> None:
    logits_v = torch.zeros(VOCAB)
    logits_v[5] = 1.0
    sampler = TokenSampler(replace(sampling, temperature=0.0), VOCAB)
    assert sampled_by(sampler, logits_v, index).finish_reason == expected


# --- what cannot be drawn ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, replace(GREEDY, presence_penalty=1.0)])
@pytest.mark.parametrize(
    ("value", "complaint"),
    [(math.nan, "token 6 hold NaN"), (math.inf, r"token 6 hold \+inf")],
)
def test_bad_logits_are_named(sampling: Sampling, value: float, complaint: str) -> None:
    logits_v = logits_of(2)
    logits_v[7] = value
    with pytest.raises(BadLogits, match=complaint):
        sampled_by(TokenSampler(sampling, VOCAB), logits_v, 6)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_row_without_a_possible_token_is_refused(sampling: Sampling) -> None:
    with pytest.raises(BadLogits, match="all logits of token 3 are -inf"):
        sampled_by(TokenSampler(sampling, VOCAB), torch.full((VOCAB,), -math.inf), 3)


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_forbidding_every_token_is_the_clients_mistake(sampling: Sampling) -> None:
    unending = replace(sampling, min_tokens=2, stop_token_ids=tuple(range(VOCAB)))
    with pytest.raises(InvalidRequest, match="every token is forbidden"):
        sampled_by(TokenSampler(unending, VOCAB), logits_of(0), 1)
    samplers = [TokenSampler(parameters, VOCAB) for parameters in (sampling, unending)]
    samples = sample_batch(samplers, torch.stack([logits_of(0)] * 2), [1, 1])
    assert [type(draw) for draw in samples] == [Sample, InvalidRequest]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_bad_row_of_a_batch_spoils_no_other(sampling: Sampling) -> None:
    logits_bv = torch.stack([logits_of(seed) for seed in range(3)])
    logits_bv[1, 0] = math.nan
    samples = sample_batch([TokenSampler(sampling, VOCAB) for _ in range(3)], logits_bv, [0, 1, 2])
    assert [type(draw) for draw in samples] == [Sample, BadLogits, Sample]
    assert str(samples[1]) == "the logits of token 1 hold NaN"


def test_bias_outside_the_vocabulary_is_the_clients_mistake() -> None:
    with pytest.raises(InvalidRequest, match="token 12; the vocabulary has 12 tokens") as caught:
        TokenSampler(replace(RANDOM, logit_bias={12: 1.0}), VOCAB)
    assert caught.value.param == "logit_bias"


# --- a whole batch -------------------------------------------------------------------------------

RECORDED: list[tuple[Sampling, list[int]]] = [
    (RANDOM, [43, 809, 11942, 4934, 3, 1157, 29840, 3765, 47, 629, 4861, 5526]),
    (
        replace(RANDOM, temperature=0.7, top_p=0.9),
        [20, 811, 13474, 3030, 3, 1004, 9208, 4962, 2, 629, 1402, 4079],
    ),
    (
        replace(RANDOM, temperature=1.3, top_k=20),
        [30, 811, 5953, 688, 20, 200, 340, 612, 26, 434, 24625, 5314],
    ),
    (
        replace(RANDOM, top_k=50, top_p=0.8, min_p=0.02),
        [13, 1201, 30215, 4921, 44, 229, 4059, 1082, 6, 1128, 27799, 1887],
    ),
    (
        replace(RANDOM, min_p=0.05, temperature=1.9),
        [27, 1060, 5311, 4451, 41, 522, 17440, 5632, 1, 972, 9468, 3939],
    ),
    (
        replace(RANDOM, top_p=0.999, temperature=2.0),
        [46, 1116, 30240, 1281, 41, 1207, 4132, 2889, 5, 499, 3240, 2853],
    ),
    (
        replace(
            RANDOM, top_k=700, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={3: 2.0}
        ),
        [43, 633, 24500, 1595, 11, 383, 691, 405, 4, 1128, 4353, 3203],
    ),
]
"""Tokens of twelve (seed, index, logits) by code that sampled row by row: a seed promises them."""


def test_seeds_sample_what_they_have_always_sampled() -> None:
    for case, (sampling, expected) in enumerate(RECORDED):
        sampled = []
        for i in range(12):
            vocab, scale = [(50, 1.0), (1283, 3.0), (32000, 0.3), (6000, 2.0)][i % 4]
            sampler = TokenSampler(replace(sampling, seed=10 * case + i), vocab, [1, 2, 3])
            sampled.append(sampled_by(sampler, logits_of(i, vocab, scale), i).token)
        assert sampled == expected


KINDS = [
    GREEDY,
    RANDOM,
    replace(RANDOM, top_k=5, seed=9, logprobs=2),
    replace(GREEDY, presence_penalty=1.5, logprobs=0),
    replace(RANDOM, top_p=0.7, repetition_penalty=1.3, logit_bias={2: 1.0}),
    replace(RANDOM, min_tokens=30, stop_token_ids=(1, 2, 3), frequency_penalty=0.2),
    replace(GREEDY, min_tokens=3, stop_token_ids=tuple(range(VOCAB))),
    replace(RANDOM, min_tokens=3, stop_token_ids=(4,), logprobs=2),
]


@settings(max_examples=examples(150), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    index=st.integers(0, 5),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_row_of_a_batch_is_sampled_as_if_it_were_alone(
    kinds: list[Sampling], index: int, seed: int, dtype: torch.dtype
) -> None:
    logits_bv = torch.stack([logits_of(seed + row) for row in range(len(kinds))]).to(dtype)
    untouched = logits_bv.clone()
    together = [sampler_after(kind, PROMPT, ANSWER) for kind in kinds]
    alone = [sampler_after(kind, PROMPT, ANSWER) for kind in kinds]
    indices = [index + row for row in range(len(kinds))]
    samples = sample_batch(together, logits_bv, indices)
    for row, draw in enumerate(samples):
        (expected,) = sample_batch([alone[row]], logits_bv[row : row + 1], [indices[row]])
        assert repr(draw) == repr(expected)
    assert torch.equal(logits_bv, untouched)
    # What was remembered is the same as well.
    again = sample_batch(together, logits_bv, indices)
    for row, draw in enumerate(again):
        (expected,) = sample_batch([alone[row]], logits_bv[row : row + 1], [indices[row]])
        assert repr(draw) == repr(expected)


def test_a_long_list_of_stop_tokens_is_a_mask() -> None:
    """Sampling with 151,936 stop tokens does not walk the list."""
    vocab = 151_936
    sampling = replace(GREEDY, stop_token_ids=tuple(range(1, vocab)), min_tokens=2)
    sampler = TokenSampler(sampling, vocab)
    logits_v = logits_of(0, vocab)
    assert sampled_by(sampler, logits_v, 0) == Sample(token=0)
    assert sampled_by(sampler, logits_v, 2).finish_reason == "stop"

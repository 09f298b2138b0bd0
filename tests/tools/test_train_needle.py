"""Training of the default model: reproducible, resumable, and what a batch may see."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from csps.models.needle_prompts.words import KEYS
from csps.tools.train_needle import loss as attention
from csps.tools.train_needle.batch import TrainingBatch
from csps.tools.train_needle.batch_maker import BatchMaker
from csps.tools.train_needle.loss import (
    ENOUGH,
    KEY,
    ROWS,
    VALUE,
    cross_entropy,
    layer_states,
    overlooked,
)
from csps.tools.train_needle.model import DEEP, NEEDLE, Architecture, build_model, build_tokenizer
from csps.tools.train_needle.stages import ALL_FILLERS, RECIPES, STAGES, Recipe, Stage
from csps.tools.train_needle.texts import TrainingTexts
from csps.tools.train_needle.trainer import Trainer

TINY = Stage(name="tiny", steps=4, batch=2, tokens=64, needles=(1, 3), questions=3, hard_kinds=0.3)
EVERYTHING = replace(
    TINY, tokens=128, fillers=ALL_FILLERS, first=0.5, everyday=True, misspelled=0.2, continued=8
)
TEXTS = TrainingTexts(
    ("This licence grants you no rights.\n\nIt is short; read it twice.", "A second document."),
    ("def double(x: int) -> int:\n    return 2 * x\n",),
)


def draw(stage: Stage, step: int = 0, *, seed: int = 0) -> TrainingBatch:
    return BatchMaker(build_tokenizer(), seed, TEXTS).draw(stage, step)


@pytest.mark.parametrize("stage", [*STAGES, EVERYTHING], ids=lambda stage: stage.name)
def test_same_seed_same_batch(stage: Stage) -> None:
    small = replace(stage, batch=2)
    first, same, other = draw(small, 7), draw(small, 7), draw(small, 7, seed=1)
    assert torch.equal(first.ids, same.ids)
    assert torch.equal(first.mask, same.mask)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


@pytest.mark.parametrize("filler", ALL_FILLERS)
def test_positions_increase_within_what_a_question_sees(filler: str) -> None:
    pad = build_tokenizer().pad_token_id
    batch = draw(replace(EVERYTHING, fillers={filler: 1.0}))
    for ids, positions, mask in zip(batch.ids, batch.positions, batch.mask[:, 0], strict=True):
        for row in mask[ids != pad]:
            seen = positions[row > -torch.inf]
            assert torch.all(seen[1:] > seen[:-1])


def test_a_question_does_not_see_another_one() -> None:
    tokenizer = build_tokenizer()
    batch = draw(replace(TINY, batch=1))
    (ends,) = torch.where(batch.ids[0] == tokenizer.eos_token_id)
    last = batch.mask[0, 0, ends[-1]]
    assert (last[ends[:-1]] == -torch.inf).all()


@pytest.mark.parametrize("seen", [False, True])
def test_a_question_before_the_text_is_seen_by_its_answer(seen: bool) -> None:
    """The whole text or nothing else sees it, and its answer sees no second question."""
    tokenizer = build_tokenizer()
    questions = 1 if seen else 2
    # A share of 1 lets the text see its question; below it, chance decides and 0.99 of 2 is both.
    stage = replace(TINY, batch=1, first=1.0 if seen else 0.99, questions=questions)
    marks = [tokenizer.convert_tokens_to_ids("?"), tokenizer.convert_tokens_to_ids("ĠThe")]
    for step in range(200):
        batch = draw(stage, step)
        ids, mask = batch.ids[0], batch.mask[0, 0]
        (asked,), (begun,) = (torch.where(ids == mark) for mark in marks)
        text = begun[0]
        before = asked[asked < text]
        if len(before) == questions and tokenizer.bos_token_id == ids[0]:
            break
    else:
        pytest.fail("no text with so many questions before it")
    assert (mask[text, before] > -torch.inf).all() == seen
    last = ids != tokenizer.pad_token_id
    answer = mask[int(last.nonzero()[-1])]
    assert int((answer[before] > -torch.inf).sum()) == 1


def test_the_first_layer_that_answers_is_asked_for_the_key() -> None:
    """Expect the key of a question before the text, wherever its answer's first word is
    predicted."""
    tokenizer = build_tokenizer()
    stage = replace(TINY, batch=1, needles=(2, 2), questions=1, hard_kinds=0.0, recalled=True)
    for step in range(20):
        batch = draw(replace(stage, first=1.0), step)
        ids = batch.ids[0]
        (recalled,) = torch.where(batch.recalled != batch.targets)
        begin = int(batch.columns[recalled].min())
        answer = int(batch.columns[recalled].max())
        (key,) = batch.recalled[recalled].unique()
        (value,) = batch.targets[recalled].unique()
        assert key in ids[:20]
        assert value == ids[answer + 1]
        assert set(batch.columns[recalled].tolist()) == set(range(begin, answer + 1))
        (places,) = torch.where(ids == key)
        stated = [ids[place + 2] for place in places if ids[place + 1] == _word(tokenizer, " is")]
        assert stated == [value]
    assert torch.equal(draw(TINY).recalled, draw(TINY).targets)


def _word(tokenizer: Any, word: str) -> int:
    (id_,) = tokenizer.encode(word, add_special_tokens=False)
    return int(id_)


def test_facts_not_asked_for_count_several_times() -> None:
    """Raise them for a question alone, not for the text itself, and never the fact that it
    needs."""
    tokenizer = build_tokenizer()
    stage = replace(TINY, batch=1, needles=(3, 3), questions=1, hard_kinds=0.0)
    plain, raised = (draw(replace(stage, rivals=rivals)) for rivals in (1 + 1e-9, 16.0))
    ids = plain.ids[0]
    assert torch.equal(ids, raised.ids[0])
    more = raised.mask[0, 0].nan_to_num(neginf=0) - plain.mask[0, 0].nan_to_num(neginf=0)
    assert torch.equal(raised.mask == -torch.inf, plain.mask == -torch.inf)
    (places,) = torch.where(ids == _word(tokenizer, " is"))
    stated = places[(ids[places - 3] == _word(tokenizer, " password")) & (places < len(ids) - 8)]
    answer = plain.columns[0]
    (key,) = [key for key in ids[stated - 1] if key in ids[answer - 8 : answer]]
    rival = more[answer, stated - 1]
    assert (rival == 0).tolist() == [bool(ids[place - 1] == key) for place in stated]
    assert 0 < rival.max() <= math.log(16)
    assert (more[: int(stated.max())] == 0).all()


def test_several_facts_are_asked_for_as_often_as_the_stage_says() -> None:
    stage = replace(TINY, batch=1, needles=(3, 3), hard_kinds=0.0)
    for several, asked in ((None, 0), (0.0, 0), (1.0, 3)):
        ids = draw(replace(stage, several=several)).ids[0]
        assert int((ids == _word(build_tokenizer(), " passwords")).sum()) == asked


def test_a_key_is_overlooked_as_the_first_layer_says() -> None:
    model = build_model(build_tokenizer())
    model.set_attn_implementation("eager")
    facts = BatchMaker(build_tokenizer(), 0, TEXTS).facts(TINY, 0)
    assert len(facts[:, KEY].unique()) == len(facts[:, VALUE].unique()) == len(facts) == len(KEYS)
    with torch.no_grad():
        first = model.model(facts, output_attentions=True).attentions[0]
        got = overlooked(model, facts)
    best = first[:, :, VALUE, KEY].amax(1)
    torch.testing.assert_close(got, (-best.log() - ENOUGH).clamp(min=0).mean())


def test_a_key_that_no_head_attends_to_has_a_gradient() -> None:
    """The gradient of the attention itself is as small as the attention."""
    torch.manual_seed(0)
    model = build_model(build_tokenizer())
    first = model.model.layers[0].self_attn
    with torch.no_grad():
        first.q_proj.weight *= 30
        first.k_proj.weight *= 30
    facts = BatchMaker(build_tokenizer(), 0, TEXTS).facts(TINY, 0)
    little = max((overlooked(model, fact) for fact in facts.split(1)), key=lambda loss: loss.item())
    attended = (-little - ENOUGH).exp()
    weights = (first.q_proj.weight, first.k_proj.weight)
    of_logarithm = torch.autograd.grad(little, weights, retain_graph=True)
    of_attention = torch.autograd.grad(attended, weights)
    for through, nearly_none in zip(of_logarithm, of_attention, strict=True):
        assert through.norm() > 1e-2
        assert nearly_none.norm() < 1e-4


def test_a_second_look_up_begins_as_a_copy_of_the_first(tmp_path: Path) -> None:
    still = replace(EVERYTHING, steps=1, second_look_up=True, learning_rate=(0.0, 0.0))
    trainer = Trainer(tmp_path, 3, TEXTS, Recipe(stages=(replace(TINY, steps=1), still)))
    trainer.train()
    first, second = trainer.model.model.layers[1:3]
    for name, parameter in first.self_attn.named_parameters():
        assert torch.equal(parameter, second.self_attn.get_parameter(name))


def test_a_raised_logit_weighs_as_much_as_copies() -> None:
    """Check the pretended length on a text that is really repeated."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8), torch.randn(5, 8), torch.randn(5, 8)
    copies = torch.tensor([1, 7, 7, 1, 7])
    repeated = torch.softmax(q @ k.repeat_interleave(copies, 0).T, -1)
    raised = torch.softmax(q @ k.T + copies.log(), -1)
    expected = repeated @ v.repeat_interleave(copies, 0)
    torch.testing.assert_close(raised @ v, expected)


def test_each_later_layer_answers() -> None:
    tokenizer = build_tokenizer()
    batch = draw(TINY)
    model = build_model(tokenizer)
    with torch.no_grad():
        states = layer_states(model, batch)
    shape = (len(batch.targets), model.config.hidden_size)
    assert [state.shape for state in states] == [shape] * (model.config.num_hidden_layers - 1)


def test_attention_of_training_is_the_model_s_own() -> None:
    tokenizer = build_tokenizer()
    batch = draw(EVERYTHING)
    model = build_model(tokenizer)
    with torch.no_grad():
        own = layer_states(model, batch)[-1]
        model.set_attn_implementation(attention.ATTENTION_NAME)
        torch.testing.assert_close(layer_states(model, batch)[-1], own, rtol=1e-4, atol=1e-4)


def test_cross_entropy_is_torch_s() -> None:
    torch.manual_seed(0)
    states = torch.randn(2 * ROWS + 5, 16, requires_grad=True)
    head = torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(30, (len(states),))
    loss, right = cross_entropy(states, head, targets)
    got = torch.autograd.grad(3 * loss, (states, head))
    logits = states @ head.T
    expected = F.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    assert (right == (logits.argmax(-1) == targets)).float().mean() > 0.97
    for ours, theirs in zip(got, torch.autograd.grad(3 * expected, (states, head)), strict=True):
        # Computed in bfloat16.
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.02 * float(theirs.abs().max()))


def test_the_digest_is_of_all_texts_and_their_kinds() -> None:
    shifted = TrainingTexts((*TEXTS.documents, *TEXTS.programs), ())
    assert len({TEXTS.digest, shifted.digest, TrainingTexts(("a",), ("b",)).digest}) == 3
    assert TEXTS.digest == TrainingTexts(TEXTS.documents, TEXTS.programs).digest


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    text = "Züricher\tcopyright notices, 東京 and 🙂\n\n\n    x = [1, 2.5e-3]  # code"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("architecture", [NEEDLE, DEEP], ids=["needle", "deep"])
def test_an_interrupted_run_ends_with_the_same_weights(
    tmp_path: Path, architecture: Architecture
) -> None:
    stages = (
        replace(TINY, steps=2),
        replace(
            EVERYTHING, steps=2, recalled=True, second_look_up=True, look_back=True, rivals=4.0
        ),
    )
    recipe = Recipe(architecture=architecture, stages=stages)
    whole = Trainer(tmp_path / "whole", 3, TEXTS, recipe)
    whole.train()
    half = Trainer(tmp_path / "half", 3, TEXTS, recipe)
    half.train(until=3)
    resumed = Trainer(tmp_path / "half", 3, TEXTS, recipe)
    assert resumed.step == 3
    resumed.train()
    for first, second in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(first, second)
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(tmp_path / "half", 3, TEXTS, replace(recipe, stages=stages[:1]))


def test_the_second_model_is_built_as_its_recipe_says() -> None:
    """Eight layers with a KV head to each query head; the second, fourth, sixth and last answer."""
    recipe = RECIPES["deep"]
    model = build_model(build_tokenizer(), recipe.architecture)
    config = model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (8, 4, 4)
    with torch.no_grad():
        batch = draw(TINY)
        answering = layer_states(model, batch, recipe.architecture.answers_every)
        every = layer_states(model, batch)
    assert len(every) == 7
    for state, expected in zip(answering, (every[0], every[2], every[4], every[6]), strict=True):
        assert torch.equal(state, expected)
